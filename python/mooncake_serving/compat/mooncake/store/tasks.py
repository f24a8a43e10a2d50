"""Copies that are made or moved in the background."""

import enum
import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from .codes import code_of, log

TaskId = tuple[int, int]
NO_TASK: TaskId = (0, 0)
_MAX_TASKS = 10_000  # whose results are kept


class TaskStatus(enum.IntEnum):
    """State of a task."""

    PENDING = 0
    PROCESSING = 1
    FAILED = 2
    SUCCESS = 3


class TaskType(enum.IntEnum):
    """Kind of a task."""

    REPLICA_COPY = 0
    REPLICA_MOVE = 1


@dataclass(frozen=True)
class QueryTaskResponse:
    """What is known of a task. Times are milliseconds since 1970.

    Attributes:
        assigned_client: which process does it: always the one that made it.
        message: why it failed; "".
    """

    id: TaskId
    type: TaskType
    status: TaskStatus
    created_at_ms_epoch: int
    last_updated_at_ms_epoch: int
    assigned_client: TaskId
    message: str = ""


class Tasks:
    """Tasks of a store, done one at a time. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[int, ...], QueryTaskResponse] = OrderedDict()
        self._numbers = itertools.count(1)
        self._client = (threading.get_native_id(), id(self))
        self._executor: ThreadPoolExecutor | None = None

    def add(self, kind: TaskType, op: str, run: Callable[[], str]) -> TaskId:
        """Queue a task; ``run`` returns why it failed, or ""."""
        now = _now_ms()
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, "mk-compat-task")
            task = (self._client[1], next(self._numbers))
            self._known[task] = QueryTaskResponse(
                task, kind, TaskStatus.PENDING, now, now, self._client
            )
            if len(self._known) > _MAX_TASKS:
                self._known.popitem(last=False)
            self._executor.submit(self._run, task, op, run)
        return task

    def find(self, task: tuple[int, ...]) -> QueryTaskResponse | None:
        """What is known of a task; None if it is unknown."""
        return self._known.get(task)

    def close(self) -> None:
        """Wait for the running task; the others are not done."""
        with self._lock:
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(cancel_futures=True)

    def _run(self, task: TaskId, op: str, run: Callable[[], str]) -> None:
        self._update(task, TaskStatus.PROCESSING)
        reason = ""

        def call() -> int:
            nonlocal reason
            reason = run()
            return 0

        try:
            if code := code_of(op, call):
                reason = f"error {code}, see the log"
        except Exception as error:  # noqa: BLE001 - whatever it is, the task is over
            log.exception("%s", op)
            reason = repr(error)
        self._update(task, TaskStatus.FAILED if reason else TaskStatus.SUCCESS, reason)

    def _update(self, task: TaskId, status: TaskStatus, message: str = "") -> None:
        with self._lock:
            if known := self._known.get(task):
                self._known[task] = replace(
                    known, status=status, last_updated_at_ms_epoch=_now_ms(), message=message
                )


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
