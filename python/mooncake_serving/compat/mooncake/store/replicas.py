"""Where the copies of a value are, and tasks that copy or move them, in Mooncake's classes."""

import enum
import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from mooncake_kernels.errors import InvalidArgument

from .codes import code_of, log

TaskId = tuple[int, int]
NO_TASK: TaskId = (0, 0)
_MAX_TASKS = 10_000  # whose results are kept


class ReplicaStatus(enum.IntEnum):
    """State of a copy. Those that are reported are ``COMPLETE``."""

    UNDEFINED = 0
    INITIALIZED = 1
    PROCESSING = 2
    COMPLETE = 3
    REMOVED = 4
    FAILED = 5


@dataclass(frozen=True)
class Descriptor:
    """A copy in memory.

    Attributes:
        size: bytes of the value.
        buffer_address: where it is in this process's mapping of the pool; 0: on another host.
        transport_endpoint: its process, a name as of ``get_hostname``.
    """

    size: int
    buffer_address: int
    transport_endpoint: str


@dataclass(frozen=True)
class MemoryDescriptor:
    """The description of a copy in memory."""

    buffer_descriptor: Descriptor


@dataclass(frozen=True)
class ReplicaDescriptor:
    """A copy of a value, in memory or on the SSD of its process."""

    _size: int
    _memory: MemoryDescriptor | None
    status: ReplicaStatus = ReplicaStatus.COMPLETE

    def is_memory_replica(self) -> bool:
        return self._memory is not None

    def is_disk_replica(self) -> bool:
        return False

    def is_local_disk_replica(self) -> bool:
        return self._memory is None

    def get_memory_descriptor(self) -> MemoryDescriptor:
        """Raise a ``RuntimeError``, as Mooncake does, for a copy on an SSD."""
        if self._memory is None:
            raise RuntimeError(
                "get_memory_descriptor: the replica must be in memory, got one on an SSD"
            )
        return self._memory

    def get_disk_descriptor(self) -> None:
        """Raise a ``RuntimeError``: Mooncake has it for files that are shared, which none is."""
        raise RuntimeError("get_disk_descriptor: the replica must be in a shared file, got another")


def replica(size: int, address: int, endpoint: str) -> ReplicaDescriptor:
    """Make the descriptor of a value's copy in memory."""
    return ReplicaDescriptor(size, MemoryDescriptor(Descriptor(size, address, endpoint)))


def disk_replica(size: int) -> ReplicaDescriptor:
    """Make the descriptor of a value's copy on the SSD of its process."""
    return ReplicaDescriptor(size, None)


def size_of_value(known: ReplicaDescriptor) -> int:
    """Size of the value in bytes."""
    return known._size


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
        assigned_client: the process that does it: always the one that created it.
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


def check_segment(segment: Any) -> None:
    """Refuse a value that does not name a segment."""
    if not isinstance(segment, str):
        raise InvalidArgument(f"segment_name must be a string, got {segment!r:.80}")
