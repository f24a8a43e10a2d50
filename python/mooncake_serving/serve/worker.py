"""The thread that owns an engine: requests come in, their tokens go out."""

import asyncio
import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from mooncake_kernels.closeable import Closeable
from mooncake_kernels.errors import InvalidArgument
from mooncake_serving.engine import Engine, LayerHooks, NotFinite, OutOfBlocks, TokenOutput
from mooncake_serving.engine.batching import OnStep
from mooncake_serving.engine.errors import WorkerFailed
from mooncake_serving.engine.pipeline import StageGroup
from mooncake_serving.engine.request import Request
from mooncake_serving.http_api import ErrorAnswer, invalid, overloaded

from .job import TRANSFER, Fetch, Job, Send
from .similar_prompts import SimilarPrompts, Waiting
from .stored_blocks import NotLoaded, StoredBlocks
from .transfers import Transfers

logger = logging.getLogger(__name__)

POLL_S = 0.002  # between two looks at transfers while nothing is computed
COUNT_S = 0.1  # between two counts of the free blocks, at least
Output = TokenOutput | ErrorAnswer


@dataclass
class Counts:
    """Totals, written by the engine's thread, ``refused`` under the worker's lock."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # of those
    generated_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # requests, by reason
    similar_tokens: int = 0  # of those of prompts, begun from a similar prompt's
    failed_transfers: int = 0
    refused: int = 0  # requests that found the queue full
    num_free_blocks: int = 0  # a moment ago


class Parts(NamedTuple):
    """What a worker works with; closed by it.

    Attributes:
        engine: computes.
        transfers: of prompts from and to other engines; None: there are none.
        stored: a store behind the engine's cache; None: there is none.
        similar: prompts for requests that are similar; None: there are none.
        group: of the engine's processes; None: it is in this one.
    """

    engine: Engine
    transfers: Transfers | None
    stored: StoredBlocks | None
    similar: SimilarPrompts | None
    group: StageGroup | None


class Worker(Closeable):
    """Computes jobs in a thread of its own, from ``start`` on.

    Args:
        make: makes the engine and what belongs to it; called with what the engine is to call as
            ``on_step``. Nothing else uses them.
        max_waiting: requests that compute nothing yet, beyond which others are refused.

    Attributes:
        engine, transfers, stored, similar: to be read: configuration and counts.
        counts: totals.
        is_alive: whether jobs are computed, and submitted ones will be.
    """

    def __init__(self, make: Callable[[OnStep], Parts], max_waiting: int):
        parts = make(self._hooks)
        self.engine, self.transfers, self.stored, self.similar, self._group = parts
        self.counts = Counts(num_free_blocks=self.engine.allocator.num_free)
        self.is_alive, self._max_waiting = False, max_waiting
        self._counted_s = 0.0
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._to_reserve: deque[Job] = deque()  # whose blocks are filled before they run
        self._loading: set[Job] = set()  # whose prompts are looked for in the store
        self._unfinished: set[Job] = set()  # wherever they are
        self._waiting: set[Job] = set()  # those of them that compute nothing yet
        self._lock = threading.Lock()  # of these, and whether there may be more
        self._ids: dict[Job, int] = {}  # of those in the engine
        self._jobs: dict[int, Job] = {}
        self._outputs: list[tuple[Job, Output]] = []  # to be delivered
        self._thread: threading.Thread | None = None

    def start(self, loop: asyncio.AbstractEventLoop, failed: Callable[[], None]) -> None:
        """Begin to compute.

        Args:
            loop: on which ``Job.outputs`` are filled.
            failed: called on that loop if the thread ends by an error.
        """
        self._loop, self._failed, self.is_alive = loop, failed, True
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        if self._group is not None:  # while idle, the thread does not look at it
            self._group.watch(lambda error: self._commands.put(partial(_raise, error)))

    @property
    def num_waiting(self) -> int:
        """Count the requests that compute nothing yet: most have no blocks."""
        return len(self._waiting)

    def submit(self, job: Job) -> None:
        """Queue a job: it gets all of its outputs, or an error in their place.

        Raises:
            ErrorAnswer: the thread has ended, or too many requests wait.
        """
        with self._lock:
            if not self.is_alive:
                raise ErrorAnswer(503, "the engine has ended", "no_engine")
            is_full = len(self._waiting) >= self._max_waiting
            if is_full:
                self.counts.refused += 1
            else:
                self._unfinished.add(job)
                self._waiting.add(job)
        if not is_full:
            self._commands.put(lambda: self._begin(job))
            return
        if isinstance(job.transfer, Fetch):
            self._commands.put(partial(self._release, job.transfer))
        most = self._max_waiting
        raise overloaded(f"{most} requests wait, and no more are queued (--max-waiting)")

    def end(self, job: Job, reason: str) -> None:
        """End a job now and free its blocks; one that has ended is ignored."""
        self._commands.put(lambda: self._drop(job, reason))

    def close(self) -> None:
        """End the thread; jobs that are not finished fail. Idempotent."""
        self._commands.put(None)
        if self._thread is None:
            self._close_parts()
        else:
            self._thread.join()

    # --- the engine's thread ------------------------------------------------------------------

    def _run(self) -> None:
        try:
            is_busy = False
            while self._take_commands(is_busy=is_busy):
                is_busy = self._work()
                self._count_blocks(is_idle=not is_busy and not self._is_waiting)
                self._deliver()
        except WorkerFailed as error:
            logger.error("the engine has failed: %s", error)
            self._loop.call_soon_threadsafe(self._failed)
        except Exception:
            logger.exception("the engine has failed")
            self._loop.call_soon_threadsafe(self._failed)
        finally:
            with self._lock:
                self.is_alive = False
            for job in self._unfinished:  # no one else changes them any more
                self._outputs.append((job, _failure("the engine has ended")))
            self._deliver()
            self._close_parts()

    def _take_commands(self, *, is_busy: bool) -> bool:
        """Carry out what was asked for; wait for it if there is nothing else to do.

        Returns:
            False: the thread is to end.
        """
        wait_s = 0.0 if is_busy else POLL_S if self._is_waiting else None
        try:
            while (command := self._commands.get(wait_s != 0.0, wait_s)) is not None:
                command()
                wait_s = 0.0
        except queue.Empty:
            return True
        return False

    @property
    def _is_waiting(self) -> bool:
        """Whether something may come from other engines, or from the store."""
        parts = (self.transfers, self.stored)
        return any(part is not None and part.is_busy for part in parts)

    def _work(self) -> bool:
        """Compute a step; returns whether there may be another one at once."""
        if self.transfers is not None:
            for job, block_ids, error in self.transfers.poll():
                if error is None:
                    self._add(job, block_ids, len(job.prompt) - 1)
                else:
                    self.counts.failed_transfers += 1
                    self._fail(job, _failure(f"the prompt was not handed over: {error}"))
        if self.stored is not None:
            for loaded in self.stored.poll():
                self._loading.remove(loaded.job)
                self._add(loaded.job, loaded.block_ids, loaded.num_cached_tokens)
        while self._to_reserve and self._reserve(self._to_reserve[0]):
            self._to_reserve.popleft()
        similar = self.similar
        if similar is not None and (one := similar.take()) is not None:
            self._begin_similar(similar, one)  # one a step, for which others wait
        has_more = similar is not None and similar.has_waiting
        if not self.engine.has_work:
            return has_more
        try:
            outputs = self.engine.step()
        except OutOfBlocks:  # transfers hold them
            return has_more
        except NotLoaded as error:
            for job in error.jobs:
                self._set_aside(job)
            return True
        except NotFinite as error:
            for request_id in error.requests:
                job = self._jobs[request_id]
                self._drop(job, "error")
                self._outputs.append((job, _failure(str(error))))
            return True
        for output in outputs:
            job = self._jobs[output.request_id]
            self.counts.generated_tokens += 1
            if similar is not None and output.token_index == 0:
                similar.computed(job)
            if output.finish_reason is not None:
                self._finished(job, output.finish_reason)
            self._outputs.append((job, output))
        return True

    def _begin(self, job: Job) -> None:
        if isinstance(job.transfer, Fetch):
            self._to_reserve.append(job)
            return
        try:
            if isinstance(job.transfer, Send) and self.transfers is not None:
                self.transfers.offer(job, job.transfer)
        except InvalidArgument as error:
            self._fail(job, invalid(TRANSFER, f"an object that names a new transfer: {error}"))
            return
        if self.stored is None and self.similar is None:
            self._add(job)
        else:
            self._to_reserve.append(job)

    def _add(self, job: Job, block_ids: list[int] | None = None, num_cached: int = 0) -> None:
        """Give a job to the engine, and the blocks that it has."""
        try:
            request_id = self.engine.add_request(
                job.prompt, job.params, block_ids=block_ids, num_cached_tokens=num_cached
            )
        except InvalidArgument as error:
            if block_ids is not None:
                self.engine.release(block_ids)
            self._refuse(job, error)
            return
        self._ids[job], self._jobs[request_id] = request_id, job

    def _reserve(self, job: Job) -> bool:
        """Take a job's blocks, and have its prompt put there, or refuse it; False: they are not
        free now.
        """
        try:
            block_ids, num_cached = self.engine.reserve_for(job.prompt, job.params)
        except OutOfBlocks:
            return False
        except InvalidArgument as error:
            if isinstance(job.transfer, Fetch):
                self._release(job.transfer)
            self._refuse(job, error)
            return True
        if isinstance(job.transfer, Fetch):
            job.num_cached_tokens = num_cached
            self._fetch(job, job.transfer, block_ids, num_cached)
        elif job.is_semantic and self.similar is not None:
            self.similar.add(job, block_ids, num_cached)
        else:
            self._load(job, block_ids, num_cached)
        return True

    def _load(self, job: Job, block_ids: list[int], num_cached: int) -> None:
        """Have the rest of a job's prompt loaded, if there is a store, and computed."""
        size = self.engine.cache.block_size
        if self.stored is not None and num_cached + size < len(job.prompt):
            self._loading.add(job)
            self.stored.load(job, block_ids, num_cached // size * size)
        else:
            self._add(job, block_ids, num_cached)

    def _begin_similar(self, similar: SimilarPrompts, one: Waiting) -> None:
        """Compute a prompt from a similar one, if there is any, and otherwise as all others."""
        job, block_ids, _ = one
        filled = similar.fill(one)
        if filled.is_reused is None:
            self._load(job, block_ids, filled.num_exact_tokens)
            return
        try:
            done, _ = self.engine.prefill_selected(
                job.prompt,
                job.params,
                block_ids=block_ids,
                is_reused=filled.is_reused,
                num_cached_tokens=filled.num_exact_tokens,
                recompute=similar.cache.recompute,
            )
        except NotFinite as error:
            self.engine.release(block_ids)
            if isinstance(job.transfer, Send) and self.transfers is not None:
                self.transfers.drop(job.transfer, "the request has failed")
            self._fail(job, _failure(str(error)))
            return
        self._waiting.discard(job)
        job.num_cached_tokens = filled.num_exact_tokens
        job.num_similar_tokens = filled.num_matched_tokens
        if isinstance(job.transfer, Send) and self.transfers is not None:
            every = self.engine.cache.num_layers
            self.transfers.computed(job, job.transfer, block_ids, len(job.prompt), every)
        prompt, first_token = job.prompt, done.first_token
        request_id = self.engine.add_prefilled(prompt, first_token, block_ids, job.params)
        self._ids[job], self._jobs[request_id] = request_id, job

    def _fetch(self, job: Job, fetch: Fetch, block_ids: list[int], num_cached: int) -> None:
        """Begin to receive a prompt behind its cached tokens."""
        assert self.transfers is not None, "others get no such requests"
        try:
            if num_cached < len(job.prompt) - 1:
                if fetch.num_exact_tokens is not None:
                    first = max(num_cached, fetch.num_exact_tokens) // self.engine.cache.block_size
                    self.engine.allocator.mark_approximate(block_ids[first:])
                self.transfers.fetch(job, fetch, block_ids, num_cached)
            else:  # all of it is here
                job.num_similar_tokens = 0
                self.transfers.release(fetch)
                self._add(job, block_ids, num_cached)
        except InvalidArgument as error:
            self.engine.release(block_ids)
            what = f"an object whose transfer can be asked for: {error}"
            self._fail(job, invalid(TRANSFER, what))

    def _release(self, fetch: Fetch) -> None:
        """Tell the engine that has prefilled a prompt that it is not asked for."""
        assert self.transfers is not None, "others get no such requests"
        self.transfers.release(fetch)

    def _drop(self, job: Job, reason: str) -> None:
        """End a job wherever it is, and free its blocks; ignored if it has ended."""
        transfers, request_id = self.transfers, self._ids.pop(job, None)
        if job in self._to_reserve:
            self._to_reserve.remove(job)
            if isinstance(job.transfer, Fetch):
                self._release(job.transfer)
        elif job in self._loading:
            self._loading.remove(job)
        elif request_id is not None:
            self.engine.abort(request_id)
            del self._jobs[request_id]
        elif self.similar is not None and self.similar.drop(job):
            pass
        elif transfers is None or not transfers.cancel(job):
            return
        if transfers is not None and isinstance(job.transfer, Send):
            transfers.drop(job.transfer, "the request was aborted")
        self._count(job, reason)

    def _hooks(self, work: Sequence[tuple[Request, int]]) -> LayerHooks | None:
        """Return what the engine is to call around each layer of a step: what is loaded comes
        before it, and what is handed over leaves behind it.
        """
        before, sent = [], []
        for request, num_tokens in work:
            job = self._jobs[request.request_id]
            self._waiting.discard(job)
            # Of those that were filled otherwise it is known since they have blocks.
            if not (isinstance(job.transfer, Fetch) or job.num_similar_tokens):
                job.num_cached_tokens = request.num_cached_tokens
            if isinstance(job.transfer, Send):
                what = (job, job.transfer, request.block_ids)
                before.append((*what, request.num_computed))
                start = request.num_computed + request.num_under_way
                sent.append((*what, start + num_tokens))
        wait = None
        if self.stored is not None:
            wait = self.stored.before_layers(self._jobs[r.request_id] for r, _ in work)
        if (transfers := self.transfers) is None or not sent:
            return LayerHooks(wait)
        if wait is None:  # what was cached is there in all layers
            for cached in before:
                transfers.computed(*cached, self.engine.cache.num_layers)

        def written(layer_index: int) -> None:
            for computed in sent:
                transfers.computed(*computed, layer_index + 1)

        return LayerHooks(wait, written)

    def _set_aside(self, job: Job) -> None:
        """Take a job out of the engine until all of its prompt has come from the store."""
        assert self.stored is not None, "it was loaded"
        self.engine.allocator.share(self.stored.set_aside(job))
        request_id = self._ids.pop(job)
        self.engine.abort(request_id)
        del self._jobs[request_id]
        if isinstance(job.transfer, Send) and self.transfers is not None:
            self.transfers.pause(job.transfer)
        self._loading.add(job)
        with self._lock:
            self._waiting.add(job)

    def _finished(self, job: Job, reason: str) -> None:
        del self._jobs[self._ids.pop(job)]
        if isinstance(job.transfer, Send) and self.transfers is not None:
            job.answer_params = self.transfers.answer(job, job.transfer)
        self._count(job, reason)

    def _count(self, job: Job, reason: str) -> None:
        self.counts.prompt_tokens += len(job.prompt)
        self.counts.cached_tokens += job.num_cached_tokens
        self.counts.similar_tokens += job.num_similar_tokens
        self._ended(job, reason)

    def _count_blocks(self, *, is_idle: bool) -> None:
        """Note how many blocks are free: counting takes a while, if there are many."""
        now = time.monotonic()
        if is_idle or now >= self._counted_s + COUNT_S:
            self.counts.num_free_blocks, self._counted_s = self.engine.allocator.num_free, now

    def _close_parts(self) -> None:
        for part in (self.transfers, self.stored, self._group):
            if part is not None:
                part.close()

    def _refuse(self, job: Job, error: InvalidArgument) -> None:
        """Fail a job that the engine does not take, and end what was offered of it."""
        if isinstance(job.transfer, Send) and self.transfers is not None:
            self.transfers.drop(job.transfer, "the request was refused")
        self._fail(job, ErrorAnswer(400, str(error), "invalid_value"))

    def _fail(self, job: Job, error: ErrorAnswer) -> None:
        self._ended(job, "error")
        self._outputs.append((job, error))

    def _ended(self, job: Job, reason: str) -> None:
        """Forget a job, wherever it was."""
        self.counts.finished[reason] += 1
        with self._lock:
            self._unfinished.discard(job)
            self._waiting.discard(job)
        if self.stored is not None:
            self.stored.ended(job)
        if self.similar is not None:
            self.similar.ended(job)

    def _deliver(self) -> None:
        """Hand what has come out to the loop, all at once."""
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            self._loop.call_soon_threadsafe(_put_all, outputs)


def _put_all(outputs: list[tuple[Job, Output]]) -> None:
    for job, output in outputs:
        job.outputs.put_nowait(output)


def _raise(error: Exception) -> None:
    raise error


def _failure(message: str) -> ErrorAnswer:
    return ErrorAnswer(500, message, "engine_failed")
