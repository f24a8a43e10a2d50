"""Reservations: decisions written into the state that the next decision reads."""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from .cluster import Cluster
from .costs import Costs
from .decision import Decision, DecodeChoice, Fetch, PrefillChoice
from .decoding import InFlight
from .errors import InvalidArgument, check_finite, check_index, shown
from .index import Index
from .prefill_queues import PrefillQueues
from .request import Request


class Reservations:
    """Follows each accepted request through its life, in ``cluster``, ``index`` and ``in_flight``.

    Counters are only added to, and each addition is subtracted again, so that an owner may add to
    the same ones. The times of a queue and a backlog pass by themselves; what a request that is
    given up before its prefill is over has added to them is subtracted, all of it, though part of
    it may be over.
    """

    def __init__(self, cluster: Cluster, index: Index, costs: Costs, in_flight: InFlight) -> None:
        self.cluster, self.index, self.costs, self.in_flight = cluster, index, costs, in_flight
        self.open: dict[Hashable, Decision] = {}
        self.decoding: set[Hashable] = set()
        self.fetching: dict[Hashable, _Sending] = {}
        # Reserved blocks: the instances that will compute them, as bits.
        self.uncomputed: dict[int, int] = {}
        self.queues = PrefillQueues(cluster)
        self.coming_tokens = np.zeros(cluster.num_instances, np.int64)  # of reserved_requests

    def get(self, op: str, request_id: Hashable) -> Decision:
        """Return the decision about a request that is not over."""
        try:
            return self.open[request_id]
        except (KeyError, TypeError):  # unknown, or not hashable
            what = f"{op}: request_id must be of a committed request, got {shown(request_id)}"
            raise InvalidArgument(what) from None

    def reserve(self, decision: Decision) -> None:
        """Record the queue, the source's backlog, the future cache content and the reserved memory.

        Everything is checked before the first change: a decision is never half committed.
        """
        prefill = self._check_committable(decision)
        request, cluster, now_s, instance = (
            decision.request,
            self.cluster,
            decision.at_s,
            prefill.instance,
        )
        # First what is foreign, and may raise: a cost, then an index.
        sending = self._sending(prefill.fetch) if prefill.fetch is not None else None
        self.index.add(instance, request.keys)
        self.open[request.request_id] = decision
        bit, uncomputed = 1 << instance, self.uncomputed
        for key in _new_keys(request, prefill):
            before = uncomputed.get(key, 0)
            uncomputed[key] = before | bit if before else bit
        self.queues.put(request.request_id, prefill, now_s)
        if sending is not None:
            source = sending.fetch.source
            backlog_from_s = max(float(cluster.sending_until_s[source]), now_s)
            cluster.sending_until_s[source] = backlog_from_s + sending.seconds
            cluster.num_sending[source] += 1
            self.fetching[request.request_id] = sending
        if decision.decode is not None:
            self._count_decode(decision, decision.decode, +1)
            self.in_flight.put(request, decision.decode.instance, now_s + prefill.ttft_s)

    def fetched(self, decision: Decision) -> None:
        """Remove a completed fetch from its source's backlog.

        A late call about a request that was given up concerns no other fetch of the same id.
        """
        sending = self.fetching.get(decision.request.request_id)
        if sending and decision.prefill and decision.prefill.fetch is sending.fetch:
            self._stop_fetch(decision.request.request_id)

    def source_failed(self, instance: int) -> None:
        """Cancel the fetches from an instance that can no longer send."""
        for request_id, sending in list(self.fetching.items()):
            if sending.fetch.source == instance:
                self._stop_fetch(request_id)

    def sendable(self, keys: Sequence[int], matched_blocks: np.ndarray) -> np.ndarray:
        """Return which part of a prefix each instance can send: what is computed already.

        Args:
            keys: a chain from its first block.
            matched_blocks: ``[num_instances]``, the longest prefix of it that each one holds, or
                will hold when what is reserved has been computed.
        """
        blocks, cut, get = matched_blocks, 0, self.uncomputed.get
        for position, key in enumerate(keys if self.uncomputed else ()):
            if not (instances := get(key, 0) & ~cut):
                continue
            if not cut:
                blocks = matched_blocks.copy()
            cut |= instances
            while instances:
                instance = instances.bit_length() - 1
                blocks[instance] = min(blocks[instance], position)
                instances ^= 1 << instance
        return blocks

    def release(self, request_id: Hashable) -> Decision:
        """Release what is reserved for a request that is not decoded yet, and leaves prefill."""
        decision = self.open[request_id]
        if decision.prefill is not None:
            self.queues.leave(request_id, decision.prefill.instance)
            bit = 1 << decision.prefill.instance
            for key in _new_keys(decision.request, decision.prefill):
                left = self.uncomputed.pop(key, 0) & ~bit
                if left:
                    self.uncomputed[key] = left
        if decision.decode is not None:
            self._count_decode(decision, decision.decode, -1)
        return decision

    def begin_decode(self, decision: Decision, decode: DecodeChoice, now_s: float) -> None:
        """Add a request without reservations to the batch that decodes it."""
        request, instance = decision.request, decode.instance
        self.open[request.request_id] = replace(decision, decode=decode)
        self.decoding.add(request.request_id)
        self.cluster.batch_size[instance] += 1
        self.cluster.kv_tokens[instance] += request.num_tokens
        self.cluster.reserved_tokens[instance] += request.num_output_tokens
        self.in_flight.put(request, instance, now_s)

    def end(self, request_id: Hashable, num_generated: int = 0) -> None:
        """Release everything that a request still holds, wherever it is in its life."""
        decision = self.open[request_id]
        if request_id not in self.decoding and decision.prefill is not None:
            self._give_up(request_id, decision.prefill)
        self.fetched(decision)
        if request_id in self.decoding and decision.decode is not None:
            request, instance = decision.request, decision.decode.instance
            self.cluster.batch_size[instance] -= 1
            self.cluster.kv_tokens[instance] -= request.num_tokens + num_generated
            self.cluster.reserved_tokens[instance] -= request.num_output_tokens - num_generated
        else:
            self.release(request_id)
        self.forget(request_id)

    def forget(self, request_id: Hashable) -> None:
        """Delete a request that holds nothing any more."""
        self.open.pop(request_id, None)
        self.decoding.discard(request_id)
        self.in_flight.remove(request_id)

    def _check_committable(self, decision: Decision) -> PrefillChoice:
        """Refuse a decision that was refused, is committed already, or cannot be carried out."""
        prefill, request_id = decision.prefill, decision.request.request_id
        reserved = request_id in self.open
        if not decision.accepted or prefill is None or reserved:
            what = "again" if reserved else f"refused: {decision.reason}"
            got = f"request {shown(request_id)} {what}"
            what = "commit: decision must be accepted and not yet committed"
            raise InvalidArgument(f"{what}, got {got}")
        instances = {"prefill": prefill.instance}
        if prefill.fetch is not None:
            instances["fetch.source"] = prefill.fetch.source
        if decision.decode is not None:
            instances["decode"] = decision.decode.instance
        for name, instance in instances.items():
            check_index("commit", f"decision.{name}", instance, self.cluster.num_instances)
            if not self.cluster.up[instance]:  # it has failed since: decide again
                what = f"commit: decision.{name} must be an instance that is up"
                raise InvalidArgument(f"{what}, got {instance}, which is down")
        check_finite("commit", "decision.at_s", decision.at_s)
        return prefill

    def _give_up(self, request_id: Hashable, prefill: PrefillChoice) -> None:
        """Free the time of a prefill that will not take place, and of its fetch if that is on."""
        self.queues.give_up(request_id, prefill.instance)
        if sending := self.fetching.get(request_id):
            self.cluster.sending_until_s[sending.fetch.source] -= sending.seconds

    def _stop_fetch(self, request_id: Hashable) -> None:
        self.cluster.num_sending[self.fetching.pop(request_id).fetch.source] -= 1

    def _sending(self, fetch: Fetch) -> "_Sending":
        return _Sending(fetch, float(self.costs.transfer.seconds(fetch.num_tokens, 0.0, 0)))

    def _count_decode(self, decision: Decision, decode: DecodeChoice, sign: int) -> None:
        self.cluster.reserved_requests[decode.instance] += sign
        self.cluster.reserved_tokens[decode.instance] += sign * decision.request.num_kv_tokens
        self.coming_tokens[decode.instance] += sign * decision.request.num_kv_tokens


class _Sending(NamedTuple):
    """A fetch that is not over, and how long its source sends for it, with all of its bandwidth."""

    fetch: Fetch
    seconds: float


def _new_keys(request: Request, prefill: PrefillChoice) -> Sequence[int]:
    """Return the blocks that an instance does not hold, nor will by an earlier prefill."""
    return request.keys[-(-prefill.local_tokens // request.block_size) :]
