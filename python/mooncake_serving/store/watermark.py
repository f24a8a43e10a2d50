"""Makes room ahead of need: a thread that evicts before a put has to."""

import contextlib
import fcntl
import logging
import os
import threading
from collections.abc import Iterator
from numbers import Real
from typing import Any, Protocol

from mooncake_kernels.closeable import Closeable
from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import Evicted, ObjectPool, PoolStats

_log = logging.getLogger(__name__)


class Evictable(Protocol):
    """What a ``Store`` has for it: a pool, and a policy that evicts from it."""

    @property
    def pool(self) -> ObjectPool: ...
    def stats(self) -> PoolStats: ...
    def evict(self, num_bytes: int) -> Evicted: ...
    def evict_objects(self, num_objects: int) -> Evicted: ...


class _Room:
    """Bytes or objects of a pool, and how many were put since it was looked at."""

    def __init__(self, total: int, high: float, low: float):
        self.high = int(high * total)
        self.low = int(low * total)
        self.added = 0  # racing threads may lose a count: the interval finds it
        self.look_at: float = 0  # check once this many were added


class Watermark(Closeable):
    """Evicts down to ``low`` whenever more than ``high`` of a pool is used: of its bytes, or of the
    objects that its index has room for. A context manager.

    Its thread checks the pool every ``interval_s``; the thread of a ``Store(watermark=...)`` also
    when the store's own puts have passed ``high``. If several watermarks are kept on a pool, one
    evicts at a time: it holds a lock on the pool's file, which is released with its process,
    however it dies. Puts that are faster than the eviction make room by themselves, as ever.

    Args:
        store: whose policy evicts, from its pool.
        high: the share of the pool above which it begins: 0 to 1.
        low: the share at which it stops, at most ``high``.
        interval_s: how often it checks if nothing is put here, in seconds.

    Raises:
        InvalidArgument: a number is out of range.
        OSError: no file descriptor is left.
    """

    def __init__(
        self,
        store: Evictable,
        high: float = 0.90,
        low: float = 0.85,
        interval_s: float = 1.0,
    ):
        if not (_are_numbers(low, high) and 0 < low <= high <= 1):
            raise InvalidArgument(
                f"Watermark: low and high must be 0 < low <= high <= 1, got {low!r} and {high!r}"
            )
        if not (_are_numbers(interval_s) and interval_s > 0):
            raise InvalidArgument(f"Watermark: interval_s must be above 0, got {interval_s!r}")
        pool = store.pool
        self._store = store
        self._bytes = _Room(pool.capacity_bytes, high, low)
        self._objects = _Room(store.stats().max_objects, high, low)
        self._interval_s = min(interval_s, threading.TIMEOUT_MAX)
        self._file = pool.reopen()
        self._pid = os.getpid()
        self._look = threading.Event()
        self._closing = False
        self._thread = threading.Thread(
            target=self._keep, name=f"watermark {pool.path}", daemon=True
        )
        self._thread.start()

    def added(self, num_bytes: int) -> None:
        """Count an object that was put; the thread checks if that may be too much."""
        self._bytes.added += num_bytes
        self._objects.added += 1
        if any(room.added > room.look_at for room in (self._bytes, self._objects)):
            self._look.set()

    def check(self) -> int:
        """Check, and evict if it is time and no other process does; return the bytes freed."""
        rooms = (self._bytes, self._objects)
        added, used, freed = [room.added for room in rooms], self._used(), (0, 0)
        if self._is_high(used):
            with self._alone() as alone:
                if alone and self._is_high(used := self._used()):
                    freed = self._evict(*used)
        for i, room in enumerate(rooms):
            left = room.high - (used[i] - freed[i])
            # Nothing more can be evicted, or another process does: checking at each put would not
            # help.
            room.look_at = added[i] + left if left >= 0 else float("inf")
        return freed[0]

    def close(self) -> None:
        """End the thread after the current eviction. Idempotent."""
        if self._closing or os.getpid() != self._pid:
            return  # the thread does not exist in a forked child
        self._closing = True
        self._look.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        os.close(self._file)

    def _keep(self) -> None:
        while not self._closing:
            try:
                self.check()
            except InvalidArgument as error:  # the pool was closed and this was not
                _log.warning("%s ends: %s", self._thread.name, error)
                return
            except Exception:  # noqa: BLE001 - a stopped process holds the pool, or a policy failed
                _log.exception("%s could not evict", self._thread.name)
            self._look.wait(self._interval_s)
            self._look.clear()

    def _used(self) -> tuple[int, int]:
        """Used bytes and objects, without those that go with their last reader."""
        stats = self._store.stats()
        num_bytes = stats.capacity_bytes - stats.free_bytes - stats.doomed_bytes
        return num_bytes, stats.num_ready + stats.num_writing

    def _is_high(self, used: tuple[int, int]) -> bool:
        return used[0] > self._bytes.high or used[1] > self._objects.high

    def _evict(self, num_bytes: int, num_objects: int) -> tuple[int, int]:
        """Evict for want of bytes, or else of room in the index."""
        if num_bytes > self._bytes.high:
            evicted = self._store.evict(num_bytes - self._bytes.low)
        else:
            evicted = self._store.evict_objects(num_objects - self._objects.low)
        return evicted.num_bytes, len(evicted.keys)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(value, Real) for value in values)
