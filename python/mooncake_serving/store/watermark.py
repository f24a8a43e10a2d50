"""Makes room ahead of need: a thread that evicts before a put has to."""

import contextlib
import fcntl
import logging
import os
import threading
from collections.abc import Iterator
from numbers import Real
from typing import TYPE_CHECKING, Any

from mooncake_kernels.closing import Closing
from mooncake_kernels.errors import InvalidArgument

if TYPE_CHECKING:
    from .store import Store

_log = logging.getLogger(__name__)


class Watermark(Closing):
    """Evicts down to ``low`` whenever more than ``high`` of a pool is used. A context manager.

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
        OSError: the pool's file is gone.
    """

    def __init__(
        self,
        store: "Store",
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
        self._high_bytes = int(high * pool.capacity_bytes)
        self._low_bytes = int(low * pool.capacity_bytes)
        self._interval_s = min(interval_s, threading.TIMEOUT_MAX)
        self._added_bytes = 0
        self._look_at: float = 0  # check once this many bytes were added
        self._file = os.open(pool.path, os.O_RDWR | os.O_CLOEXEC)
        self._pid = os.getpid()
        self._look = threading.Event()
        self._closing = False
        self._thread = threading.Thread(
            target=self._keep, name=f"watermark {pool.path}", daemon=True
        )
        self._thread.start()

    def added(self, num_bytes: int) -> None:
        """Count bytes that were put; the thread checks if that may be too much."""
        self._added_bytes += num_bytes  # racing threads may lose a count: the interval finds it
        if self._added_bytes > self._look_at:
            self._look.set()

    def check(self) -> int:
        """Check, and evict if it is time and no other process does; return the bytes freed."""
        added, used, freed = self._added_bytes, self._used_bytes(), 0
        if used > self._high_bytes:
            with self._alone() as alone:
                if alone and (used := self._used_bytes()) > self._high_bytes:
                    freed = self._store.evict(used - self._low_bytes).num_bytes
        left = self._high_bytes - (used - freed)
        # Nothing more can be evicted, or another process does: checking at each put would not help.
        self._look_at = added + left if left >= 0 else float("inf")
        return freed

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

    def _used_bytes(self) -> int:
        """Used bytes, without those evicted already that will be free after their last reader."""
        stats = self._store.stats()
        return stats.capacity_bytes - stats.free_bytes - stats.doomed_bytes

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
