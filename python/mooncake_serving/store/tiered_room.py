"""How room is made in a pool that has a disk behind it."""

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from mooncake_kernels.pool import Evicted, ObjectPool, PutResult

from .admission import UseSketch
from .demotion import Demoter
from .eviction.policy import HARD, EvictionPolicy, pool_bytes
from .room import Room
from .ssd import SsdTier

Result = TypeVar("Result")


class Demotion:
    """An eviction policy: what was used longest ago goes, to the disk first if it is worth that.

    Args:
        tier: the disk.
        demoter: by whom objects get there.
        uses: how often keys were used of late.
        min_uses: how often it takes to be worth a write.
    """

    def __init__(self, tier: SsdTier, demoter: Demoter, uses: UseSketch, min_uses: int):
        self._tier = tier
        self._demoter = demoter
        self._uses = uses
        self._min_uses = min_uses

    def __call__(self, pool: ObjectPool, num_bytes: int) -> Evicted:
        """Evict what is not worth a write, or is on the disk; queue the rest, which goes later."""
        keys, sizes = _coldest(pool, num_bytes)
        worth = self._uses.estimate(keys) >= self._min_uses
        worth &= ~self._tier.contains_each(keys) & (sizes <= self._tier.max_object_bytes)
        queued = np.zeros(len(keys), bool)
        for i in np.flatnonzero(worth).tolist():
            queued[i] = self._demoter.offer(tuple(keys[i].tolist()))
        return pool.evict_keys(keys[~queued])


class TieredRoom(Room):
    """A pool whose objects leave it for a disk, for which a put waits only if it finds no room."""

    def __init__(self, pool: ObjectPool, eviction: EvictionPolicy, demoter: Demoter, at_least: int):
        super().__init__(pool, eviction, at_least)
        self._demoter = demoter

    def make(self, num_bytes: Callable[[], int], attempt: Callable[[], Result]) -> Result:
        """Try until it is not ``FULL``, while something can be evicted, or is being written."""
        if (result := attempt()) is not PutResult.FULL:
            return result
        capacity_bytes = self._pool.capacity_bytes
        wanted = min(max(num_bytes(), self._at_least, 1), capacity_bytes)
        while result is PutResult.FULL:
            has_helped = self.evict(wanted).num_bytes > 0 or self._demoter.wait_written()
            if not has_helped and wanted == capacity_bytes:
                break
            result = attempt()
            wanted = min(2 * wanted, capacity_bytes)
        return result


def _coldest(pool: ObjectPool, num_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and sizes of so many bytes, what goes first first: "soft" last, "hard" never."""
    objects = pool.objects()
    order = np.lexsort([objects.recency, objects.retention])
    order = order[objects.retention[order] < HARD]
    sizes = objects.num_bytes[order].astype(np.int64)
    ends = np.cumsum(pool_bytes(pool, sizes))
    num_victims = np.searchsorted(ends, num_bytes) + 1
    return objects.keys[order[:num_victims]], sizes[:num_victims]
