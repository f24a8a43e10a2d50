"""Conductor: decides about each request, and reserves what it promises.

decision = conductor.decide(request, now_s)
if decision.accepted:
    conductor.commit(decision)
    ...                                    # the fetch, the prefill
    later = conductor.prefilled(request.request_id, now_s)
    if later.accepted:
        ...                                # the tokens
        conductor.decoded(request.request_id)
"""

from collections.abc import Hashable
from threading import RLock
from typing import Any

import numpy as np

from .admission import Admission, Arrival, EarlyRejection
from .cluster import Cluster, Role
from .costs import Costs
from .decision import Decision, DecodeChoice
from .decoding import DecodeLoad, InFlight, choose_decode, has_room
from .errors import (
    InvalidArgument,
    check_count,
    check_finite,
    check_has,
    check_index,
    check_instance,
    shown,
)
from .index import Index
from .policies import KVCacheCentric, PrefillPolicy, PrefillView
from .reasons import Reason, Why
from .request import Request, Slo
from .reservations import Reservations
from .tiers import OneTier, Tiers


class Conductor:
    """Global scheduler of prefill and decode instances (Mooncake, FAST'25, algorithm 1).

    The same calls in the same state give the same decisions: nothing here reads a clock, and
    ``seed`` is the only source of randomness.

    Several threads may call it: each call holds ``lock``. What they write themselves to ``cluster``
    and ``index``, they write while they hold it, too::

        with conductor.lock:
            conductor.index.apply(event)

    Args:
        cluster: the state of all instances, which the owner keeps up to date.
        index: which of them hold which block.
        costs: models of prefill, decode and transfers.
        slo: objectives of the requests that have none of their own.
        policy: where to prefill.
        admission: which requests are accepted under overload.
        tiers: which blocks would have to be loaded; by default none.
        seed: for policies that choose at random.
    """

    def __init__(
        self,
        cluster: Cluster,
        index: Index,
        costs: Costs,
        slo: Slo,
        *,
        policy: PrefillPolicy | None = None,
        admission: Admission | None = None,
        tiers: Tiers | None = None,
        seed: int = 0,
    ) -> None:
        check_instance("Conductor", "cluster", cluster, Cluster)
        check_has("Conductor", "index", index, "num_instances", "an Index")
        check_instance("Conductor", "costs", costs, Costs)
        check_instance("Conductor", "slo", slo, Slo)
        if policy is not None:
            check_has("Conductor", "policy", policy, "choose", "a PrefillPolicy")
        if admission is not None:
            check_has("Conductor", "admission", admission, "decode_load", "an Admission")
        if tiers is not None:
            check_has("Conductor", "tiers", tiers, "lookup", "Tiers")
        if index.num_instances != cluster.num_instances:
            raise InvalidArgument(
                f"Conductor: index must be of {cluster.num_instances} instances, "
                f"got {index.num_instances}"
            )
        check_count("Conductor", "seed", seed, 0)
        self.cluster, self.index, self.costs, self.slo = cluster, index, costs, slo
        self.policy: PrefillPolicy = policy if policy is not None else KVCacheCentric()
        self.admission: Admission = admission if admission is not None else EarlyRejection()
        self.tiers: Tiers = tiers if tiers is not None else OneTier()
        self.in_flight = InFlight()
        self.reservations = Reservations(cluster, index, costs, self.in_flight)
        self.lock = RLock()
        self._rng = np.random.default_rng(seed)

    def decide(self, request: Request, now_s: float) -> Decision:
        """Decide where a request goes, or that it is refused; nothing is reserved.

        Equivalent to::

            if no instance can ever hold it: refuse
            prefill = policy(request)              # the least predicted TTFT, for algorithm 1
            if no one has room to decode what it prefills: prefill = policy(request), without those
            if admission refuses its TTFT: refuse
            decode = the least predicted TBT       # if admission wants it at arrival
            if admission refuses its TBT: refuse

        It changes no state except a policy's own, as that of round robin.

        Raises:
            InvalidArgument: it is not a Request, or ``now_s`` is not a finite number.
        """
        check_instance("decide", "request", request, Request)
        check_finite("decide", "now_s", now_s)
        with self.lock:
            return self._decide(request, now_s)

    def _decide(self, request: Request, now_s: float) -> Decision:
        cluster = self.cluster
        candidates = self._prefill_candidates(request)
        if isinstance(candidates, Reason):
            return Decision.refuse(request, now_s, candidates)
        blocks, load_s = self.tiers.lookup(request, self.index.match(request.keys))
        sendable = self.reservations.sendable(request.keys, blocks)

        def place(candidates: np.ndarray) -> tuple[Arrival, DecodeLoad | None]:
            view = PrefillView.of(
                request,
                now_s,
                cluster,
                self.costs,
                candidates,
                blocks,
                sendable,
                load_s,
                self._rng,
            )
            prefill, decode_cost = self.policy.choose(view), self.costs.decode
            slo = request.slo or self.slo
            arrival = Arrival(request, slo, now_s, prefill, cluster, self.in_flight, decode_cost)
            return arrival, self.admission.decode_load(arrival)

        arrival, load = place(candidates)
        others = self._with_room_instead(arrival, candidates, load)
        if len(others):
            arrival, load = place(others)
        prefill = arrival.prefill
        if reason := self.admission.refuse_prefill(arrival):
            return Decision.refuse(request, now_s, reason, prefill)
        if load is None:
            return Decision.accept(request, now_s, prefill, None)
        decode = self._choose_decode(request, prefill.instance, load)
        if isinstance(decode, Reason):
            return Decision.refuse(request, now_s, decode, prefill)
        if reason := self.admission.refuse_decode(arrival, load, decode):
            return Decision.refuse(request, now_s, reason, prefill, decode)
        return Decision.accept(request, now_s, prefill, decode)

    def commit(self, decision: Decision) -> None:
        """Write what an accepted decision promises into ``cluster`` and ``index``.

        Raises:
            InvalidArgument: it is not a Decision, was refused, is committed already, or names an
                instance that is not in this cluster, or is down (it has failed since: decide
                again); nothing is written then.
        """
        check_instance("commit", "decision", decision, Decision)
        with self.lock:
            self.reservations.reserve(decision)

    def fetched(self, decision: Decision) -> None:
        """Record that a decision's fetch is over.

        No effect without a fetch, a second time, or if the request was given up meanwhile.
        """
        check_instance("fetched", "decision", decision, Decision)
        with self.lock:
            self.reservations.fetched(decision)

    def prefilled(self, request_id: Hashable, now_s: float) -> Decision:
        """Record that a prefill is over, and decide whether and where the request is decoded.

        It is the instance chosen at arrival, if there is one that is up and has room; otherwise
        another one, to which the prefill instance sends the KV again. A request that is refused
        here is forgotten; its prefill was to no effect, though its blocks remain cached.

        Raises:
            InvalidArgument: the request was not committed, or is decoded already; or ``now_s`` is
                not a finite number. Nothing has changed then.
        """
        check_finite("prefilled", "now_s", now_s)
        with self.lock:
            return self._prefilled(request_id, now_s)

    def _prefilled(self, request_id: Hashable, now_s: float) -> Decision:
        decision = self.reservations.get("prefilled", request_id)
        if request_id in self.reservations.decoding or decision.prefill is None:
            what = f"prefilled: request {shown(request_id)} must not be decoded already"
            raise InvalidArgument(what)
        request, prefill = decision.request, decision.prefill
        chosen = decision.decode.instance if decision.decode else None
        load = DecodeLoad.now(self.cluster).without_reserved(self.reservations.coming_tokens)
        decode = self._choose_decode(request, prefill.instance, load, chosen)
        if isinstance(decode, Reason):
            later = Decision.refuse(request, now_s, decode, prefill)
        elif reason := self.admission.refuse_later(request, request.slo or self.slo, decode):
            later = Decision.refuse(request, now_s, reason, prefill, decode)
        else:
            later = Decision.accept(request, now_s, prefill, decode)
        # Only now, when nothing foreign can raise any more.
        self.reservations.fetched(decision)
        self.reservations.release(request_id)
        if later.accepted and later.decode is not None:
            self.reservations.begin_decode(decision, later.decode, now_s)
        else:
            self.reservations.forget(request_id)
        return later

    def decoded(self, request_id: Hashable, num_generated: int = 0) -> None:
        """Record that a request is over, finished or given up, and free what was reserved for it.

        Before its prefill is over, it leaves the queue: ``free_at_s`` and the backlog of the source
        that sends to it lose the time that was reserved for it. An owner that carries on with the
        prefill, or has done part of it, reports ``free_at_s`` anew.

        Args:
            request_id: of a committed request.
            num_generated: tokens that the owner has moved from ``cluster.reserved_tokens`` to
                ``cluster.kv_tokens`` as they were generated; 0 if it does not track them.
        """
        check_count("decoded", "num_generated", num_generated, 0)
        with self.lock:
            self.reservations.get("decoded", request_id)
            self.reservations.end(request_id, num_generated)

    def failed(self, instance: int) -> list[Any]:
        """Record that an instance is down, and its cache lost.

        Its events are expected from 0 again. If it was only unreachable, and continues where it
        was, ``index.apply`` asks for a snapshot. Its times in ``cluster`` are cleared, and its
        counters lose what the conductor has added to them: the owner subtracts its own, and moves
        generated tokens of the lost requests back to ``reserved_tokens``.

        Returns:
            The ids of the requests that were to be prefilled or decoded there. For the conductor
            they are over, and may be decided about again. A request that only fetches from there is
            not among them: it continues without the prefix, later than predicted.
        """
        check_index("failed", "instance", instance, self.cluster.num_instances)
        with self.lock:
            return self._failed(instance)

    def _failed(self, instance: int) -> list[Any]:
        lost: list[Any] = []
        for request_id, decision in list(self.reservations.open.items()):
            prefills = decision.prefill is not None and decision.prefill.instance == instance
            decodes = decision.decode is not None and decision.decode.instance == instance
            if decodes or (prefills and request_id not in self.reservations.decoding):
                self.reservations.end(request_id)
                lost.append(request_id)
        self.reservations.source_failed(instance)
        self.cluster.reset(instance)
        self.cluster.up[instance] = False
        self.index.clear(instance)
        return lost

    def recovered(self, instance: int) -> None:
        """Record that an instance is up again, with the cache it has reported since it failed."""
        check_index("recovered", "instance", instance, self.cluster.num_instances)
        with self.lock:
            self.cluster.up[instance] = True

    def _prefill_candidates(self, request: Request) -> np.ndarray | Reason:
        """List the instances from which a request can be decoded, given its size.

        While none is up that only decodes, those that do both go before those that only prefill.
        """
        candidates = self.cluster.of_role(Role.PREFILL)
        if not len(candidates):
            return Reason(Why.NO_PREFILL_INSTANCE)
        most = self.cluster.most_kv_tokens(candidates)
        able = candidates[request.max_kv_tokens <= most]
        if len(able):
            own = able[self.cluster.role[able] == Role.BOTH]
            return own if len(own) and not len(self._decoders()) else able
        values = {"kv_tokens": request.max_kv_tokens, "capacity_tokens": int(most.max())}
        return Reason(Why.TOO_LONG, values)

    def _with_room_instead(
        self, arrival: Arrival, candidates: np.ndarray, load: DecodeLoad | None
    ) -> np.ndarray:
        """List who may prefill instead of a chosen instance whose request finds no room to decode.

        That is room on the instance itself if it does both, otherwise on any that only decodes.
        Nobody, if there is room, or none for any other either.
        """
        cluster, load = self.cluster, load or DecodeLoad.now(self.cluster)
        keeps = cluster.role[candidates] == Role.BOTH
        if not keeps.any():  # then all can do the same
            return candidates[:0]

        def room(instances: np.ndarray) -> np.ndarray:
            needs_room = self.admission.needs_room
            return has_room(arrival.request, cluster, instances, load, needs_room=needs_room)

        able = candidates[np.where(keeps, room(candidates), room(self._decoders()).any())]
        return candidates[:0] if arrival.prefill.instance in able else able

    def _decoders(self) -> np.ndarray:
        """List the instances that decode what others prefill."""
        return self.cluster.of_role_only(Role.DECODE)

    def _choose_decode(
        self, request: Request, prefill: int, load: DecodeLoad, chosen: int | None = None
    ) -> DecodeChoice | Reason:
        cluster = self.cluster

        def among(candidates: np.ndarray, why: Why = Why.LEAST_TBT) -> DecodeChoice | Reason:
            cost, needs_room = self.costs.decode, self.admission.needs_room
            return choose_decode(
                request, cluster, cost, candidates, load, needs_room=needs_room, why=why
            )

        if cluster.role[prefill] == Role.BOTH:
            return among(np.array([prefill]), Why.SAME_INSTANCE)
        if chosen is not None and cluster.up[chosen]:
            choice = among(np.array([chosen]))
            if isinstance(choice, DecodeChoice):
                return choice
        return among(self._decoders())
