"""Instances that lend each other memory for KV: Infinite-LLM's pooling, in fixed periods."""

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
    lent: dict[int, float] = field(default_factory=dict)  # tokens of it, by lender


@dataclass(slots=True)
class _Instance:
    waiting: deque[TraceRequest] = field(default_factory=deque)
    running: list[_Running] = field(default_factory=list)
    lent_tokens: float = 0.0  # others' KV in its memory

    def own_tokens(self) -> float:
        return sum(r.tokens - sum(r.lent.values()) for r in self.running)

    def step_s(self, cost: StepCost) -> float:
        """The longer of its own work and of what its busiest lender does for it."""
        lent: dict[int, float] = {}
        for member in self.running:
            for lender, tokens in member.lent.items():
                lent[lender] = lent.get(lender, 0.0) + tokens
        here = self.own_tokens() + self.lent_tokens
        return cost.decode_s(len(self.running), max(here, *lent.values(), 0.0))

    def tokens_per_s(self, cost: StepCost) -> float:
        return len(self.running) / self.step_s(cost) if self.running else 0.0


@dataclass(frozen=True)
class PoolingResult:
    """What was generated, in which time, and which requests fit nowhere.

    The saturated figures end when the first instance has no waiting requests: later, it would
    matter which instance has the last long request.
    """

    tokens: float
    seconds: float
    refused: int
    saturated_tokens: float = 0.0
    saturated_s: float = 0.0

    @property
    def saturated_tokens_per_s(self) -> float:
        """Throughput of all instances together, while all of them have requests waiting."""
        return self.saturated_tokens / self.saturated_s if self.saturated_s else 0.0


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

    deal the requests to the instances in turn
    for period:
        every instance admits, in order, what its own memory has room for (prompt and whole output)
        pooled: in turn, each borrows for its next request from the one with most free memory, if
            those two make more tokens a second by it, or if no instance could hold it alone
        all decode for a period

    A step takes W(batch) + A(tokens in its own memory, others' included), or W(batch) + A(what its
    busiest lender attends to for it) if that is longer (DistAttention).
    Prefill is not modelled. Source: Infinite-LLM (arXiv:2401.02669), sections 4 and 5.

    Args:
        cost: of a step of one instance.
        requests: their prompts and outputs; times are ignored.
        num_instances: each with a copy of the model.
        capacity_tokens: whose KV one of them holds.
        pooled: whether they lend.
        max_batch_size: requests an instance decodes at once.
        period_s: between two rounds of admission.
    """
    pool = _Pool(cost, num_instances, capacity_tokens, max_batch_size)
    limit = capacity_tokens * (num_instances if pooled else 1)
    fitting = [r for r in requests if r.input_length + r.output_length <= limit]
    for number, request in enumerate(fitting):
        pool.instances[number % num_instances].waiting.append(request)
    seconds = tokens = 0.0
    saturated: tuple[float, float] | None = None
    while any(instance.waiting or instance.running for instance in pool.instances):
        pool.admit(borrow=False)
        if pooled:
            pool.admit(borrow=True)
        if saturated is None and not all(instance.waiting for instance in pool.instances):
            saturated = tokens, seconds
        seconds += period_s
        tokens += pool.decode(period_s)
    return PoolingResult(tokens, seconds, len(requests) - len(fitting), *(saturated or (0.0, 0.0)))


class _Pool:
    def __init__(self, cost: StepCost, num_instances: int, capacity: int, max_batch_size: int):
        self.instances = [_Instance() for _ in range(num_instances)]
        self._cost = cost
        self._capacity = capacity
        self._max_batch_size = max_batch_size

    def admit(self, *, borrow: bool) -> None:
        """Admit requests that have room, one per instance and turn."""
        turn = [i for i in self.instances if i.waiting]
        while turn:
            turn = [i for i in turn if self._admit_next(i, borrow)]
            for instance in turn:
                instance.waiting.popleft()
            turn = [i for i in turn if i.waiting]

    def _admit_next(self, home: _Instance, borrow: bool) -> bool:
        request = home.waiting[0]
        need = float(request.input_length + request.output_length)
        short = need - max(0.0, self._free(home))
        if len(home.running) >= self._max_batch_size or (short > 0 and not borrow):
            return False
        lent = self._lenders(home, short)
        if lent is None:
            return False
        concerned = [home, *(self.instances[n] for n in lent)]
        before = sum(instance.tokens_per_s(self._cost) for instance in concerned)
        self._lend(lent, +1)
        home.running.append(_Running(request, need, lent=lent))
        after = sum(instance.tokens_per_s(self._cost) for instance in concerned)
        if lent and need <= self._capacity and after <= before:
            home.running.pop()
            self._lend(lent, -1)
            return False
        return True

    def _lenders(self, home: _Instance, short: float) -> dict[int, float] | None:
        """Find the lenders and their amounts, most free memory first; None if too few."""
        lent: dict[int, float] = {}
        if short <= 0:
            return lent
        free = {n: self._free(i) for n, i in enumerate(self.instances) if i is not home}
        for n in sorted(free, key=lambda n: -free[n]):
            if short > 0 and free[n] > 0:
                lent[n] = min(short, free[n])
                short -= lent[n]
        return lent if short <= 0 else None

    def _free(self, instance: _Instance) -> float:
        return self._capacity - instance.own_tokens() - instance.lent_tokens

    def _lend(self, lent: dict[int, float], sign: int) -> None:
        for n, tokens in lent.items():
            self.instances[n].lent_tokens += sign * tokens

    def decode(self, period_s: float) -> float:
        """Decode for a period; return the number of tokens."""
        tokens = 0.0
        for instance in self.instances:
            step_s = instance.step_s(self._cost)
            for member in instance.running:
                made = min(period_s / step_s, member.request.output_length - member.generated)
                member.generated += made
                tokens += made
            for member in [m for m in instance.running if _is_over(m)]:
                instance.running.remove(member)
                self._lend(member.lent, -1)
        return tokens


def _is_over(member: _Running) -> bool:
    return member.generated >= member.request.output_length - 1e-6
