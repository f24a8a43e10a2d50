"""Counts of a pool's reads and writes, by all its processes that count.

Next to the pool's file ``kv`` there is a folder ``kv.counters`` with a small file for each process
that counts at the same time. A process locks the first free file, maps it, and continues from the
values its last owner, alive or not, left there. So sums over all files never decrease, no process
waits for another, and a killed process loses nothing.
"""

import contextlib
import fcntl
import itertools
import mmap
import os
import threading
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from mooncake_kernels.closing import Closing
from mooncake_kernels.errors import InvalidArgument, shown

from .observer import Observer


@dataclass(frozen=True)
class Counts:
    """Sums since the pool's first process counted.

    Attributes:
        num_hits: objects that were read.
        num_misses: reads of objects that were not there.
        num_stored: objects that were stored.
        num_removed: objects that were removed on request, or because they were damaged.
        num_evicted: objects that were evicted to make room.
        read_bytes: size of the objects that were read, once for each read.
        stored_bytes: size of the objects that were stored.
    """

    num_hits: int = 0
    num_misses: int = 0
    num_stored: int = 0
    num_removed: int = 0
    num_evicted: int = 0
    read_bytes: int = 0
    stored_bytes: int = 0

    @property
    def num_reads(self) -> int:
        return self.num_hits + self.num_misses

    @property
    def hit_rate(self) -> float | None:
        """Hits over reads; None before the first read."""
        return self.num_hits / self.num_reads if self.num_reads else None

    def __sub__(self, earlier: "Counts") -> "Counts":
        return Counts(*(getattr(self, name) - getattr(earlier, name) for name in NAMES))


NAMES = [field.name for field in fields(Counts)]
HITS, MISSES, STORED, REMOVED, EVICTED, READ_BYTES, STORED_BYTES = range(len(NAMES))
NUM_BYTES = 8 * len(NAMES)


class Counters(Observer, Closing):
    """Counts what this process does, visible to all processes. A context manager. A forked child
    counts in a file of its own.

    Args:
        pool_path: of the pool. A pool without a name has no place for the files, and is counted in
            this process alone.

    Raises:
        InvalidArgument: the path is no text.
        OSError: the files cannot be made.
    """

    def __init__(self, pool_path: str):
        if not isinstance(pool_path, str):
            raise InvalidArgument(f"Counters: pool_path must be a str, got {shown(pool_path)}")
        self._path = pool_path
        self._lock = threading.Lock()
        self._file: int | None = None
        self._row: memoryview[int]
        self._begin()

    def on_stored(self, keys: np.ndarray, num_bytes: int) -> None:
        self._add((STORED, len(keys)), (STORED_BYTES, num_bytes))

    def on_removed(self, keys: np.ndarray, *, evicted: bool) -> None:
        self._add((EVICTED if evicted else REMOVED, len(keys)))

    def on_read(self, num_hits: int, num_misses: int, num_bytes: int) -> None:
        self._add((HITS, num_hits), (MISSES, num_misses), (READ_BYTES, num_bytes))

    def own(self) -> Counts:
        """Return the counts of this process's file, or memory."""
        with self._lock:
            self._check_process()
            return Counts(*self._row.tolist())

    def close(self) -> None:
        """Release the file to other processes. What is counted from now on is lost. Idempotent."""
        with self._lock:
            self._row = memoryview(bytearray(self._row)).cast("Q")
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _add(self, *amounts: tuple[int, int]) -> None:
        with self._lock:
            self._check_process()
            for index, amount in amounts:
                self._row[index] += amount

    def _check_process(self) -> None:
        """In a forked child, leave the file to the parent: two would lose each other's counts."""
        if os.getpid() != self._pid and self._file is not None:
            os.close(self._file)  # the parent's lock stays
            self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._file = _own_file(self._path) if _has_name(self._path) else None
        memory = bytearray(NUM_BYTES) if self._file is None else mmap.mmap(self._file, NUM_BYTES)
        self._row = memoryview(memory).cast("Q")


def read_counts(pool_path: str) -> Counts:
    """Sum what all processes of a pool have counted; zeros if none does."""
    rows = []
    if _has_name(pool_path):
        with contextlib.suppress(FileNotFoundError):
            rows = [file.read_bytes() for file in counters_folder(pool_path).iterdir()]
    whole = [memoryview(row).cast("Q") for row in rows if len(row) == NUM_BYTES]  # others are new
    return Counts(*map(sum, zip(*whole, strict=True))) if whole else Counts()


def _own_file(pool_path: str) -> int:
    folder = counters_folder(pool_path)
    folder.mkdir(mode=0o700, exist_ok=True)
    for number in itertools.count():
        file = os.open(folder / str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(
                file, fcntl.LOCK_EX | fcntl.LOCK_NB
            )  # released with its owner, even if that is killed
            os.ftruncate(file, NUM_BYTES)
            return file
        except BlockingIOError:
            os.close(file)
        except BaseException:
            os.close(file)
            raise
    raise AssertionError("there is no last number")


def counters_folder(pool_path: str) -> Path:
    """Folder of a pool's files."""
    return Path(f"{pool_path}.counters")


def _has_name(pool_path: str) -> bool:
    return not pool_path.startswith("/proc/")
