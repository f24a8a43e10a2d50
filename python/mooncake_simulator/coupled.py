"""A coupled instance: one engine that prefills and decodes, as vLLM 0.5 does in its three modes."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from .coupled_options import Batching, CoupledOptions
from .decode_steps import DecodeSteps
from .events import Clock
from .job import Job
from .running_batch import RunningBatch
from .step_cost import StepCost
from .store import NodeStore
from .traces import BLOCK_SIZE


@dataclass(slots=True)
class _Prompt:
    job: Job
    done: int  # tokens whose KV is there


class CoupledInstance(DecodeSteps):
    """Admits, in the order of arrival, what fits into memory, prompt and output, and runs steps.

    Args:
        clock: the simulation's.
        cost: of a step.
        options: of the instance.
        capacity_tokens: whose KV its HBM holds.
        prefilled, finished: called with each job at its first and after its last token.
    """

    def __init__(
        self,
        clock: Clock,
        cost: StepCost,
        options: CoupledOptions,
        *,
        capacity_tokens: int,
        prefilled: Callable[[Job], None],
        finished: Callable[[Job], None],
    ):
        super().__init__(clock)
        self.capacity_tokens = capacity_tokens
        self.batch: RunningBatch[Job] = RunningBatch()
        self.reserved_tokens = 0
        self.peak_tokens = 0
        self._cost = cost
        self._options = options
        # Blocks of running requests are among the most recently used: the cache rarely evicts them.
        self._cache = NodeStore(capacity_tokens // BLOCK_SIZE)
        self._prefilled = prefilled
        self._finished = finished
        self._waiting: deque[Job] = deque()
        self._prompts: deque[_Prompt] = deque()  # admitted, not yet prefilled
        self._decoding = False  # the current steps are only decodes
        self._after_chunks = False  # CHUNKED_ALONE: now it is the decodes' turn

    def __len__(self) -> int:
        return len(self._waiting) + len(self._prompts) + len(self.batch)

    def arrive(self, job: Job) -> None:
        """Serve a job from its prompt to its last token."""
        self._waiting.append(job)
        if self._event is None:
            self._begin()
        elif self._decoding and self._fits(self._waiting[0]):
            self._cut()

    def _fits(self, job: Job) -> bool:
        taken = len(self.batch) + len(self._prompts)
        room = self.capacity_tokens - self.reserved_tokens
        return taken < self._options.max_batch_size and job.num_kv_tokens <= room

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0]):
            job = self._waiting.popleft()
            self.reserved_tokens += job.num_kv_tokens
            self.peak_tokens = max(self.peak_tokens, self.reserved_tokens)
            if self._options.use_cache:
                blocks, _ = self._cache.match(job.request.hash_ids)
                tokens = blocks * BLOCK_SIZE
                job.prefix_tokens = min(tokens, job.request.input_length - 1)
            else:
                job.prefix_tokens = 0
            self._prompts.append(_Prompt(job, job.prefix_tokens))

    def _chunks(self) -> list[tuple[_Prompt, int]]:
        """The prompts, and how many tokens of each, that the next step prefills."""
        batching = self._options.batching
        chunked = batching in (Batching.CHUNKED, Batching.CHUNKED_ALONE)
        room = self._options.token_budget if chunked else self._options.max_batched_tokens
        if batching is Batching.CHUNKED:
            room -= len(self.batch)
        chunks: list[tuple[_Prompt, int]] = []
        for prompt in self._prompts:
            left = prompt.job.request.input_length - prompt.done
            tokens = min(left, room) if chunked else left
            if tokens <= 0 or (tokens > room and chunks):
                break
            chunks.append((prompt, tokens))
            room -= tokens
            if room <= 0:
                break
        return chunks

    def _begin(self) -> None:
        self._admit()
        alone = self._options.batching in (Batching.PREFILL_FIRST, Batching.CHUNKED_ALONE)
        size, kv_tokens = len(self.batch), self.batch.kv_tokens
        in_turn = self._options.batching is Batching.CHUNKED_ALONE
        chunks = [] if in_turn and self._after_chunks and size else self._chunks()
        self._after_chunks = bool(chunks)
        self._started = self._clock.now
        if chunks:
            work = [(tokens, prompt.done) for prompt, tokens in chunks]
            if alone or not size:
                seconds = self._cost.mixed_s(work)
                self.batch.stall(seconds)
            else:
                seconds = self._cost.mixed_s(work, size, kv_tokens)
            own_s = self._cost.mixed_s(work) / sum(tokens for tokens, _ in work)
            for prompt, tokens in chunks:
                prompt.job.gpu_s += own_s * tokens
            with_decodes = bool(size) and not alone
            self._decoding = False
            self._event = self._clock.after(
                seconds, self._end_chunks, chunks, seconds, with_decodes
            )
        elif size:
            self._decoding = True
            self._first_s = self._cost.decode_s(size, kv_tokens)
            self._growth_s = size * self._cost.decode_token_s
            # Prompts waiting for their turn get it after one step.
            self._plan(1 if self._prompts else self.batch.steps_to_next_leave)

    def _end_chunks(
        self, chunks: list[tuple[_Prompt, int]], seconds: float, with_decodes: bool
    ) -> None:
        self._event = None
        now = self._clock.now
        if with_decodes:
            self._leave(self.batch.pass_steps(1, seconds, 0.0))
        for prompt, tokens in chunks:
            prompt.done += tokens
            job = prompt.job
            if prompt.done < job.request.input_length:
                continue
            self._prompts.remove(prompt)
            job.first_token_s = now
            if self._options.use_cache:
                self._cache.insert(job.request.hash_ids)
            self._prefilled(job)
            if job.num_decode_steps:
                job.join(self.batch, now)
            else:
                self._leave([job])
        if self._event is None:
            self._begin()

    def _end_decodes(self) -> None:
        self._event = None
        self._leave(self.batch.pass_steps(self._planned, self._first_s, self._growth_s))
        if self._event is None:
            self._begin()

    def _leave(self, jobs: list[Job]) -> None:
        for job in jobs:
            self.reserved_tokens -= job.num_kv_tokens
            job.finished_s = self._clock.now
            self._finished(job)
