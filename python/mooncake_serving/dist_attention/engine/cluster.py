"""Several instances in processes of their own, and the launcher that keeps their ledger."""

import itertools
import queue
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import wait

from mooncake_kernels.errors import InvalidArgument

from ...arguments import refuse
from ...engine.arguments import as_positive
from ...engine.errors import WorkerFailed
from ...engine.process import Failed, Process
from .. import Heartbeat, LoanLedger
from .errors import RequestFailed
from .instance import Instance
from .messages import (
    Abort,
    AskLedger,
    Candidates,
    InstanceOptions,
    Job,
    Left,
    Loading,
    NewToken,
    Ready,
    Report,
    Submit,
    as_jobs,
)

OnLoading = Callable[[str, int, int], None]
POLL_S = 0.1  # how long closing may go unnoticed


class DistAttentionCluster:
    """Start instances that lend each other memory; ``run`` jobs on them. Close it.

    Jobs are dealt to the instances in turn. If an instance dies, its jobs fail, and those with keys
    and values there; the others go on.

    Args:
        options: of each instance.
        num_instances: how many, at least 1.

    Attributes:
        ledger: who owes whom.
        processes: one for each instance.
        names: of the instances that have started, by process name.
    """

    def __init__(self, options: InstanceOptions, num_instances: int = 2):
        num_instances = as_positive("DistAttentionCluster", "num_instances", num_instances)
        if not isinstance(options, InstanceOptions):
            refuse("DistAttentionCluster", "options", "InstanceOptions", options)
        options = replace(options, secret=options.secret or secrets.token_hex())
        self.options = options
        self.ledger = LoanLedger(stale_s=max(5.0, 3 * options.loan_options.heartbeat_s))
        self.processes: list[Process] = []
        self.names: dict[str, str] = {}
        self._ids = itertools.count()  # never used again, so that late reports are recognised
        self._home: dict[int, Process] = {}  # of unfinished requests
        self._reports: queue.SimpleQueue[tuple[Process, Report | WorkerFailed]]
        self._reports = queue.SimpleQueue()
        self._dead: dict[str, WorkerFailed] = {}
        self._start_failure: WorkerFailed | None = None
        self._heard_s: dict[str, float] = {}  # when each process has last reported, heartbeats too
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="mk-loans-launcher", daemon=True)
        try:
            for index in range(num_instances):
                self.processes.append(Process(f"instance {index}", Instance, options))
                self._heard_s[self.processes[-1].name] = time.monotonic()
        except BaseException:
            self.close()
            raise
        self._thread.start()

    def wait_until_ready(self, on_loading: OnLoading | None = None) -> None:
        """Wait until every instance has loaded its model.

        Raises:
            WorkerFailed: one could not start, now or at an earlier call; the message has its
                reason. Or one has reported nothing for ``start_s`` seconds, or the cluster is
                closed.
        """
        if self._start_failure is not None and not self._is_over.is_set():
            raise self._start_failure
        while starting := [p for p in self.processes if p.name not in self.names]:
            process, report = self._next(starting, self.options.start_s)
            if isinstance(report, Ready):
                self.names[process.name] = report.engine_name
            elif isinstance(report, Loading) and on_loading:
                on_loading(process.name, report.done, report.total)
            elif isinstance(report, WorkerFailed):
                self._start_failure = report
                raise report

    def run(self, jobs: Iterable[Job]) -> Iterator[NewToken]:
        """Serve jobs; yield their tokens as they come, ``request_id`` being a job's index.

        Raises:
            RequestFailed: some jobs could not be served; raised when all others are finished, whose
                tokens have been yielded.
            WorkerFailed: an instance could not start, all have died, one with unfinished jobs has
                reported nothing for ``deadline_s`` seconds, or the cluster is closed.
            InvalidArgument: one of ``jobs`` is no ``Job``, and none is served; or another run is
                not finished: close its generator to abort it.
        """
        jobs = as_jobs(jobs)
        if self._home:
            raise InvalidArgument(
                "DistAttentionCluster: run must not begin before the last run is finished or "
                f"closed, got {len(self._home)} unfinished jobs"
            )
        self.wait_until_ready()
        index_of: dict[int, int] = {}
        failures: dict[int, str] = {}
        try:
            self._submit(jobs, index_of)
            while index_of:
                process, anything = self._next(set(self._home.values()), self.options.deadline_s)
                for report in self._of_requests(process, anything):
                    if report.request_id not in index_of:
                        continue  # of a request that was aborted
                    index = index_of[report.request_id]
                    if isinstance(report, Failed) or report.finish_reason:
                        del index_of[report.request_id], self._home[report.request_id]
                    if isinstance(report, Failed):
                        failures[index] = f"{process.name}: {report.reason}"
                    else:
                        yield replace(report, request_id=index)
        finally:
            for request_id in index_of:
                self._home.pop(request_id).send(Abort(request_id))
        if failures:
            raise RequestFailed(failures)

    def close(self) -> None:
        """End all processes. Idempotent."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()
        for process in self.processes:
            process.close()

    def __enter__(self) -> "DistAttentionCluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, jobs: list[Job], index_of: dict[int, int]) -> None:
        alive = [process for process in self.processes if process.name not in self._dead]
        if not alive:
            raise next(iter(self._dead.values()))
        for index, job in enumerate(jobs):
            request_id = next(self._ids)
            index_of[request_id] = index
            self._home[request_id] = alive[index % len(alive)]
            self._home[request_id].send(Submit(request_id, job))
            self._heard_s[self._home[request_id].name] = time.monotonic()

    def _next(
        self, awaited: Collection[Process], silence_s: float
    ) -> tuple[Process, Report | WorkerFailed]:
        """Wait for the next report; those that are awaited must give signs of life meanwhile."""
        while not self._is_over.is_set():
            with suppress(queue.Empty):
                return self._reports.get(timeout=POLL_S)
            oldest = time.monotonic() - silence_s
            for process in awaited:
                if self._heard_s[process.name] < oldest:
                    raise WorkerFailed(f"{process.name} has reported nothing for {silence_s:g} s")
        raise WorkerFailed("the cluster is closed")

    def _of_requests(
        self, process: Process, report: Report | WorkerFailed
    ) -> Iterator[NewToken | Failed]:
        """Yield what a report says of requests: a death fails all requests of its process."""
        if isinstance(report, WorkerFailed):
            for request_id in [r for r, home in self._home.items() if home is process]:
                yield Failed(request_id, str(report))
        elif isinstance(report, NewToken | Failed):
            yield report

    def _serve(self) -> None:
        """Keep the ledger, and hand on all other reports."""
        name_of: dict[Process, str] = {}
        alive = {process.pipe: process for process in self.processes}
        while alive and not self._is_over.is_set():
            for pipe in wait(list(alive), timeout=POLL_S):
                process = alive[pipe]  # type: ignore[index]  # only pipes were waited for
                try:
                    report: Report = process.pipe.recv()
                    self._heard_s[process.name] = time.monotonic()
                except (EOFError, OSError):
                    del alive[process.pipe]
                    self.ledger.forget(name_of.get(process, ""))
                    if process.name not in self._dead:
                        self._died(process, process.death())
                    continue
                if isinstance(report, Heartbeat):
                    name_of[process] = report.instance
                    self.ledger.heartbeat(report)
                elif isinstance(report, AskLedger):
                    offers = self.ledger.lenders(name_of[process], report.num_blocks)
                    process.send(Candidates(offers))
                elif isinstance(report, Left):
                    self.ledger.forget(name_of[process])
                elif isinstance(report, Failed) and report.request_id is None:
                    why = f"the {process.name} process failed: {report.reason}"
                    self._died(process, WorkerFailed(why))  # it takes no jobs while it ends
                else:
                    self._reports.put((process, report))

    def _died(self, process: Process, error: WorkerFailed) -> None:
        self._dead[process.name] = error
        self._reports.put((process, error))
