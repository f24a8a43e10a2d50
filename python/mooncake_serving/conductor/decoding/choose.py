"""Where a request is decoded: on the instance with room whose steps stay shortest."""

import numpy as np

from ..cluster import Cluster
from ..costs import DecodeCost
from ..decision import DecodeChoice
from ..reasons import Reason, Why
from ..request import Request
from .load import DecodeLoad


def choose_decode(
    request: Request,
    cluster: Cluster,
    cost: DecodeCost,
    candidates: np.ndarray,
    load: DecodeLoad,
    *,
    needs_room: bool = True,
    why: Why = Why.LEAST_TBT,
) -> DecodeChoice | Reason:
    """Choose the instance whose steps are shortest once all its reservations are in its batch.

    Equivalent to::

        for i in candidates:
            batch, tokens = load.batch_size[i] + 1, load.kv_tokens[i] + request.num_tokens
            if request.max_kv_tokens > capacity_tokens[i]: continue
            if needs_room:
                if tokens + reserved_tokens[i] + request.num_output_tokens > capacity_tokens[i]:
                    continue
                if batch + reserved_requests[i] > max_batch_size[i]: continue
            reserved_tbt_s = cost(batch + reserved_requests[i], tokens + reserved_tokens[i])
            tbt_s = cost(batch, tokens)
        choose the least reserved_tbt_s

    (SelectDecodingInstance of Mooncake's algorithm 1: load balance by the predicted TBT.)

    Args:
        request: to be placed.
        cluster: its capacities.
        cost: of a step.
        candidates: ``[c]`` instances that may be chosen.
        load: of all instances, now or at a later time.
        needs_room: skip instances without room now; otherwise a request may have to wait there.
        why: given as the reason of the choice.

    Returns:
        The choice, or the reason why there is none.
    """
    if not len(candidates):
        return Reason(Why.NO_DECODE_INSTANCE)
    batch = load.batch_size[candidates] + 1
    tokens = load.kv_tokens[candidates] + request.num_tokens
    all_batch = batch + load.reserved_requests[candidates]
    all_tokens = tokens + load.reserved_tokens[candidates]
    reserved_tbt_s = cost.seconds(all_batch, all_tokens)
    room = has_room(request, cluster, candidates, load, needs_room=needs_room)
    if not room.any():
        return Reason(Why.NO_DECODE_ROOM, {"kv_tokens": request.num_kv_tokens})
    position = int(np.argmin(np.where(room, reserved_tbt_s, np.inf)))
    tbt_s, batch_size = float(cost.seconds(batch[position], tokens[position])), int(batch[position])
    return DecodeChoice(
        instance=int(candidates[position]),
        batch_size=batch_size,
        kv_tokens=int(tokens[position]),
        tbt_s=tbt_s,
        reserved_tbt_s=float(reserved_tbt_s[position]),
        reason=Reason(why, {"tbt_s": tbt_s, "batch_size": batch_size}),
    )


def has_room(
    request: Request,
    cluster: Cluster,
    candidates: np.ndarray,
    load: DecodeLoad,
    *,
    needs_room: bool = True,
) -> np.ndarray:
    """Return which candidates have room for a request on top of a load, reservations included.

    Without ``needs_room``, which of them could hold it at all.
    """
    holds = request.max_kv_tokens <= cluster.capacity_tokens[candidates]
    if not needs_room:
        return holds
    batch = load.batch_size[candidates] + load.reserved_requests[candidates] + 1
    tokens = load.kv_tokens[candidates] + load.reserved_tokens[candidates] + request.num_kv_tokens
    fits = tokens <= cluster.capacity_tokens[candidates]
    return holds & fits & (batch <= cluster.max_batch_size[candidates])
