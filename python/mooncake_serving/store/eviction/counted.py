"""Eviction of a number of objects, whatever their size, by policies that count bytes."""

from typing import Any, Literal, cast

import numpy as np

from mooncake_kernels.pool import Evicted, ObjectPool, as_keys

from .policy import EvictionPolicy


class _Counted:
    """A pool from which a policy can evict so many objects, and no more."""

    def __init__(self, pool: ObjectPool, num_objects: int):
        self._pool = pool
        self._left = num_objects

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def evict(self, num_bytes: int, policy: Literal["lru", "sieve"] = "lru") -> Evicted:
        evicted = Evicted(np.empty((0, 2), np.uint64), 0)
        while self._left > 0 and evicted.num_bytes < num_bytes:
            # Each takes one unit at least, so that none too many goes.
            wanted = min(num_bytes - evicted.num_bytes, self._left * self._pool.alignment)
            more = self._pool.evict(wanted, policy)
            if not len(more.keys):
                break
            evicted = self._sum(evicted, more)
        return evicted

    def evict_keys(self, keys: Any, ids: np.ndarray | None = None) -> Evicted:
        words = as_keys("evict_keys", keys)
        evicted = Evicted(np.empty((0, 2), np.uint64), 0)
        begin = 0
        while self._left > 0 and begin < len(words):
            part = slice(begin, begin + self._left)
            of_part = None if ids is None else ids[part]
            evicted = self._sum(evicted, self._pool.evict_keys(words[part], of_part))
            begin = part.stop
        return evicted

    def _sum(self, evicted: Evicted, more: Evicted) -> Evicted:
        self._left -= len(more.keys)
        keys = np.concatenate([evicted.keys, more.keys])
        return Evicted(keys, evicted.num_bytes + more.num_bytes)


def counted(policy: EvictionPolicy, num_objects: int) -> EvictionPolicy:
    """Have a policy evict as many bytes as it is asked for, but no more than so many objects."""
    return lambda pool, num_bytes: policy(cast(ObjectPool, _Counted(pool, num_objects)), num_bytes)
