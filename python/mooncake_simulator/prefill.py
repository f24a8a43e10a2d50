"""A prefill instance: one prompt at a time, in chunks, on one node or a pipeline of nodes."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from mooncake_serving.conductor.errors import check_count

from .caches import Key
from .events import Clock, Event
from .job import Job
from .measured_cost import InstanceCost
from .stages import Load, pass_stages
from .store import Disk, NodeStore
from .traces import BLOCK_SIZE


@dataclass(frozen=True)
class PrefillOptions:
    """How prompts are prefilled.

    Attributes:
        chunk_tokens: of a step; more than 1,000 fill the GPUs (FAST'25, section 3.3).
        group_size: nodes that are the stages of one pipeline (CPP).
        layer_wise: load the reused KV layer by layer in parallel with the first chunk, not before
            it.
        use_cache: reuse what the store has.
    """

    chunk_tokens: int = 4096
    group_size: int = 1
    layer_wise: bool = True
    use_cache: bool = True

    def __post_init__(self) -> None:
        for name in ("chunk_tokens", "group_size"):
            check_count("PrefillOptions", name, getattr(self, name), 1)


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """How a prompt is prefilled if it is started now.

    Attributes:
        blocks: that it reuses; ``ssd_blocks``: those of them that come from the SSD.
        prefix_tokens: tokens of these blocks that need not be computed.
        chunks_s: of each chunk on the whole group.
        load_s: until the reused KV is loaded.
        ends_s: when each stage is done with it.
    """

    blocks: int
    ssd_blocks: int
    prefix_tokens: int
    chunks_s: list[float]
    load_s: float
    ends_s: list[float]


class PrefillInstance:
    """Prefills jobs in the order of arrival.

    A prompt enters the first stage as soon as that is free and what it fetches is there, and passes
    the others after those before it (:func:`~.stages.pass_stages`; FAST'25, section 3.3). While the
    first one waits for its fetch, a later one goes ahead only if it is over by then: prefills are
    not preempted, so that a fetch of milliseconds could cost the first one a prefill of half a
    minute, which the conductor does not predict. Each stage loads the KV of its layers from its own
    node. What only the SSD has is recomputed if that is faster.

    Args:
        clock: the simulation's.
        cost: of a step of the whole model on one node.
        store: the group's part of the KV store.
        options: how prompts are prefilled.
        block_size: tokens of a block.
        started, done: called with each job when its computation begins, and ends.
    """

    def __init__(
        self,
        clock: Clock,
        cost: InstanceCost,
        store: NodeStore,
        options: PrefillOptions,
        *,
        block_size: int = BLOCK_SIZE,
        started: Callable[[Job], None],
        done: Callable[[Job], None],
    ):
        self.store = store
        self.disk = Disk(clock, options.group_size * cost.machine.ssd_bytes_per_s)
        self._clock = clock
        self._cost = cost
        self._options = options
        self._block_size = block_size
        self._started = started
        self._done = done
        self._waiting: deque[Job] = deque()
        self._expected_s = 0.0  # of those
        self._fetching: set[Job] = set()  # those that were not ready when last looked at
        self._stage_free_s = [0.0] * options.group_size
        self._computing: dict[Job, Event] = {}
        self._free: Event | None = None

    def __len__(self) -> int:
        return len(self._waiting) + len(self._computing)

    @property
    def busy_until_s(self) -> float:
        """When the next prompt may enter the first stage."""
        return self._stage_free_s[0]

    @property
    def expected_free_s(self) -> float:
        """When all jobs that are here have left the first stage, by the conductor's predictions."""
        free_s = max(self._clock.now, self.busy_until_s)
        self._fetching = {job for job in self._fetching if not job.ready}
        if not self._fetching:
            return free_s + self._expected_s
        for job in self._waiting:
            if not job.ready:
                free_s = max(free_s, job.fetched_s)
            free_s += job.expected_s
        return free_s

    def arrive(self, job: Job) -> None:
        """Queue a job, and begin it if it is ``ready`` and nothing is in front of it."""
        self._waiting.append(job)
        self._expected_s += job.expected_s
        if not job.ready:
            self._fetching.add(job)
        self.wake()

    def wake(self) -> None:
        """Begin the next job, if there is one that can begin."""
        if self._free is None:
            self._next()

    def drop(self, job: Job) -> None:
        """Forget a job, if it is here; a running computation is not cut short."""
        if job in self._computing:
            self._computing.pop(job).cancel()
        elif job in self._waiting:
            self._leave(job)
            self._clock.after(0.0, self.wake)  # the next one, unless it is dropped as well

    def fail(self) -> None:
        """Lose everything."""
        for event in self._computing.values():
            event.cancel()
        if self._free is not None:
            self._free.cancel()
        self._free = None
        self._computing.clear()
        self._waiting.clear()
        self._fetching.clear()
        self._expected_s = 0.0
        self.store.clear()
        self.disk.reset()
        self._stage_free_s = [self._clock.now] * self._options.group_size

    def plan(self, num_tokens: int, keys: Sequence[Key]) -> PrefillPlan:
        """Return how a prompt is prefilled if it is started now; the plan that ends first.

        Either everything that the store has is reused, or only what comes before the first block
        that only the SSD has.
        """
        if not self._options.use_cache:
            return self._plan(num_tokens, 0, 0)
        blocks, ssd_blocks = self.store.match(keys)
        plan = self._plan(num_tokens, blocks, ssd_blocks)
        if not ssd_blocks:
            return plan
        anew = self._plan(num_tokens, self.store.dram.match(keys), 0)
        return min(plan, anew, key=lambda plan: plan.ends_s[-1])

    def read(self, keys: Sequence[Key], first_block: int = 0) -> float:
        """Read what only the SSD has of a prefix, from a block on; return how long that takes."""
        _, before = self.store.match(keys[:first_block])
        _, on_ssd = self.store.match(keys)
        return self.disk.read((on_ssd - before) * self._block_bytes)

    def _next(self) -> None:
        self._free = None
        if (job := self._first()) is None:
            return
        self._leave(job)
        plan = self.plan(job.request.input_length, job.request.hash_ids)
        self.disk.read(plan.ssd_blocks * self._block_bytes)
        self._stage_free_s = plan.ends_s
        job.prefix_tokens = plan.prefix_tokens
        job.gpu_s += sum(plan.chunks_s)
        self._computing[job] = self._clock.at(plan.ends_s[-1], self._end, job)
        self._free = self._clock.at(self.busy_until_s, self._next)
        self._started(job)

    def _first(self) -> Job | None:
        """Return the job that begins now.

        The first one; while that waits for its fetch, the first of the others that is over before
        the fetch ends, as the network is shared now (EASY backfilling).
        """
        head = self._waiting[0] if self._waiting else None
        if head is None or head.ready:
            return head
        if head.fetch is None:
            return None
        left_s = head.fetch.ends_s - max(self._clock.now, self.busy_until_s)
        for job in islice(self._waiting, 1, None):
            if job.ready and job.expected_s <= left_s:  # a cheap test before the exact one
                plan = self.plan(job.request.input_length, job.request.hash_ids)
                if plan.ends_s[-1] <= head.fetch.ends_s:
                    return job
        return None

    def _leave(self, job: Job) -> None:
        self._waiting.remove(job)
        self._fetching.discard(job)
        self._expected_s = self._expected_s - job.expected_s if self._waiting else 0.0

    def _plan(self, num_tokens: int, blocks: int, ssd_blocks: int) -> PrefillPlan:
        options = self._options
        prefix = min(blocks * self._block_size, num_tokens - 1)
        chunks_s = self._cost.chunks_s(num_tokens, prefix, options.chunk_tokens)
        load = self._load(prefix, ssd_blocks)
        enter_s = max(self._clock.now, self.busy_until_s)
        ends_s = pass_stages(self._stage_free_s, enter_s, chunks_s, load)
        return PrefillPlan(blocks, ssd_blocks, prefix, chunks_s, load.all_s, ends_s)

    def _load(self, prefix_tokens: int, ssd_blocks: int) -> Load:
        """Load from DRAM, and into it from the SSD in parallel: the slower of both counts."""
        model, stages = self._cost.model, self._options.group_size
        bytes_per_s = stages * self._cost.machine.host_bytes_per_s
        dram_s = prefix_tokens * model.kv_bytes_per_token / bytes_per_s
        ssd_bytes = ssd_blocks * self._block_bytes
        all_s = max(dram_s, self.disk.read_s(ssd_bytes))
        if not self._options.layer_wise:
            return Load(all_s, all_s)
        # a layer is on one node; loading the first one overlaps with nothing
        first_ssd_s = self.disk.read_s(ssd_bytes * stages / model.num_layers)
        return Load(max(dram_s * stages / model.num_layers, first_ssd_s), all_s)

    @property
    def _block_bytes(self) -> int:
        return self._block_size * self._cost.model.kv_bytes_per_token

    def _end(self, job: Job) -> None:
        del self._computing[job]
        job.first_token_s = self._clock.now
        self.store.insert(job.request.hash_ids)
        self._done(job)
