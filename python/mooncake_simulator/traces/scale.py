"""The same trace, faster or slower, with more or fewer requests."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mooncake_serving.conductor.errors import InvalidArgument, check_count, check_positive

from .request import TraceRequest

MAX_REQUESTS = 10_000_000  # some 10 GB; a larger load is a slip of the hand, not a trace


def scale_trace(
    requests: Sequence[TraceRequest], *, time: float = 1.0, load: float = 1.0, seed: int = 0
) -> list[TraceRequest]:
    """Scale a trace's clock, and multiply its requests.

    ``time`` moves each request to ``time * timestamp_ms``: 0.5 replays at twice the speed, with all
    bursts and all reuse closer together. ``load`` keeps the clock, and plays that many copies at
    once: each copy starts elsewhere in the trace, so that bursts do not coincide, and has its own
    hash ids, since its users are different ones. For a fraction of a copy, requests are kept at
    random with equal probability; what they shared with dropped ones is lost. ``load < 1`` thins in
    the same way.

    Args:
        requests: in the order of time.
        time: factor of the clock, positive.
        load: factor of the number of requests, positive; of at most ``MAX_REQUESTS`` in the end.
        seed: of the random choice, at least 0.

    Raises:
        InvalidArgument: an argument is not as above.
    """
    for name, value in (("time", time), ("load", load)):
        check_positive("scale_trace", name, value)
    check_count("scale_trace", "seed", seed, 0)
    if len(requests) * load > MAX_REQUESTS:
        raise InvalidArgument(
            f"scale_trace: load must make at most {MAX_REQUESTS:,} requests of {len(requests):,}, "
            f"got {load:g}"
        )
    if not requests:
        return []
    rng = np.random.default_rng(seed)
    end_ms = requests[-1].timestamp_ms
    num_copies = math.ceil(load)
    stride = 1 + max((max(r.hash_ids) for r in requests if r.hash_ids), default=0)
    out = []
    for copy in range(num_copies):
        kept_share = min(1.0, load - copy)
        shift_ms = end_ms * copy / num_copies
        kept = np.flatnonzero(rng.random(len(requests)) < kept_share)
        for request in (requests[int(i)] for i in kept):
            at_ms = request.timestamp_ms + shift_ms
            at_ms = at_ms - end_ms if at_ms > end_ms else at_ms
            ids = tuple(hash_id + copy * stride for hash_id in request.hash_ids)
            out.append(replace(request, timestamp_ms=at_ms * time, hash_ids=ids))
    return sorted(out, key=lambda request: request.timestamp_ms)
