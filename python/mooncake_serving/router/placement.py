"""Where requests go: the conductor, on engines as they are now."""

import bisect
import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from mooncake_serving.conductor import (
    AcceptAll,
    Admission,
    Baseline,
    Cluster,
    Conductor,
    Costs,
    Decision,
    DecodeChoice,
    DecodeLoad,
    EarlyRejection,
    Heat,
    KVCacheCentric,
    Limits,
    LocalCacheAware,
    NicTransfer,
    PredictiveRejection,
    PrefillPolicy,
    PrefixIndex,
    Reason,
    ReplicaPolicy,
    Replicate,
    Request,
    Role,
    Slo,
    Why,
)
from mooncake_serving.conductor.admission import Arrival

from .block_names import block_names
from .call import Call
from .config import AdmissionConfig, ClassConfig, RouterConfig
from .fitted_costs import FittedDecode, FittedPrefill
from .handoff import HANDOFFS
from .instances import Instances
from .known_blocks import KnownBlocks
from .others import EngineLoad, OthersLoad
from .prefills import PrefillBacklog

NO_OBJECTIVE_S = 1e9
UNKNOWN_CAPACITY = 2**62
NO_ROLE = 0  # of a place without an engine
OWN_WEIGHT = 1 / 16  # of a new prefill in the mean of this router's own
MAX_ASSUMED = 1 << 16  # blocks of an engine whose capacity is unknown
OTHERS_MIGHT = (Why.NO_PREFILL_INSTANCE, Why.NO_DECODE_INSTANCE, Why.TOO_LONG)
NO_TRANSFER = NicTransfer(bytes_per_token=1.0, bytes_per_s=1.0)  # no policy asks for it


@dataclass(eq=False)
class Placed:
    """A request that was placed, and is not over.

    Attributes:
        decision: the last one about it.
        sent_s: when its prefill was sent.
        lacking: engines that do not serve its model.
        tells_costs: whether its tokens are known, and all of them are computed or cached.
        is_prefilled: whether its prefill is over.
        is_held: whether the conductor has reserved something for it.
        num_samples: requests that it is where it generates.
        at: the engines that have it now, each once for every request that it is there.
        samples: requests and tokens of its batch, seconds between its events; not learnt from yet.
    """

    decision: Decision
    sent_s: float
    lacking: Collection[int] = ()
    tells_costs: bool = True
    is_prefilled: bool = False
    is_held: bool = True
    num_samples: int = 1
    at: tuple[int, ...] = ()
    samples: list[tuple[float, float, float]] = field(default_factory=list)

    @property
    def prefill(self) -> int:
        """Which engine prefills it."""
        assert self.decision.prefill is not None
        return self.decision.prefill.instance

    @property
    def decode(self) -> int:
        """Which engine decodes it; the one that prefills it, unless another one is chosen."""
        chosen = self.decision.decode
        return self.prefill if chosen is None else chosen.instance


class Placement:
    """Decides where requests go, and follows them.

    For one thread, except that events of engines may be applied to ``blocks`` by others.

    Args:
        config: of the router.
        instances: the engines; each is also to be ``add``ed.
        clock: seconds, of which only differences matter.

    Attributes:
        conductor: that decides.
        prefill_cost: its model, which follows what is measured.
        decode_cost: the same.
        blocks: what each engine holds, by its number.
        others: what engines do for others than this router.
    """

    def __init__(
        self,
        config: RouterConfig,
        instances: Instances,
        clock: Callable[[], float] = time.monotonic,
    ):
        count = instances.num_places
        self._config, self._instances, self._clock = config, instances, clock
        self._is_at_once = HANDOFFS[config.connector].is_at_once
        self._backlog = PrefillBacklog(count)
        self._own_prefill_s = 0.0
        self._open: dict[Hashable, Placed] = {}
        self._draining: set[int] = set()
        self.prefill_cost = FittedPrefill(config.costs.prefill)
        self.decode_cost = FittedDecode(config.costs.decode)
        cluster = Cluster([Role.BOTH] * count)
        cluster.role[:], cluster.up[:] = NO_ROLE, False
        self.others = OthersLoad(cluster)
        self._rule = _LiveRule(admission_rule(config.admission, chooses_decode=self._is_at_once))
        self._slos = {name: slo_of(each) for name, each in config.admission.classes.items()}
        policy, transfer = _policy(config)
        self.conductor = Conductor(
            cluster,
            PrefixIndex(count),
            Costs(self.prefill_cost, self.decode_cost, transfer),
            slo_of(config.admission),
            policy=policy,
            admission=self._rule,
        )
        self.blocks: dict[int, KnownBlocks] = {}

    def add(self, number: int) -> None:
        """Take an engine in; it is down until it is seen."""
        instance, cluster = self._instances[number], self.conductor.cluster
        with self.conductor.lock:
            cluster.role[number] = instance.role
            cluster.capacity_tokens[number] = instance.capacity_tokens or UNKNOWN_CAPACITY
            cluster.max_batch_size[number] = instance.max_batch_size
            most = self._max_assumed(number)
            self.blocks[number] = KnownBlocks(self.conductor, number, self._config.block_size, most)
            self.conductor.failed(number)

    def drain(self, number: int) -> None:
        """Place no more requests on an engine."""
        self._draining.add(number)

    def resume(self, number: int) -> None:
        """Place requests on an engine again, in the role that it has now."""
        self.conductor.cluster.role[number] = self._instances[number].role
        self._draining.discard(number)

    def remove(self, number: int) -> None:
        """Forget an engine that has no requests any more."""
        with self.conductor.lock:
            self.failed(number)
            self.conductor.cluster.role[number] = NO_ROLE
            del self.blocks[number]
        self._draining.discard(number)

    def is_draining(self, number: int) -> bool:
        """Whether an engine gets no more requests."""
        return number in self._draining

    def place(
        self,
        call: Call,
        *,
        adapter: str,
        without: Collection[int] = (),
        lacking: Collection[int] = (),
    ) -> Placed | Decision:
        """Decide about a request, and reserve what is promised.

        Args:
            call: the request.
            adapter: name of the LoRA adapter that it wants; "": none.
            without: engines that have failed it, which are not chosen if there are others.
            lacking: engines that do not serve its model, which are not chosen.

        Returns:
            Where it goes, or the decision that refuses it.
        """
        request = self._request(call, adapter)
        if call.tokens is None:
            request = self._shortened(request)
        with self.conductor.lock:
            now_s = self._clock()
            each_s = self._own_prefill_s or float(self.prefill_cost.seconds(request.num_tokens, 0))
            self._note_queues(now_s, each_s)
            decision = self._decide(request, now_s, without, lacking)
            if not decision.accepted or decision.prefill is None:
                return decision
            self.conductor.commit(decision)
            prefill = decision.prefill
            num_held = -(-prefill.local_tokens // request.block_size)
            if not call.is_semantic:  # what it approximates is not kept as the prompt's
                self.blocks[prefill.instance].assume(request.keys, num_held)
        seconds = prefill.prefill_s + (prefill.fetch.seconds if prefill.fetch else 0.0)
        self._backlog.put(request.request_id, prefill.instance, seconds, now_s)
        mean_s = self._own_prefill_s or seconds
        self._own_prefill_s = mean_s + OWN_WEIGHT * (seconds - mean_s)
        placed = self._open[request.request_id] = Placed(
            decision,
            now_s,
            lacking,
            tells_costs=call.tokens is not None and not call.is_semantic,
            num_samples=call.num_samples,
        )
        if self._is_at_once:
            self._move(placed, {placed.prefill, placed.decode}, call.num_samples)
        else:
            generates = self._instances[placed.prefill].role == Role.BOTH
            self._move(placed, {placed.prefill}, call.num_samples if generates else 1)
        return placed

    def may_hold(self, request: Request, lacking: Collection[int]) -> bool:
        """Whether an engine could hold a request if it were up, as far as is known."""
        cluster = self.conductor.cluster
        able = np.flatnonzero(cluster.role & int(Role.PREFILL) != 0)
        able = np.setdiff1d(able, [*lacking])
        return bool((cluster.most_kv_tokens(able) >= request.max_kv_tokens).any())

    def prefilled(self, placed: Placed) -> Decision | None:
        """Record that a prefill is over, and decide where the request is decoded.

        Returns:
            The decision, which may refuse it; None if there is nothing to decide any more: the
            conductor gave the request up as one of its engines failed, or this was said before.
        """
        if placed.is_prefilled:
            return None
        placed.is_prefilled = True
        now_s, request = self._clock(), placed.decision.request
        if (blocks := self.blocks.get(placed.prefill)) is not None:
            blocks.computed(request.keys)
        was_alone = self._backlog.end(request.request_id, placed.prefill, now_s)
        prefill = placed.decision.prefill
        was_alone = was_alone and not self.others.are_at(placed.prefill)
        is_measured = was_alone and placed.tells_costs and now_s > placed.sent_s
        if is_measured and prefill is not None and prefill.fetch is None:
            self.prefill_cost.observe(
                request.num_tokens, prefill.prefix_tokens, now_s - placed.sent_s
            )
        if not placed.is_held:
            return None
        is_coupled = self._instances[placed.prefill].role == Role.BOTH
        is_running = is_coupled or self._is_at_once
        others = self._draining - {placed.decode}
        with self._excluded({*placed.lacking, *others}), self._rule.waived(is_running):
            later = self.conductor.prefilled(request.request_id, now_s)
        placed.is_held = later.accepted
        if later.accepted:
            placed.decision = dataclasses.replace(placed.decision, decode=later.decode)
            self._move(placed, {placed.decode}, placed.num_samples)
        return later

    def estimated_prefilled(self, placed: Placed) -> None:
        """Record that a prefill is probably over, of which its engine does not tell the end.

        Its time is not measured: without a place in the backlog it counts as disturbed.
        """
        self._backlog.end(placed.decision.request.request_id, placed.prefill, self._clock())
        self.prefilled(placed)

    def ended(self, placed: Placed) -> None:
        """Record that a request is over, whether it was answered or not. Idempotent."""
        request_id = placed.decision.request.request_id
        is_open = self._open.pop(request_id, None) is placed
        self._backlog.end(request_id, placed.prefill, self._clock())
        if is_open and not placed.is_prefilled:
            self._given_up(placed)
        self._move(placed)
        if placed.is_held:
            placed.is_held = False
            self.conductor.decoded(request_id)

    def advise_copy(
        self, policy: ReplicaPolicy, heat: Heat, keys: Sequence[int], lacking: Collection[int]
    ) -> Replicate | None:
        """Choose where a prompt's hot blocks are copied, if anywhere, by the engines as they are.

        Args:
            policy: chooses.
            heat: how often each block is requested.
            keys: of the prompt.
            lacking: engines that do not serve its model.
        """
        with self.conductor.lock, self._excluded({*lacking, *self._draining}):
            now_s, conductor = self._clock(), self.conductor
            self._note_queues(now_s, self._own_prefill_s)
            cost = conductor.costs.transfer
            return policy.advise(keys, heat, conductor.index, conductor.cluster, cost, now_s)

    def is_idle(self, instance: int) -> bool:
        """Whether no prompt waits for an engine, or is computed there, as far as is known."""
        return not self.num_prefills(instance) and not self.others.waiting[instance]

    def copying(self, copy_id: str, instance: int, seconds: float) -> None:
        """Record that an engine loads a prefix, which is predicted to take ``seconds``."""
        self._backlog.put(copy_id, instance, seconds, self._clock())
        self.others.moved((), (instance,))

    def copied(self, copy_id: str, instance: int, keys: Sequence[int]) -> None:
        """Record that this is over, and which blocks the engine holds now."""
        self._backlog.end(copy_id, instance, self._clock())
        self.others.moved((instance,), ())
        with self.conductor.lock:
            if self.is_up(instance):
                index = self.conductor.index
                num_held = int(index.match(keys)[instance]) if keys else 0
                index.add(instance, keys)
                self.blocks[instance].assume(keys, num_held)

    def sample(self, placed: Placed, seconds: float) -> None:
        """Take down the time between two events of a request's stream, and in which batch."""
        cluster, instance = self.conductor.cluster, placed.decode
        batch_size, kv_tokens = cluster.batch_size[instance], cluster.kv_tokens[instance]
        if batch_size > 0 and seconds > 0 and placed.tells_costs:
            placed.samples.append((float(batch_size), float(kv_tokens), seconds))

    def sampled(self, placed: Placed, steps_per_event: float) -> None:
        """Learn what a step costs from what was taken down."""
        for batch_size, kv_tokens, seconds in placed.samples:
            self.decode_cost.observe(batch_size, kv_tokens, seconds / steps_per_event)
        placed.samples.clear()

    def failed(self, instance: int) -> list[str]:
        """Record that an engine is down; returns the requests that were there."""
        with self.conductor.lock:
            lost: list[str] = self.conductor.failed(instance)
            self.blocks[instance].forget()
            self.others.forget(instance)
        for request_id in lost:
            self._open[request_id].is_held = False
        return lost

    def recovered(self, instance: int, capacity_tokens: int) -> None:
        """Record that an engine is up, and what it says of its memory; 0: nothing."""
        if capacity_tokens and not self._instances[instance].capacity_tokens:
            self.conductor.cluster.capacity_tokens[instance] = capacity_tokens
            self.blocks[instance].max_assumed = self._max_assumed(instance)
        self.conductor.recovered(instance)

    def reported(self, instance: int, load: EngineLoad | None) -> None:
        """Take what an engine that is up tells of its load; None: nothing."""
        if load is None:
            self.others.forget(instance)
            return
        only_prefills = self._instances[instance].role == Role.PREFILL
        with self.conductor.lock:
            self.others.reported(instance, load, self._clock(), only_prefills=only_prefills)

    def is_up(self, instance: int) -> bool:
        """Whether an engine is up, as far as is known."""
        return bool(self.conductor.cluster.up[instance])

    def can_serve(self) -> bool:
        """Whether engines are up that can serve a request together."""
        cluster = self.conductor.cluster
        with self._excluded(self._draining):
            num_prefill, num_decode, num_both = (
                len(cluster.of_role_only(role)) for role in (Role.PREFILL, Role.DECODE, Role.BOTH)
            )
        return bool((num_prefill and num_decode) or num_both)

    def num_decoding(self, instance: int) -> int:
        """How many requests of this router an engine decodes."""
        return int(self.conductor.cluster.batch_size[instance] - self.others.running[instance])

    def num_prefills(self, instance: int) -> int:
        """How many prefills an engine has not finished."""
        return self._backlog.length(instance)

    def matched_tokens(self, tokens: Sequence[int], adapter: str) -> list[int]:
        """Return how many tokens of a prompt each engine holds, or will."""
        names = block_names(tokens, self._config.block_size, adapter=adapter)
        with self.conductor.lock:
            return (self.conductor.index.match(names) * self._config.block_size).tolist()

    def retry_after_s(self, reason: Reason) -> int:
        """Return after how many seconds a refused request may be accepted: an estimate."""
        if reason.why is not Why.PREFILL_LOAD:
            return 1
        too_long_s = reason.values["ttft_s"] * (1 - reason.values["limit"] / reason.values["load"])
        return max(1, math.ceil(too_long_s))

    def _request(self, call: Call, adapter: str) -> Request:
        size = self._config.block_size
        keys = block_names(call.tokens or (), size, adapter=adapter) if call.is_plain else ()
        expected = self._config.costs.output_tokens
        limit = call.max_tokens
        return Request(
            request_id=call.request_id,
            num_tokens=call.num_tokens,
            keys=keys,
            block_size=size,
            num_output_tokens=call.num_samples * (min(limit, expected) if limit else expected),
            max_output_tokens=limit,
            priority=call.priority,
            waited_s=max(0.0, self._clock() - call.arrived_s),
            slo=self._slos[call.class_name] if call.class_name else None,
        )

    def _shortened(self, request: Request) -> Request:
        """Guess no more tokens of a prompt than engines that are up can hold."""
        cluster = self.conductor.cluster
        able = cluster.of_role(Role.PREFILL)
        if not len(able):
            return request
        room = int(cluster.most_kv_tokens(able).max())
        most = room - (request.max_kv_tokens - request.num_tokens)
        return dataclasses.replace(request, num_tokens=max(1, min(request.num_tokens, most)))

    def _decide(
        self,
        request: Request,
        now_s: float,
        without: Collection[int],
        lacking: Collection[int],
    ) -> Decision:
        """Decide without some engines, unless no others can serve the request."""
        never = {*lacking, *self._draining}
        if without:
            with self._excluded({*without, *never}):
                decision = self.conductor.decide(request, now_s)
            if decision.reason.why not in OTHERS_MIGHT:
                return decision
        with self._excluded(never):
            return self.conductor.decide(request, now_s)

    def _note_queues(self, now_s: float, each_s: float) -> None:
        """Write into the cluster when each engine can begin another prefill.

        Args:
            now_s: current time.
            each_s: how long a prefill of others takes.
        """
        others_s = self.others.wait_s(now_s, each_s)
        self.conductor.cluster.free_at_s[:] = self._backlog.free_at_s(now_s) + others_s

    @contextlib.contextmanager
    def _excluded(self, instances: Collection[int]) -> Iterator[None]:
        """Have the conductor choose none of some engines while the block runs."""
        with self.conductor.lock:
            up = self.conductor.cluster.up
            excluded = [instance for instance in instances if up[instance]]
            up[excluded] = False
            try:
                yield
            finally:
                up[excluded] = True

    def _move(self, placed: Placed, now: Collection[int] = (), num_each: int = 1) -> None:
        at = (*now,) * num_each
        self.others.moved(placed.at, at)
        placed.at = at

    def _given_up(self, placed: Placed) -> None:
        """Take back what a prefill that is given up was to leave in its engine's cache.

        Those behind it that were to reuse that compute it themselves, the first of them for all.
        """
        blocks = self.blocks.get(placed.prefill)
        if blocks is None:  # the engine has left
            return
        keys, held = placed.decision.request.keys, _num_local_blocks(placed)
        for other in self._open.values():  # in the order in which they were sent
            if other.is_prefilled or other.prefill != placed.prefill:
                continue
            common = _num_common(keys, other.decision.request.keys)
            if common > held:
                if _num_local_blocks(other) > held:
                    self._reuses_less(other, held)
                held = common
        blocks.withdraw(keys[held:])

    def _reuses_less(self, placed: Placed, num_blocks: int) -> None:
        """Predict a prefill anew that finds fewer blocks at its engine than it was placed with."""
        prefill, request = placed.decision.prefill, placed.decision.request
        assert prefill is not None
        tokens = num_blocks * request.block_size
        if prefill.fetch is None:
            seconds = float(self.prefill_cost.seconds(request.num_tokens, tokens))
            self._backlog.revise(request.request_id, placed.prefill, seconds)
            prefill = dataclasses.replace(prefill, prefix_tokens=tokens, prefill_s=seconds)
        prefill = dataclasses.replace(prefill, local_tokens=tokens)
        placed.decision = dataclasses.replace(placed.decision, prefill=prefill)

    def _max_assumed(self, instance: int) -> int:
        tokens = int(self.conductor.cluster.capacity_tokens[instance])
        return MAX_ASSUMED if tokens == UNKNOWN_CAPACITY else tokens // self._config.block_size


class _LiveRule:
    """A rule that checks again after a prefill only where the request can still be refused.

    An engine that decodes what it prefills, or has got the request with the one that prefills, is
    doing so already, whether there is room or not.
    """

    def __init__(self, rule: Admission):
        self._rule, self._is_waived = rule, False

    @property
    def needs_room(self) -> bool:
        return self._rule.needs_room and not self._is_waived

    @contextlib.contextmanager
    def waived(self, is_running: bool) -> Iterator[None]:
        """Ask for nothing while the block runs, for a request that is running."""
        self._is_waived = is_running
        try:
            yield
        finally:
            self._is_waived = False

    def refuse_prefill(self, arrival: Arrival) -> Reason | None:
        return self._rule.refuse_prefill(arrival)

    def decode_load(self, arrival: Arrival) -> DecodeLoad | None:
        return self._rule.decode_load(arrival)

    def refuse_decode(
        self, arrival: Arrival, load: DecodeLoad, decode: DecodeChoice
    ) -> Reason | None:
        return self._rule.refuse_decode(arrival, load, decode)

    def refuse_later(self, request: Request, slo: Slo, decode: DecodeChoice) -> Reason | None:
        if self._is_waived:
            return None
        return self._rule.refuse_later(request, slo, decode)


def _num_local_blocks(placed: Placed) -> int:
    assert placed.decision.prefill is not None
    return -(-placed.decision.prefill.local_tokens // placed.decision.request.block_size)


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Count the blocks with which two prompts begin; equal names have equal blocks before them."""
    shorter = min(len(first), len(second))
    return bisect.bisect_left(range(shorter), True, key=lambda at: first[at] != second[at])


def admission_rule(config: AdmissionConfig, *, chooses_decode: bool) -> Admission:
    """Make the rule of a configuration.

    Args:
        config: which one, and its limits.
        chooses_decode: whether "baseline", too, has to choose where to decode before the prefill.
    """
    if config.rule == "accept_all" or not config.has_objectives:
        return AcceptAll()
    limits = Limits(by_priority=config.limits)
    if config.rule == "baseline":
        return Baseline(limits, pre_select=chooses_decode)
    if config.rule == "early":
        return EarlyRejection(limits)
    return PredictiveRejection(limits, decode_s=config.decode_s)


def slo_of(config: ClassConfig) -> Slo:
    """Return objectives; the conductor has no infinite ones."""
    return Slo(min(config.ttft_s, NO_OBJECTIVE_S), min(config.tbt_s, NO_OBJECTIVE_S))


def _policy(config: RouterConfig) -> tuple[PrefillPolicy, NicTransfer]:
    """What engines can do decides: without a common store nothing can be fetched."""
    if config.store is None:
        return LocalCacheAware(), NO_TRANSFER
    transfer = NicTransfer(config.store.kv_bytes_per_token, config.store.bytes_per_s)
    return KVCacheCentric(config.store.balancing_threshold), transfer
