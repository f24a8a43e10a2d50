"""Instances that lend each other memory for KV: Infinite-LLM's pooling, in steps of a period."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from .step_cost import StepCost
from .traces import TraceRequest


@dataclass(slots=True, eq=False)
class _Running:
    request: TraceRequest
    tokens: float  # whose KV it has
    generated: float = 0.0
    lent: dict[int, float] = field(default_factory=dict)  # tokens of it, by creditor


@dataclass(slots=True)
class _Instance:
    running: list[_Running] = field(default_factory=list)
    lent_tokens: float = 0.0  # others' KV in its memory

    def own_tokens(self) -> float:
        return sum(r.tokens - sum(r.lent.values()) for r in self.running)


@dataclass(frozen=True)
class PoolingResult:
    """What was generated, in which time, and which requests fit nowhere."""

    tokens: float
    seconds: float
    refused: int

    @property
    def tokens_per_s(self) -> float:
        """Throughput of all instances together."""
        return self.tokens / self.seconds if self.seconds else 0.0


def serve_pooled(
    cost: StepCost,
    requests: Sequence[TraceRequest],
    *,
    num_instances: int,
    capacity_tokens: int,
    pooled: bool,
    max_batch_size: int = 64,
    period_s: float = 0.25,
) -> PoolingResult:
    """Decode requests that are all there; long ones borrow other instances' memory, or do not fit.

    for period: admit, in order, what has room (its prompt and whole output), pooled: beyond an
    instance's own memory on the creditors with most free memory; then all decode for a period

    A step takes W(batch) + A(tokens in its own memory, others' included), or W(batch) + A(what its
    busiest creditor attends to for it) if that is longer (DistAttention).
    Prefill is not modelled. Source: Infinite-LLM (arXiv:2401.02669), sections 4 and 5.

    Args:
        cost: of a step of one instance.
        requests: their prompts and outputs; times do not count.
        num_instances: that hold a copy of the model each.
        capacity_tokens: whose KV one of them holds.
        pooled: whether they lend.
        max_batch_size: requests an instance decodes at once.
        period_s: between two rounds of admission.
    """
    instances = [_Instance() for _ in range(num_instances)]
    waiting = deque(requests)
    seconds = tokens = 0.0
    refused = 0
    limit = capacity_tokens * (num_instances if pooled else 1)
    while waiting or any(instance.running for instance in instances):
        while waiting:
            request = waiting[0]
            if request.input_length + request.output_length > limit:
                refused += 1
            elif not _admit(instances, request, capacity_tokens, max_batch_size, pooled):
                break
            waiting.popleft()
        seconds += period_s
        for instance in instances:
            step_s = _step_s(cost, instance)
            for member in instance.running:
                made = min(period_s / step_s, member.request.output_length - member.generated)
                member.generated += made
                tokens += made
            for member in [m for m in instance.running if _is_over(m)]:
                instance.running.remove(member)
                for creditor, lent in member.lent.items():
                    instances[creditor].lent_tokens -= lent
    return PoolingResult(tokens, seconds, refused)


def _is_over(member: _Running) -> bool:
    return member.generated >= member.request.output_length - 1e-6


def _step_s(cost: StepCost, instance: _Instance) -> float:
    """The longer of what it has to do itself and of what its busiest creditor does for it."""
    lent: dict[int, float] = {}
    for member in instance.running:
        for creditor, tokens in member.lent.items():
            lent[creditor] = lent.get(creditor, 0.0) + tokens
    here = instance.own_tokens() + instance.lent_tokens
    return cost.decode_s(len(instance.running), max(here, *lent.values(), 0.0))


def _admit(
    instances: list[_Instance],
    request: TraceRequest,
    capacity: int,
    max_batch_size: int,
    pooled: bool,
) -> bool:
    """Give a request memory for all its tokens; False if there is none."""
    need = float(request.input_length + request.output_length)
    free = [capacity - i.own_tokens() - i.lent_tokens for i in instances]
    homes = [n for n, i in enumerate(instances) if len(i.running) < max_batch_size]
    if not homes:
        return False
    home = max(homes, key=lambda n: (free[n] >= need, -len(instances[n].running), free[n]))
    member = _Running(request, need)
    short = need - max(0.0, free[home])
    if short > 0:
        if not pooled or short > sum(max(0.0, f) for n, f in enumerate(free) if n != home):
            return False
        for n in sorted(range(len(free)), key=lambda n: -free[n]):
            if n != home and short > 0 and free[n] > 0:
                member.lent[n] = min(short, free[n])
                short -= member.lent[n]
    for n, lent in member.lent.items():
        instances[n].lent_tokens += lent
    instances[home].running.append(member)
    return True
