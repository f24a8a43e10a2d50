"""A prefill instance: one prompt after the other, in chunks, on one node or a pipeline of nodes."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ..conductor.errors import check_at_least
from .events import Clock, Event
from .job import Job
from .step_cost import StepCost
from .store import NodeStore


@dataclass(frozen=True)
class PrefillOptions:
    """How prompts are prefilled.

    Attributes:
        chunk_tokens: of a step; more than 1,000 fill the GPUs (FAST'25, section 3.3).
        group_size: nodes that are the stages of one pipeline (CPP).
        layer_wise: load the reused KV layer by layer beside the computation, not before it.
        block_tokens: of a block of the store.
        use_cache: reuse what the store has.
    """

    chunk_tokens: int = 4096
    group_size: int = 1
    layer_wise: bool = True
    block_tokens: int = 512
    use_cache: bool = True

    def __post_init__(self) -> None:
        for name in ("chunk_tokens", "group_size", "block_tokens"):
            check_at_least("PrefillOptions", name, getattr(self, name), 1)


class PrefillInstance:
    """Prefills what is ready, in the order of arrival.

    chunk times t_0..t_n of the whole model, on X stages: the first stage is taken for sum(t) / X,
    the prompt is done (X - 1) * max(t) / X later (a flow shop of equal stages). The next prompt
    follows as soon as the first stage is free. Source: FAST'25, section 3.3.

    Args:
        clock: the simulation's.
        cost: of a step of the whole model on one node.
        store: the node's part of the KV store.
        options: how.
        started, done: are called with each job when its computation begins, and ends.
    """

    def __init__(
        self,
        clock: Clock,
        cost: StepCost,
        store: NodeStore,
        options: PrefillOptions,
        *,
        started: Callable[[Job], None],
        done: Callable[[Job], None],
    ):
        self.store = store
        self.busy_until_s = 0.0
        self.expected_s = 0.0  # of all that waits, by the conductor's predictions
        self._clock = clock
        self._cost = cost
        self._options = options
        self._started = started
        self._done = done
        self._waiting: deque[Job] = deque()
        self._computing: dict[Job, Event] = {}
        self._free: Event | None = None

    def __len__(self) -> int:
        return len(self._waiting) + len(self._computing)

    def arrive(self, job: Job) -> None:
        """Queue a job; it is passed over until it is ``ready``."""
        self._waiting.append(job)
        self.expected_s += job.expected_s
        self.wake()

    def wake(self) -> None:
        """Look for a job that is ready: one has become so."""
        if self._free is None:
            self._next()

    def drop(self, job: Job) -> None:
        """Forget a job, if it is here; a computation under way is not cut short."""
        if job in self._computing:
            self._computing.pop(job).cancel()
        elif job in self._waiting:
            self._waiting.remove(job)
            self.expected_s -= job.expected_s

    def fail(self) -> None:
        """Lose everything."""
        for event in self._computing.values():
            event.cancel()
        if self._free is not None:
            self._free.cancel()
        self._free = None
        self._computing.clear()
        self._waiting.clear()
        self.store.clear()
        self.expected_s = 0.0
        self.busy_until_s = self._clock.now

    def _next(self) -> None:
        self._free = None
        job = next((job for job in self._waiting if job.ready), None)
        if job is None:
            return
        self._waiting.remove(job)
        self.expected_s -= job.expected_s
        occupied_s, latency_s = self._compute(job)
        now = self._clock.now
        self.busy_until_s = now + occupied_s
        self._computing[job] = self._clock.at(now + latency_s, self._end, job)
        self._free = self._clock.at(self.busy_until_s, self._next)
        self._started(job)

    def _compute(self, job: Job) -> tuple[float, float]:
        """Seconds for which the instance is taken, and until the first token is there."""
        options, machine = self._options, self._cost.machine
        request = job.request
        blocks, ssd_blocks = (0, 0)
        if options.use_cache:
            blocks, ssd_blocks = self.store.match(request.hash_ids)
        prefix = min(blocks * options.block_tokens, request.input_length - 1)
        chunks = self._cost.chunks_s(request.input_length, prefix, options.chunk_tokens)
        job.prefix_tokens = prefix
        job.gpu_s += sum(chunks)
        bytes_per_token = self._cost.model.kv_bytes_per_token
        stages = options.group_size
        load_s = prefix * bytes_per_token / machine.host_bytes_per_s / stages
        load_s += ssd_blocks * options.block_tokens * bytes_per_token / machine.ssd_bytes_per_s
        occupied_s = sum(chunks) / stages
        drain_s = (stages - 1) * max(chunks) / stages
        if options.layer_wise:  # the first layer's load is in nobody's shadow
            first_s = load_s / self._cost.model.num_layers
            occupied_s = first_s + max(occupied_s, load_s - first_s)
        else:
            occupied_s += load_s
        return occupied_s, occupied_s + drain_s

    def _end(self, job: Job) -> None:
        del self._computing[job]
        job.first_token_s = self._clock.now
        self.store.insert(job.request.hash_ids)
        self._done(job)
