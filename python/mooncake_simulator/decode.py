"""A decode instance: continuous batching under a memory limit."""

from collections import deque
from collections.abc import Callable

from .decode_steps import DecodeSteps
from .events import Clock
from .job import Job
from .measured_cost import InstanceCost
from .running_batch import RunningBatch


class DecodeInstance(DecodeSteps):
    """Decodes its batch; a new job joins at the end of the current step.

    Args:
        clock: the simulation's.
        cost: of its steps.
        capacity_tokens: whose KV its memory holds. A job is admitted, in the order of arrival, when
            its prompt and whole output fit: no job is ever evicted for lack of memory.
        max_batch_size: jobs decoded at once.
        finished: called with each job whose last token is there.
    """

    def __init__(
        self,
        clock: Clock,
        cost: InstanceCost,
        *,
        capacity_tokens: int,
        max_batch_size: int,
        finished: Callable[[Job], None],
    ):
        super().__init__(clock)
        self.capacity_tokens = capacity_tokens
        self.batch: RunningBatch[Job] = RunningBatch()
        self.reserved_tokens = 0
        self.peak_tokens = 0
        self._cost = cost
        self._max_batch_size = max_batch_size
        self._finished = finished
        self._waiting: deque[Job] = deque()

    def __len__(self) -> int:
        return len(self._waiting) + len(self.batch)

    def arrive(self, job: Job) -> None:
        """Decode a job whose KV is here."""
        self._waiting.append(job)
        if self._event is None:
            self._begin()
        elif self._fits(self._waiting[0]):
            self._cut()

    def fail(self) -> None:
        """Lose everything."""
        if self._event is not None:
            self._event.cancel()
            self._event = None
        self.batch.clear()
        self._waiting.clear()
        self.reserved_tokens = 0

    def _fits(self, job: Job) -> bool:
        room = self.capacity_tokens - self.reserved_tokens
        return len(self.batch) < self._max_batch_size and job.num_kv_tokens <= room

    def _begin(self) -> None:
        """Admit jobs that fit and decode until one leaves."""
        now = self._clock.now
        while self._waiting and self._fits(self._waiting[0]):
            job = self._waiting.popleft()
            self.reserved_tokens += job.num_kv_tokens
            self.peak_tokens = max(self.peak_tokens, self.reserved_tokens)
            job.join(self.batch, now)
        if not len(self.batch):
            return
        size = len(self.batch)
        self._started = now
        self._first_s = self._cost.decode_s(size, self.batch.kv_tokens)
        self._growth_s = size * self._cost.decode_token_s
        self._plan(self.batch.steps_to_next_leave)

    def _end_decodes(self) -> None:
        self._event = None
        for job in self.batch.pass_steps(self._planned, self._first_s, self._growth_s):
            self.reserved_tokens -= job.num_kv_tokens
            job.finished_s = self._clock.now
            self._finished(job)
        if self._event is None:  # no job came in the meantime
            self._begin()
