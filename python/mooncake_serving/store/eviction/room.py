"""How room is made in a pool: by a put that finds none, or ahead of it by a ``Watermark``."""

from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

import numpy as np

from mooncake_kernels.pool import Evicted, ObjectPool, PutResult, as_keys

from .policy import HARD, EvictionPolicy, pool_bytes

Result = TypeVar("Result")

LOOK_BYTES = 1024  # are copied in the time that a look at an object takes


class Room:
    """A pool with the policy that evicts objects from it.

    Args:
        pool: where room is made.
        eviction: which objects are evicted.
        at_least: bytes that are evicted at once, so that not every put into a full pool has to
            evict; where the index is full, the same share of its objects.

    Attributes:
        eviction: see above; may be replaced.
        before_eviction: functions that are called before anything is evicted by the policy.
        on_evicted: functions that are called with the evicted keys, ``[n, 2]``.
    """

    def __init__(self, pool: ObjectPool, eviction: EvictionPolicy, at_least: int):
        self._pool = pool
        self.eviction = eviction
        self.before_eviction: list[Callable[[], object]] = []
        self.on_evicted: list[Callable[[np.ndarray], object]] = []
        self._at_least = at_least

    def evict(self, num_bytes: int) -> Evicted:
        return self.evict_by(self.eviction, num_bytes)

    def evict_objects(self, num_objects: int) -> Evicted:
        return self.evict_by(counted(self.eviction, num_objects), self._pool.capacity_bytes)

    def evict_by(self, policy: EvictionPolicy, num_bytes: int) -> Evicted:
        """Evict by another policy, and report it."""
        self.prepare()
        evicted = policy(self._pool, num_bytes)
        self.tell(evicted.keys)
        return evicted

    def prepare(self) -> None:
        """Tell all listeners that something is about to be evicted."""
        for prepare in tuple(self.before_eviction):
            prepare()

    def tell(self, keys: np.ndarray) -> None:
        """Report ``[n, 2]`` evicted keys to all listeners."""
        if len(keys):
            for tell in tuple(self.on_evicted):
                tell(keys)

    def make(
        self, num_bytes: Callable[[], int], attempt: Callable[[], Result]
    ) -> Result | PutResult:
        """Repeat what was ``FULL`` until it is not, evicting twice as much each time, up to
        everything.
        """
        result: Result | PutResult = PutResult.FULL
        if not self._can_have(num_bytes()):
            return result
        wanted = max(num_bytes(), self._at_least, 1)
        while result is PutResult.FULL and wanted < 2 * self._pool.capacity_bytes:
            self._evict_for_put(wanted)
            result = attempt()
            wanted *= 2
        return result

    def _evict_for_put(self, num_bytes: int) -> Evicted:
        """Evict by bytes, or by objects if what is missing is an entry of the index."""
        if num_objects := self._missing_entries():
            return self.evict_objects(num_objects)
        return self.evict(num_bytes)

    def _missing_entries(self) -> int:
        """How many objects to evict; 0 if the index is not full."""
        stats = self._pool.stats()
        if stats.num_ready + stats.num_writing + stats.num_doomed < stats.max_objects:
            return 0
        return max(1, -(-self._at_least * stats.max_objects // stats.capacity_bytes))

    def _can_have(self, num_bytes: int) -> bool:
        """Whether "hard" objects leave so much of the pool, unless it takes too long to find out.

        Where it does, a put that fails has evicted less than its own size.
        """
        if num_bytes < LOOK_BYTES * self._pool.stats().num_ready:
            return True
        objects = self._pool.objects()
        sizes = np.append(objects.num_bytes[objects.retention == HARD], np.uint64(num_bytes))
        return int(pool_bytes(self._pool, sizes).sum()) <= self._pool.capacity_bytes


class _CountLimitedPool:
    """A pool from which a policy can evict that many objects, and no more."""

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
    """Have a policy evict as many bytes as it is asked for, but no more than that many objects."""
    return lambda pool, num_bytes: policy(
        cast(ObjectPool, _CountLimitedPool(pool, num_objects)), num_bytes
    )
