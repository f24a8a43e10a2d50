"""How room is made in a pool that has a disk behind it."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from mooncake_kernels.pool import Evicted, Key, ObjectPool, PoolObjects, PutResult

from ..eviction.policy import HARD, EvictionPolicy, pool_bytes
from ..room import Room
from .admission import UseSketch
from .demotion import Demoter
from .disk_side import DiskSide

Result = TypeVar("Result")


class Demotion:
    """An eviction policy: the least recently used, by way of the disk if worth a write.

    Args:
        disk: where they go.
        demoter: writes objects to it.
        uses: how often keys were used recently by this process, whether they were there or not; for
            objects in the pool, the pool counts the uses of all processes.
        min_uses: how many uses make an object worth a write.
    """

    def __init__(self, disk: DiskSide, demoter: Demoter, uses: UseSketch, min_uses: int):
        self._disk = disk
        self._demoter = demoter
        self._uses = uses
        self._min_uses = min_uses

    def __call__(self, pool: ObjectPool, num_bytes: int, num_objects: int = 0) -> Evicted:
        """Evict what is not worth a write, or is on the disk; queue the rest for later.

        At least ``num_bytes`` and ``num_objects``. What is queued already counts towards them: it
        will be evicted. In place of what is being read go the next.
        """
        return self._evict(pool, num_bytes, num_objects, [])

    def evict_more(self, pool: ObjectPool, num_bytes: int, num_objects: int = 0) -> Evicted:
        """The same besides what is queued already: for a put, which may not have to wait for it."""
        return self._evict(pool, num_bytes, num_objects, self._demoter.queued())

    def _evict(
        self, pool: ObjectPool, num_bytes: int, num_objects: int, without: Sequence[Key]
    ) -> Evicted:
        objects = pool.objects()
        self._disk.forget_gone(objects.ids)
        order = _coldest_first(pool, objects, without)
        ends = np.cumsum(pool_bytes(pool, objects.num_bytes[order]))
        removed, freed, begin = [np.empty((0, 2), np.uint64)], 0, 0
        while begin < len(order) and (num_bytes > 0 or num_objects > 0):  # that are left to evict
            before = ends[begin - 1] if begin else 0
            end = max(int(np.searchsorted(ends, before + num_bytes)) + 1, begin + num_objects)
            keys = objects.keys[order[begin:end]]
            ids = objects.ids[order[begin:end]]
            sizes = self.queue(pool, keys, ids, objects.uses[order[begin:end]])
            evicted = pool.evict_keys(keys[sizes < 0], ids[sizes < 0])
            removed.append(evicted.keys)
            freed += evicted.num_bytes
            queued = sizes[sizes >= 0]
            num_bytes -= evicted.num_bytes + int(pool_bytes(pool, queued).sum())
            num_objects -= len(evicted.keys) + len(queued)
            begin = end
        return Evicted(np.concatenate(removed), freed)

    def queue(
        self, pool: ObjectPool, keys: np.ndarray, ids: np.ndarray, uses: np.ndarray
    ) -> np.ndarray:
        """Queue objects worth a write, to be evicted once written: ``[n]`` sizes, or -1.

        So are those of which it is not known whether the disk has them, or what was there before
        another process evicted it from the pool and put another. If they cannot be queued, what
        the disk has is condemned.

        Args:
            pool: where they are.
            keys: ``[n, 2]``.
            ids: ``[n]``, in the pool.
            uses: ``[n]``, as the pool counted them.
        """
        worth = np.maximum(self._uses.estimate(keys), uses) >= self._min_uses
        is_on_disk = self._disk.contains_each(keys)
        doubtful = is_on_disk & ~self._disk.are_same(ids)
        sizes = np.full(len(keys), -1, np.int64)
        for i in np.flatnonzero(worth & ~is_on_disk | doubtful).tolist():
            num_bytes = self._demoter.offer(tuple(keys[i].tolist()))
            sizes[i] = -1 if num_bytes is None else num_bytes
        if (doubtful & (sizes < 0)).any():
            doubtful &= (sizes < 0) & (pool.ids_of(keys) == ids)  # others are not there any more
            self._disk.condemn((first, second) for first, second in keys[doubtful].tolist())
        return sizes


class _ByWayOfDisk:
    """A pool for policies that name what to evict, as those of quotas: objects worth a write are
    written before they are evicted, and the call waits for that.
    """

    def __init__(self, pool: ObjectPool, demotion: Demotion, demoter: Demoter):
        self._pool = pool
        self._demotion = demotion
        self._demoter = demoter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def evict_keys(self, keys: np.ndarray) -> Evicted:
        ids = self._pool.ids_of(keys)
        sizes = self._demotion.queue(self._pool, keys, ids, _uses_of(self._pool, keys))
        evicted = self._pool.evict_keys(keys[sizes < 0], ids[sizes < 0])
        queued = keys[sizes >= 0]
        self._demoter.wait_for([tuple(key) for key in queued.tolist()])
        is_gone = ~self._pool.contains_each(queued)
        num_bytes = int(pool_bytes(self._pool, sizes[sizes >= 0][is_gone]).sum())
        return Evicted(
            np.concatenate([evicted.keys, queued[is_gone]]), evicted.num_bytes + num_bytes
        )


class TieredRoom(Room):
    """A pool that evicts to a disk; a put waits for the disk only if it finds no room."""

    def __init__(
        self,
        pool: ObjectPool,
        disk: DiskSide,
        demotion: Demotion,
        demoter: Demoter,
        at_least: int,
    ):
        super().__init__(pool, demotion, at_least)
        self._disk = disk
        self._demotion = demotion
        self._demoter = demoter
        demoter.on_evicted.append(self.tell)

    def tell(self, keys: np.ndarray) -> None:
        """Report those that are not on the disk either."""
        super().tell(keys[~self._disk.contains_each(keys)])

    def evict_by(self, policy: EvictionPolicy, num_bytes: int) -> Evicted:
        """Evict by another policy, as that of a quota, also by way of the disk."""
        if policy is self._demotion:
            return super().evict_by(policy, num_bytes)
        return super().evict_by(
            lambda pool, wanted: policy(
                cast(ObjectPool, _ByWayOfDisk(pool, self._demotion, self._demoter)), wanted
            ),
            num_bytes,
        )

    def make(
        self, num_bytes: Callable[[], int], attempt: Callable[[], Result]
    ) -> Result | PutResult:
        """Repeat it while it is ``FULL`` and something can be evicted, or is being written."""
        result: Result | PutResult = PutResult.FULL
        if not self._can_have(num_bytes()):
            return result
        capacity_bytes = self._pool.capacity_bytes
        wanted = min(max(num_bytes(), self._at_least, 1), capacity_bytes)
        while result is PutResult.FULL:
            has_helped = self._evict_for_put(wanted).num_bytes > 0 or self._demoter.wait_written()
            if not has_helped and wanted == capacity_bytes:
                break
            result = attempt()
            wanted = min(2 * wanted, capacity_bytes)
        return result

    def evict_objects(self, num_objects: int) -> Evicted:
        if self.eviction is not self._demotion:
            return super().evict_objects(num_objects)
        return super().evict_by(lambda pool, _: self._demotion(pool, 0, num_objects), 0)

    def _evict_for_put(self, num_bytes: int) -> Evicted:
        if self.eviction is not self._demotion:
            return super()._evict_for_put(num_bytes)
        num_objects = self._missing_entries()
        evicted = self._demotion.evict_more(
            self._pool, 0 if num_objects else num_bytes, num_objects
        )
        self.tell(evicted.keys)
        return evicted


def _uses_of(pool: ObjectPool, keys: np.ndarray) -> np.ndarray:
    """Uses of keys of one namespace, as the pool counts: ``[n]``, 0 for absent keys."""
    objects = pool.objects()
    known = np.flatnonzero(np.isin(objects.keys[:, 1], keys[:1, 1]))
    if not len(known):
        return np.zeros(len(keys), np.uint16)
    known = known[np.argsort(objects.keys[known, 0])]
    hashes = objects.keys[known, 0]
    places = np.minimum(np.searchsorted(hashes, keys[:, 0]), len(known) - 1)
    return np.where(hashes[places] == keys[:, 0], objects.uses[known[places]], 0)


def _coldest_first(pool: ObjectPool, objects: PoolObjects, without: Sequence[Key]) -> np.ndarray:
    """Indices of objects in order of eviction, "soft" last, "hard" never."""
    order = np.lexsort([objects.recency, objects.retention])
    order = order[objects.retention[order] < HARD]
    if without:
        order = order[~np.isin(objects.ids[order], pool.ids_of(without))]
    return order
