"""Prompts that are kept for similar ones, of requests that ask for that: SemShareKV in a server."""

from collections import deque
from typing import NamedTuple

from mooncake_serving.engine import Engine, Filled, SemanticCache

from .job import Job


class Waiting(NamedTuple):
    """A request that has its blocks, and is to be looked up.

    Attributes:
        job: the request.
        block_ids: all of its blocks.
        num_cached_tokens: at their beginning.
    """

    job: Job
    block_ids: list[int]
    num_cached_tokens: int


class SimilarPrompts:
    """Looks requests up, one after another, and keeps their prompts. For the engine's thread alone.

    Only prompts that were computed exactly are kept: approximations of approximations drift.

    Args:
        engine: whose prompts.
        num_blocks: that hold them, besides the engine's.

    Attributes:
        cache: of the prompts.
    """

    def __init__(self, engine: Engine, num_blocks: int):
        self._engine, self.cache = engine, SemanticCache(engine, num_blocks)
        self._waiting: deque[Waiting] = deque()
        self._to_keep: dict[Job, list[int]] = {}  # prompts that are being computed: their blocks

    @property
    def has_waiting(self) -> bool:
        """Whether ``take`` returns a request."""
        return bool(self._waiting)

    def add(self, job: Job, block_ids: list[int], num_cached_tokens: int) -> None:
        """Queue a request; its blocks are freed by ``drop`` until ``take`` has returned it."""
        self._waiting.append(Waiting(job, block_ids, num_cached_tokens))

    def take(self) -> Waiting | None:
        """Return the next request; None: there is none."""
        return self._waiting.popleft() if self._waiting else None

    def drop(self, job: Job) -> bool:
        """Take a request out of the queue, and free its blocks; False: it is not there."""
        found = next((one for one in self._waiting if one.job is job), None)
        if found is None:
            return False
        self._waiting.remove(found)
        self._engine.release(found.block_ids)
        return True

    def fill(self, one: Waiting) -> Filled:
        """Copy a similar prompt's keys and values into a request's blocks; see ``SemanticCache``.

        A prompt without a similar one is kept, when ``computed`` tells that it is there.
        """
        prompt = one.job.prompt
        filled = self.cache.fill(prompt, one.block_ids, one.num_cached_tokens)
        if filled.is_reused is None and self.cache.fits(len(prompt)):
            held = one.block_ids[: self._engine.cache.num_blocks_for(len(prompt))]
            self._engine.allocator.share(held)
            self._to_keep[one.job] = held
        return filled

    def computed(self, job: Job) -> None:
        """Keep a request's prompt, which has its keys and values now."""
        if (held := self._to_keep.get(job)) is not None:
            self.cache.keep(job.prompt, held)
            self.ended(job)

    def ended(self, job: Job) -> None:
        """Forget a request."""
        self._engine.allocator.free(self._to_keep.pop(job, ()))
