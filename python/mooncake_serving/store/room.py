"""How room is made in a pool: by a put that finds none, or ahead of it by a ``Watermark``."""

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from mooncake_kernels.pool import Evicted, ObjectPool, PutResult

from .eviction import EvictionPolicy

Result = TypeVar("Result")


class Room:
    """A pool with the policy that evicts objects from it.

    Args:
        pool: where room is made.
        eviction: which objects are evicted.
        at_least: bytes that are evicted at once, so that not every put into a full pool has to
            evict.

    Attributes:
        eviction: see above; may be replaced.
        on_evicted: functions that are called with the evicted keys, ``[n, 2]``.
    """

    def __init__(self, pool: ObjectPool, eviction: EvictionPolicy, at_least: int):
        self._pool = pool
        self.eviction = eviction
        self.on_evicted: list[Callable[[np.ndarray], object]] = []
        self._at_least = at_least

    def evict(self, num_bytes: int) -> Evicted:
        return self.evict_by(self.eviction, num_bytes)

    def evict_by(self, policy: EvictionPolicy, num_bytes: int) -> Evicted:
        """Evict by another policy, and report it."""
        evicted = policy(self._pool, num_bytes)
        self.tell(evicted.keys)
        return evicted

    def tell(self, keys: np.ndarray) -> None:
        """Report ``[n, 2]`` evicted keys to all listeners."""
        if len(keys):
            for tell in tuple(self.on_evicted):
                tell(keys)

    def make(self, num_bytes: Callable[[], int], attempt: Callable[[], Result]) -> Result:
        """Try until it is not ``FULL``, evicting twice as much each time, up to everything."""
        if (result := attempt()) is not PutResult.FULL:
            return result
        wanted = max(num_bytes(), self._at_least, 1)
        while result is PutResult.FULL and wanted < 2 * self._pool.capacity_bytes:
            self.evict(wanted)
            result = attempt()
            wanted *= 2
        return result
