"""How room is made in a pool that has a disk behind it."""

from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

import numpy as np

from mooncake_kernels.pool import Evicted, ObjectPool, PoolObjects, PutResult, as_keys

from ..eviction.policy import EvictionPolicy, pool_bytes
from ..eviction.room import Room, counted
from ..keyspace import are_in
from .demotion import Demoter, Drop
from .disk_view import DiskView

NUM_ROWS = 4
MAX_COUNT = 15
ADDS_PER_KEY = 8  # after which all counts are halved
FACTORS = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], np.uint64
)


class FrequencySketch:
    """How often keys were used recently, or slightly more: a count-min sketch that ages.

    As in TinyLFU (Einziger et al., ACM Transactions on Storage 2017). Racing threads may lose a
    count.

    Args:
        num_keys: number of keys that are distinguished well; each takes 16 bytes.
    """

    def __init__(self, num_keys: int):
        bits = max(8, (4 * num_keys - 1).bit_length())
        self._counts = np.zeros((NUM_ROWS, 1 << bits), np.uint8)
        self._shift = np.uint64(64 - bits)
        self._limit = ADDS_PER_KEY * num_keys
        self._num_adds = 0

    def add(self, keys: np.ndarray) -> None:
        """Count a use of each of ``[n, 2]`` uint64 keys."""
        for row, places in zip(self._counts, self._places(keys), strict=True):
            row[places] = np.minimum(row[places] + 1, MAX_COUNT)
        self._num_adds += len(keys)
        if self._num_adds >= self._limit:
            self._counts >>= 1
            self._num_adds = 0

    def estimate(self, keys: np.ndarray) -> np.ndarray:
        """How often each of ``[n, 2]`` keys was used: ``[n]`` uint8, at most 15."""
        rows = [row[p] for row, p in zip(self._counts, self._places(keys), strict=True)]
        return np.min(rows, axis=0)

    def _places(self, keys: np.ndarray) -> np.ndarray:
        mixed = keys[:, 0] ^ (keys[:, 1] * FACTORS[0])
        mixed ^= mixed >> np.uint64(32)
        return (mixed * FACTORS[:, None]) >> self._shift


Result = TypeVar("Result")


class Demotion:
    """Decides which of the objects that a policy evicts are written to the disk first.

    All of them, as long as the disk has room; then those that were used ``min_uses`` times.

    Args:
        disk: where they go.
        demoter: writes objects to it.
        uses: how often keys were used recently by this process, whether they were there or not; for
            objects in the pool, the pool counts the uses of all processes.
        min_uses: how many uses make an object worth a write for which the disk must drop others.
    """

    def __init__(self, disk: DiskView, demoter: Demoter, uses: FrequencySketch, min_uses: int):
        self._disk = disk
        self._demoter = demoter
        self._uses = uses
        self._min_uses = min_uses

    def queue(
        self, pool: ObjectPool, keys: np.ndarray, ids: np.ndarray, uses: np.ndarray
    ) -> tuple[np.ndarray, dict[int, Drop]]:
        """Queue objects worth a write, to be evicted once written: ``[n]`` sizes, or -1; and why
        those were not queued that the disk does not have, by their number.

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
        refused: dict[int, Drop] = {}
        for i in np.flatnonzero(~is_on_disk | doubtful).tolist():
            first, second = keys[i].tolist()
            offered = self._demoter.offer((first, second), if_room=not (worth[i] or doubtful[i]))
            if isinstance(offered, Drop):
                refused[i] = offered
            else:
                sizes[i] = offered
        if (doubtful & (sizes < 0)).any():
            doubtful &= (sizes < 0) & (pool.ids_of(keys) == ids)  # others are not there any more
            self._disk.condemn((first, second) for first, second in keys[doubtful].tolist())
        return sizes, refused


class _DemotingPool:
    """A pool as a policy sees it: of what it evicts, objects worth a write are queued, to be
    evicted once they are written; the others are evicted at once.

    Args:
        pool: where the objects are.
        demotion: decides which are worth it.
        demoter: writes them.
        waits: whether calls wait until they are written. If not, they count as evicted.
    """

    def __init__(self, pool: ObjectPool, demotion: Demotion, demoter: Demoter, *, waits: bool):
        self._pool = pool
        self._demotion = demotion
        self._demoter = demoter
        self._waits = waits
        self._objects: PoolObjects | None = None
        self._gone = _NOTHING

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    @property
    def gone(self) -> Evicted:
        """What was evicted, without what is queued."""
        return self._gone

    def objects(self) -> PoolObjects:
        self._objects = self._pool.objects()
        return self._objects

    def evict(self, num_bytes: int, policy: Literal["lru", "sieve"] = "lru") -> Evicted:
        evicted = _NOTHING
        while evicted.num_bytes < num_bytes:
            # Not what is queued: it is pinned.
            victims = self._pool.victims(num_bytes - evicted.num_bytes, policy)
            more = self._evict(victims.keys, victims.ids, victims.uses)
            if not len(more.keys):
                self._pool.reap()  # what dead processes were reading can be evicted next time
                break
            evicted = _sum(evicted, more)
        return evicted

    def evict_keys(self, keys: Any, ids: np.ndarray | None = None) -> Evicted:
        keys = as_keys("evict_keys", keys)
        if ids is None:
            ids = self._pool.ids_of(keys)
            keys, ids = keys[ids != 0], ids[ids != 0]  # others have left for the disk meanwhile
        return self._evict(keys, ids, _uses_of(self._objects or self.objects(), ids))

    def _evict(self, keys: np.ndarray, ids: np.ndarray, uses: np.ndarray) -> Evicted:
        if not self._waits:  # what is queued already counts elsewhere
            is_new = ~self._demoter.has_each(keys)
            keys, ids, uses = keys[is_new], ids[is_new], uses[is_new]
        sizes, refused = self._demotion.queue(self._pool, keys, ids, uses)
        evicted = self._pool.evict_keys(keys[sizes < 0], ids[sizes < 0])
        if refused:  # some of them may be read just now, and stay
            were = are_in(keys[[*refused]], evicted.keys).tolist()
            self._demoter.count(
                drop for drop, was in zip(refused.values(), were, strict=True) if was
            )
        self._gone = _sum(self._gone, evicted)
        queued, sizes = keys[sizes >= 0], sizes[sizes >= 0]
        if self._waits:
            self._demoter.wait_for([tuple(key) for key in queued.tolist()])
            is_gone = ~self._pool.contains_each(queued)
            queued, sizes = queued[is_gone], sizes[is_gone]
        return _sum(evicted, Evicted(queued, int(pool_bytes(self._pool, sizes).sum())))


class TieredRoom(Room):
    """A pool that evicts to a disk; a put waits for the disk only if it finds no room.

    What is queued counts as evicted where room is made ahead of need; not for a put, which may not
    have to wait for it.
    """

    def __init__(
        self,
        pool: ObjectPool,
        eviction: EvictionPolicy,
        disk: DiskView,
        demotion: Demotion,
        demoter: Demoter,
        at_least: int,
    ):
        super().__init__(pool, eviction, at_least)
        self._disk = disk
        self._demotion = demotion
        self._demoter = demoter
        demoter.on_evicted.append(self.tell)

    def tell(self, keys: np.ndarray) -> None:
        """Report those that are not on the disk either."""
        super().tell(keys[~self._disk.contains_each(keys)])

    def evict(self, num_bytes: int) -> Evicted:
        return self._demote(self.eviction, max(0, num_bytes - int(self._queued().sum())))

    def evict_objects(self, num_objects: int) -> Evicted:
        return self._demote_objects(num_objects - len(self._queued()))

    def evict_by(self, policy: EvictionPolicy, num_bytes: int) -> Evicted:
        """Evict by another policy, as that of a quota, and wait until it is written."""
        pool = _DemotingPool(self._pool, self._demotion, self._demoter, waits=True)
        return super().evict_by(lambda _, wanted: policy(cast(ObjectPool, pool), wanted), num_bytes)

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

    def _evict_for_put(self, num_bytes: int) -> Evicted:
        if num_objects := self._missing_entries():
            return self._demote_objects(num_objects)
        return self._demote(self.eviction, num_bytes)

    def _demote_objects(self, num_objects: int) -> Evicted:
        return self._demote(counted(self.eviction, num_objects), self._pool.capacity_bytes)

    def _demote(self, policy: EvictionPolicy, num_bytes: int) -> Evicted:
        """Evict, without waiting for the disk; return what was evicted at once."""
        self.prepare()
        self._disk.forget_gone()
        pool = _DemotingPool(self._pool, self._demotion, self._demoter, waits=False)
        try:
            policy(cast(ObjectPool, pool), num_bytes)
        finally:
            self.tell(pool.gone.keys)
        return pool.gone

    def _queued(self) -> np.ndarray:
        """Space in the pool of the objects that are evicted once they are written: ``[n]``."""
        keys, num_bytes = self._demoter.queued()
        return pool_bytes(self._pool, num_bytes[self._pool.contains_each(keys)])


_NOTHING = Evicted(np.empty((0, 2), np.uint64), 0)


def _sum(a: Evicted, b: Evicted) -> Evicted:
    return Evicted(np.concatenate([a.keys, b.keys]), a.num_bytes + b.num_bytes)


def _uses_of(objects: PoolObjects, ids: np.ndarray) -> np.ndarray:
    """Uses of objects by their ids, as the pool counted: ``[n]``, 0 for those not among them."""
    if not len(objects.ids):
        return np.zeros(len(ids), np.uint16)
    order = np.argsort(objects.ids)
    places = order[np.minimum(np.searchsorted(objects.ids, ids, sorter=order), len(order) - 1)]
    return np.where(objects.ids[places] == ids, objects.uses[places], 0)
