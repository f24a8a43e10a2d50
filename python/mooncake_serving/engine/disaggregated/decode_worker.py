"""The decode worker: receives blocks that were prefilled elsewhere, and generates from them."""

import logging
from dataclasses import dataclass
from multiprocessing.connection import Connection

import mooncake_kernels as mk
from mooncake_kernels.errors import InvalidArgument

from ..errors import NotFinite, OutOfBlocks
from ..prefill import check_prompt
from .messages import (
    Abort,
    Failed,
    Handover,
    Job,
    NewToken,
    Reserve,
    Reserved,
    Sender,
    Target,
    WorkerOptions,
)
from .worker import Worker

logger = logging.getLogger(__name__)


@dataclass
class Expected:
    """Room reserved for a prompt until its blocks arrive."""

    job: Job
    block_ids: list[int]  # of the cache, for the whole answer
    first_row: int  # of the staging pool
    num_blocks: int  # of the prompt


class DecodeWorker(Worker):
    """Reserve, scatter what arrives, and decode all arrived requests in one batch."""

    def __init__(self, pipe: Connection, options: WorkerOptions):
        super().__init__(pipe, options, access="write")
        self._sender: str | None = None  # whose handovers count
        self._waiting: dict[int, Reserve] = {}  # for room; by request, in order
        self._expected: dict[int, Expected] = {}
        self._request_of: dict[int, int] = {}  # the engine's id -> the launcher's
        self._context: dict[int, int] = {}  # tokens that a request's next step attends to

    def handle(self, command: Sender | Reserve | Abort) -> None:
        """Queue a request for room, or end it."""
        if isinstance(command, Sender):
            self._sender = command.engine_name
            return
        if isinstance(command, Abort):
            self._abort(command.request_id)
            return
        # Here, not first at prefill: room would be held for a prompt that is then refused.
        check_prompt("reserve", command.job.prompt_tokens, self.model)
        self.num_blocks_for(len(command.job.prompt_tokens))
        self._waiting[command.request_id] = command

    def work(self) -> bool:
        """Make room, admit arrivals, and decode one step."""
        while self._waiting:
            request_id, command = next(iter(self._waiting.items()))
            if not self._reserve(command):
                break
            del self._waiting[request_id]
        for sender, message in self.transfer.receive_notifications():
            if handover := self._read(sender, message):
                self.attempt(self._arrived, handover)
        if not self.engine.has_work:
            return False
        tokens_read = sum(self._context.values())
        token_bytes = self.view.block_bytes // self.view.block_size
        try:
            with self.timed("attended", tokens_read * token_bytes):
                outputs = self.engine.step()
        except NotFinite as error:
            for request_id in [self._request_of[engine_id] for engine_id in error.requests]:
                self._abort(request_id)
                self.report(Failed(request_id, str(error)))
            return True
        for output in outputs:
            request_id = self._request_of[output.request_id]
            self._context[output.request_id] += 1
            self.report(NewToken(request_id, output.token_id, output.finish_reason))
            if output.finished:
                del self._request_of[output.request_id], self._context[output.request_id]
        return True

    def _reserve(self, command: Reserve) -> bool:
        if len(self._expected) + len(self._request_of) >= self.options.max_requests:
            return False  # those that arrived beyond would hold memory, and not be computed
        job = command.job
        num_tokens = len(job.prompt_tokens)
        try:
            block_ids = self.engine.reserve(num_tokens, job.params)
        except (OutOfBlocks, ValueError) as error:
            if isinstance(error, OutOfBlocks) and (self._expected or self._request_of):
                return False  # running requests will free theirs
            self.report(Failed(command.request_id, str(error)))
            return True
        num_blocks = self.cache.num_blocks_for(num_tokens)
        first_row = self.staging.allocate(num_blocks)
        if first_row is None:
            self.engine.release(block_ids)
            return False
        self._expected[command.request_id] = Expected(job, block_ids, first_row, num_blocks)
        rows = self.staging.rows(first_row, num_blocks)
        target = Target(self.transfer.name, rows.data_ptr(), rows.nbytes)
        self.report(Reserved(command.request_id, target))
        return True

    def _read(self, sender: str, message: bytes) -> Handover | None:
        """Return a notification as a handover; None if it is none of prefill's."""
        if sender != self._sender:
            logger.warning("a notification of %s, which is not prefill, is dropped", sender)
            return None
        try:
            return Handover.decode(message)
        except InvalidArgument as error:
            logger.warning("a notification of %s is dropped: %s", sender, error)
            return None

    def _arrived(self, handover: Handover) -> None:
        expected = self._expected.pop(handover.request_id, None)
        if expected is None:
            return  # it was aborted between its arrival and now
        try:
            engine_id = self._continue(expected, handover)
        except Exception:
            self._drop(expected)
            raise
        self.staging.free(expected.first_row, expected.num_blocks)
        self._request_of[engine_id] = handover.request_id
        self._context[engine_id] = len(expected.job.prompt_tokens)

    def _continue(self, expected: Expected, handover: Handover) -> int:
        """Take the blocks over from the staging pool, and return the engine's id of the request."""
        prompt = expected.job.prompt_tokens
        keys = mk.block_hashes(prompt, self.options.block_size)
        if handover.last_key != (int(keys[-1]) if len(keys) else None):
            raise InvalidArgument("the blocks that came belong to another prompt")
        num_bytes = expected.num_blocks * self.view.block_bytes
        with self.timed("scattered", num_bytes):
            self.staging.scatter(expected.first_row, expected.block_ids[: expected.num_blocks])
        return self.engine.add_prefilled(
            prompt, handover.first_token, expected.block_ids, expected.job.params
        )

    def _abort(self, request_id: int) -> None:
        self._waiting.pop(request_id, None)
        if expected := self._expected.pop(request_id, None):
            self._drop(expected)
        for engine_id in [e for e, r in self._request_of.items() if r == request_id]:
            self.engine.abort(engine_id)
            del self._request_of[engine_id], self._context[engine_id]

    def _drop(self, expected: Expected) -> None:
        self.staging.free(expected.first_row, expected.num_blocks)
        self.engine.release(expected.block_ids)
