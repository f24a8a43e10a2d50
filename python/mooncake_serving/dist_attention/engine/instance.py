"""One instance in a process of its own: a model, a cache, and its engine."""

import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

import torch

import mooncake_kernels as mk

from ...engine.errors import NotFinite, OutOfBlocks
from ...engine.kv_cache import PagedKVCache
from ...engine.loader import load_model
from ...engine.process import Failed
from .. import Heartbeat, Offer
from .engine import DistAttentionEngine
from .errors import LoansLost
from .messages import (
    Abort,
    AskLedger,
    Candidates,
    Command,
    InstanceOptions,
    Left,
    Loading,
    NewToken,
    Ready,
    Report,
    Started,
    Submit,
)

IDLE_S = 0.01  # how often an instance that waits for memory tries again


class LedgerPipe:
    """The launcher's ledger, as a ``Manager``; also what comes and goes otherwise by its pipe."""

    def __init__(self, pipe: Connection):
        self._pipe = pipe
        self._lock = threading.Lock()  # two threads send; one receives
        self._commands: deque[Command] = deque()

    def send(self, report: Report) -> None:
        """Send a report to the launcher."""
        with self._lock:
            self._pipe.send(report)

    def receive(self, timeout_s: float) -> Command | None:
        """Return the next command; None if none comes in time."""
        if self._commands:
            return self._commands.popleft()
        return self._pipe.recv() if self._pipe.poll(timeout_s) else None

    def heartbeat(self, beat: Heartbeat) -> None:
        """See ``Manager``."""
        self.send(beat)

    def lenders(self, borrower: str, num_blocks: int) -> Sequence[Offer]:
        """See ``Manager``; commands that come before the answer are kept."""
        self.send(AskLedger(num_blocks))
        while not isinstance(command := self._pipe.recv(), Candidates):
            self._commands.append(command)
        return command.offers

    def forget(self, instance: str) -> None:
        """See ``Manager``."""
        with suppress(OSError):  # the launcher is gone, too
            self.send(Left())


class Instance:
    """Serve one pipe until it closes.

    Args:
        pipe: commands come in, reports go out.
        options: what to load.
    """

    def __init__(self, pipe: Connection, options: InstanceOptions):
        pipe.send(Started())
        torch.set_num_threads(options.threads)
        self._pipe, self._options = LedgerPipe(pipe), options
        # Batch invariant, so that a request's tokens do not depend on its neighbours.
        model, _ = load_model(
            options.model,
            progress=lambda done, total, _: self._pipe.send(Loading(done, total)),
            batch_invariant=True,
        )
        cache = PagedKVCache(
            model.config, options.num_blocks, block_size=options.block_size, dtype=model.dtype
        )
        self.transfer = mk.TransferEngine(transports=options.transports, secret=options.secret)
        self._engine = DistAttentionEngine(
            model,
            cache,
            self.transfer,
            self._pipe,
            loan_options=options.loan_options,
            min_own_blocks=options.min_own_blocks,
            chunk_tokens=options.chunk_tokens,
        )
        self._request_of: dict[int, int] = {}  # the engine's id -> the launcher's
        self._stuck_since: float | None = None

    def run(self) -> None:
        """Serve until the launcher closes its end of the pipe."""
        self._pipe.send(Ready(self.transfer.name))
        busy = False
        with self._engine:
            while True:
                while command := self._pipe.receive(0 if busy else IDLE_S):
                    self._handle(command)
                busy = self._work()

    def _handle(self, command: Command) -> None:
        if isinstance(command, Abort):
            for engine_id in [e for e, r in self._request_of.items() if r == command.request_id]:
                self._engine.abort(engine_id)
                del self._request_of[engine_id]
        elif isinstance(command, Submit):
            try:
                engine_id = self._engine.add_request(command.job.prompt_tokens, command.job.params)
            except Exception as error:  # noqa: BLE001 - of one request: the others are served
                self._pipe.send(Failed(command.request_id, _reason(error)))
            else:
                self._request_of[engine_id] = command.request_id

    def _work(self) -> bool:
        """Do one step; return whether there was anything to do."""
        if not self._engine.has_work:
            return False
        try:
            outputs = self._engine.step()
        except OutOfBlocks as error:
            self._wait(str(error))
            return False
        except (LoansLost, NotFinite) as error:
            self._fail(error.requests, str(error))
            return True
        self._stuck_since = None
        for output in outputs:
            request_id = self._request_of[output.request_id]
            self._pipe.send(NewToken(request_id, output.token_id, output.finish_reason))
            if output.finished:
                del self._request_of[output.request_id]
        return True

    def _wait(self, reason: str) -> None:
        """Nothing runs here and no one lends: after a while the next request fails."""
        now = time.monotonic()
        self._stuck_since = self._stuck_since or now
        if now - self._stuck_since > self._options.wait_s:
            self._fail([self._engine.scheduler.waiting[0].request_id], reason)
            self._stuck_since = None

    def _fail(self, engine_ids: list[int], reason: str) -> None:
        for engine_id in engine_ids:
            self._engine.abort(engine_id)
            self._pipe.send(Failed(self._request_of.pop(engine_id), reason))


def _reason(error: Exception) -> str:
    """Return why a request failed; the type is given only where the text may say nothing."""
    is_worded = isinstance(error, ValueError | RuntimeError | OSError)
    return str(error) if is_worded else f"{type(error).__name__}: {error}"
