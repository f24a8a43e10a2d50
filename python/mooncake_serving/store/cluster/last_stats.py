"""A pool's statistics for a thread that must not wait for the pool."""

import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait

from mooncake_kernels.pool import PoolStats

from ..store import Store

logger = logging.getLogger(__name__)


class CachedStats:
    """The current statistics of a store, or the last known ones if it takes long. Thread-safe.

    A process that was stopped during a change holds the pool: then ``stats`` takes 10 s and fails.

    Args:
        store: whose statistics they are.
        wait_s: how long ``get`` waits for the current ones.

    Raises:
        TimeoutError: a stopped process holds the pool.
    """

    def __init__(self, store: Store, wait_s: float):
        self._store = store
        self._wait_s = wait_s
        self._last = store.stats()
        self._executor = ThreadPoolExecutor(1, "mk-store-stats")
        self._asked: Future[PoolStats] | None = None
        self._lock = threading.Lock()

    def get(self) -> PoolStats:
        with self._lock:
            if self._asked is None or self._asked.done():
                try:
                    self._asked = self._executor.submit(self._store.stats)
                except RuntimeError:  # the interpreter exits
                    return self._last
            asked = self._asked
        wait([asked], self._wait_s)
        if asked.done():
            try:
                self._last = asked.result()
            except TimeoutError as error:
                logger.debug("the last statistics of %s are used: %s", self._store.pool.path, error)
        return self._last

    def close(self) -> None:
        """End the thread; it may wait for the pool."""
        self._executor.shutdown()
