"""Transfers that are dropped while they run, cancelled by a thread that holds no lock."""

import contextlib
import os
import queue
import threading
from typing import Protocol


class Job(Protocol):
    """What can be cancelled."""

    def cancel(self) -> None:
        """End it. May wait for a thread of this package."""


class DroppedJobs:
    """Cancels what garbage collection finds in threads of this package. Thread-safe.

    Python may collect a handle wherever it allocates: also in a thread that carries out the very
    transfer, or holds its lock, and which must not wait for its end therefore.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()  # its put may interrupt another
        self._current = threading.local()
        self._lock = threading.Lock()
        self._process = 0  # whose thread cancels them

    def enter(self) -> None:
        """Say that the calling thread is one of this package, from now on."""
        self._current.is_ours = True
        with self._lock, contextlib.suppress(RuntimeError):  # no thread left: a later call does it
            if self._process != os.getpid():
                threading.Thread(target=self._run, name="nixl-dropped", daemon=True).start()
                self._process = os.getpid()

    def cancel(self, job: Job) -> None:
        """Cancel it now; soon if the calling thread is one of this package."""
        if getattr(self._current, "is_ours", False):
            self._jobs.put(job)
        else:
            job.cancel()

    def _run(self) -> None:
        while True:
            self._jobs.get().cancel()


JOBS = DroppedJobs()
