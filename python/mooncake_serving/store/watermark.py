"""Room ahead of need: a thread that evicts before a put has to."""

import contextlib
import fcntl
import logging
import os
import threading
from collections.abc import Iterator
from numbers import Real
from typing import TYPE_CHECKING, Any

from mooncake_kernels.errors import InvalidArgument

from .closing import Closing

if TYPE_CHECKING:
    from .store import Store

_log = logging.getLogger(__name__)


class Watermark(Closing):
    """Evicts down to ``low`` whenever more than ``high`` of a pool is used. A context manager.

    Its thread looks every ``interval_s``; that of a ``Store(watermark=...)`` also when the store's
    own puts have passed ``high``. Of all that keep a watermark on a pool one evicts at a time: it
    holds a lock on the pool's file, which ends with its process, however it dies. Puts that come
    faster than it evicts make room by themselves, as ever.

    Args:
        store: whose policy evicts, from its pool.
        high: the share of the pool above which it begins: 0 to 1.
        low: the share at which it stops, at most ``high``.
        interval_s: how often it looks if nothing is put here, in seconds.

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
        self._look_at: float = 0  # when so many bytes were added
        self._file = os.open(pool.path, os.O_RDWR | os.O_CLOEXEC)
        self._pid = os.getpid()
        self._look = threading.Event()
        self._closing = False
        self._thread = threading.Thread(
            target=self._keep, name=f"watermark {pool.path}", daemon=True
        )
        self._thread.start()

    def added(self, num_bytes: int) -> None:
        """Take note that so much was put; the thread looks if that may be too much."""
        self._added_bytes += num_bytes  # threads may lose one another's: the interval finds it
        if self._added_bytes > self._look_at:
            self._look.set()

    def check(self) -> int:
        """Look, and evict if it is time and nobody else does; return the bytes that are free now
        and were not."""
        added, used, freed = self._added_bytes, self._used_bytes(), 0
        if used > self._high_bytes:
            with self._alone() as alone:
                if alone and (used := self._used_bytes()) > self._high_bytes:
                    freed = self._store.evict(used - self._low_bytes).num_bytes
        left = self._high_bytes - (used - freed)
        # Nothing more can go, or somebody else is at it: another look at each put would not help.
        self._look_at = added + left if left >= 0 else float("inf")
        return freed

    def close(self) -> None:
        """End the thread; what it is evicting it still does. Idempotent."""
        if self._closing or os.getpid() != self._pid:
            return  # in a forked child the thread is not here
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
            except Exception:  # noqa: BLE001 - the pool held by who is stopped, or a policy
                _log.exception("%s could not evict", self._thread.name)
            self._look.wait(self._interval_s)
            self._look.clear()

    def _used_bytes(self) -> int:
        """Without what was evicted already and will be free when its readers are done."""
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
