"""One prefill process and one decode process, and the launcher that feeds them."""

import itertools
import multiprocessing
import pickle
import queue
import secrets
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

from mooncake_kernels.errors import InvalidArgument

from ...arguments import refuse
from .decode_worker import DecodeWorker
from .errors import RequestFailed, WorkerFailed
from .life import Life, Step
from .messages import (
    Abort,
    Failed,
    Job,
    Loading,
    NewToken,
    Prefill,
    PrefillEnded,
    Ready,
    Report,
    Reserve,
    Reserved,
    Sender,
    WorkerOptions,
    as_jobs,
)
from .prefill_worker import PrefillWorker
from .worker import Runnable, run_worker

OnLoading = Callable[[str, int, int], None]
# Differs from prefill's: blocks change their layout in transit.
DECODE_AXES = "block layer kv head token dim"


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Temporarily ignore SIGINT: a process that is started meanwhile ignores it for good.

    A terminal's Ctrl-C goes to all processes, and is the launcher's to handle. Python sets signals
    in its main thread only; elsewhere a worker is exposed until ``run_worker`` ignores them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)


class Process:
    """A worker process and the pipe to it.

    A thread sends the commands: a worker that is busy does not read, and when reports fill the
    pipe, it waits for the launcher, which must not wait for it.

    The worker of one that is dropped ends: its pipe closes.
    """

    def __init__(self, name: str, make: Callable[[Connection, Any], Runnable], options: Any):
        context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
        self.name = name
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=run_worker, args=(make, theirs, options), name=name, daemon=True
        )
        with _interrupts_ignored():
            self.process.start()
        theirs.close()  # so that its death closes the pipe
        self._commands: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        ends = (self.pipe, self._commands)  # all that the thread refers to: not to this object
        self._sender = threading.Thread(target=_send_all, args=ends, name=f"to {name}", daemon=True)
        self._sender.start()
        self._finalizer = weakref.finalize(self, _end_sends, *ends)

    def send(self, command: object) -> None:
        """Queue a command, without waiting. To a dead process it is lost; its reports say so."""
        self._commands.put(pickle.dumps(command))

    def death(self) -> WorkerFailed:
        """Return the error that says how the process ended."""
        self.process.join(timeout=5)
        code = self.process.exitcode
        how = f"was killed by signal {-code}" if code and code < 0 else f"exited with code {code}"
        return WorkerFailed(f"the {self.name} process {how}")

    def close(self) -> None:
        """End the process: gracefully, then by force. Idempotent."""
        self._finalizer()
        self._sender.join()
        self.pipe.close()
        self.process.join(timeout=5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _send_all(pipe: Connection, commands: queue.SimpleQueue[bytes | None]) -> None:
    with suppress(OSError):  # the worker is dead, or the pipe is closed
        while (command := commands.get()) is not None:
            pipe.send_bytes(command)


def _end_sends(pipe: Connection, commands: queue.SimpleQueue[bytes | None]) -> None:
    commands.put(None)
    with (
        suppress(OSError),
        socket.fromfd(pipe.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end,
    ):
        end.shutdown(socket.SHUT_RDWR)  # ends a send that is under way; closing would not


class Cluster:
    """Start the two processes; ``run`` jobs on them. Close it: it is a context manager.

    Args:
        options: of both workers; ``axes`` is prefill's, decode has a layout of its own.

    Attributes:
        life: totals of each step of the blocks' lives so far.
    """

    def __init__(self, options: WorkerOptions):
        if not isinstance(options, WorkerOptions):
            refuse("Cluster", "options", "WorkerOptions", options)
        options = replace(options, secret=options.secret or secrets.token_hex())
        self.options, self.life = options, Life()
        self.prefill = Process("prefill", PrefillWorker, options)
        try:
            self.decode = Process("decode", DecodeWorker, replace(options, axes=DECODE_AXES))
        except BaseException:
            self.prefill.close()
            raise
        self._starting = {"prefill", "decode"}
        self._ids = itertools.count()  # never used again, so that late reports are recognised
        self._index_of: dict[int, int] = {}  # unfinished request of the last run -> its job
        self._failures: dict[int, str] = {}  # job of the last run -> why it could not be served
        self._prefilling: set[int] = set()  # requests whose blocks prefill may still write

    def wait_until_ready(self, on_loading: OnLoading | None = None) -> None:
        """Wait until both workers have loaded their models.

        Args:
            on_loading: called as (process name, done, total) while weights load.

        Raises:
            WorkerFailed: a worker could not start; the message has its reason. Or none has reported
                anything for ``start_s``, or the cluster is closed.
        """
        self._refuse_closed()
        while self._starting:
            for process, report in self._reports():
                if isinstance(report, Ready):
                    self._starting.discard(process.name)
                    if process is self.prefill:
                        self.decode.send(Sender(report.engine_name))
                elif isinstance(report, Loading) and on_loading:
                    on_loading(process.name, report.done, report.total)

    def run(self, jobs: Iterable[Job]) -> Iterator[NewToken]:
        """Serve jobs; yield their tokens as they come, ``request_id`` being a job's index.

        Raises:
            RequestFailed: some jobs could not be served; raised when all others are finished, whose
                tokens have been yielded.
            WorkerFailed: a process died, neither has reported for ``deadline_s``, or the cluster
                is closed.
            InvalidArgument: one of ``jobs`` is no ``Job``, and none is served; or another run is
                not finished: close its generator to abort it.
        """
        jobs = as_jobs(jobs)
        if self._index_of:
            raise InvalidArgument(
                "Cluster: run must not begin before the last run is finished or closed, "
                f"got {len(self._index_of)} unfinished jobs"
            )
        self.wait_until_ready()
        index_of = self._index_of = {}  # of this run: its generator may outlast it
        failures = self._failures = {}
        try:
            for index, job in enumerate(jobs):
                request_id = next(self._ids)
                index_of[request_id] = index
                self.decode.send(Reserve(request_id, job))
            while index_of:
                for _, report in self._reports():
                    if isinstance(report, Reserved) and report.request_id in index_of:
                        job = jobs[index_of[report.request_id]]
                        self._prefilling.add(report.request_id)
                        self.prefill.send(Prefill(report.request_id, job, report.target))
                    elif isinstance(report, NewToken) and report.request_id in index_of:
                        index = index_of[report.request_id]
                        if report.finish_reason:
                            del index_of[report.request_id]
                        yield replace(report, request_id=index)
        finally:
            self._abort(index_of)
        if failures:
            raise RequestFailed(failures)

    def close(self) -> None:
        """End both processes. Idempotent."""
        for process in (self.prefill, self.decode):
            process.close()

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refuse_closed(self) -> None:
        if self.prefill.pipe.closed:
            raise WorkerFailed("the cluster is closed")

    def _reports(self) -> Iterator[tuple[Process, Report]]:
        """Wait for reports and yield them; handles steps and failures itself."""
        self._refuse_closed()
        processes = (self.prefill, self.decode)
        silence_s = self.options.start_s if self._starting else self.options.deadline_s
        ready = wait([process.pipe for process in processes], timeout=silence_s)
        if not ready and self._starting:
            names = " and ".join(sorted(self._starting))
            raise WorkerFailed(f"{names} did not start: nothing was reported for {silence_s:g} s")
        if not ready:
            raise WorkerFailed(f"neither process has reported for {silence_s:g} s")
        for process in processes:
            if process.pipe not in ready:
                continue
            try:
                report: Report = process.pipe.recv()
            except (EOFError, OSError):
                raise process.death() from None
            if isinstance(report, Step):
                self.life.add(report)
            elif isinstance(report, PrefillEnded):
                self._prefill_ended(report.request_id)
            elif isinstance(report, Failed):
                self._failed(process, report)
            else:
                yield process, report

    def _failed(self, process: Process, failure: Failed) -> None:
        if failure.request_id is None:
            raise WorkerFailed(f"the {process.name} process failed: {failure.reason}")
        index = self._index_of.pop(failure.request_id, None)
        if index is not None:
            self._failures[index] = f"{process.name}: {failure.reason}"
        if process is self.prefill:
            self._prefill_ended(failure.request_id)

    def _prefill_ended(self, request_id: int) -> None:
        self._prefilling.discard(request_id)
        if request_id not in self._index_of:  # decode had to keep its room until now
            self.decode.send(Abort(request_id))

    def _abort(self, unfinished: dict[int, int]) -> None:
        """Abort requests: room that prefill may still write to is kept until it ends."""
        while unfinished:
            request_id, _ = unfinished.popitem()
            process = self.prefill if request_id in self._prefilling else self.decode
            process.send(Abort(request_id))
