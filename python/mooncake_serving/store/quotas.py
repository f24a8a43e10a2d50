"""Quotas: how much of a pool the objects of one namespace may take."""

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np

from mooncake_kernels.errors import InvalidArgument, Unavailable
from mooncake_kernels.pool import Evicted, Key, ObjectPool, ObjectPut, PoolObjects, PutResult

from .checks import check_pool
from .eviction.policy import EvictionPolicy, evict_in_order, pool_bytes
from .keyspace import Keyspace

NO_LIMIT = np.iinfo(np.int64).max // 4  # so that sums of some still fit
MAX_AGE_S = 1.0  # of a count
EVICT_SHARE = 20  # a twentieth of the quota is evicted at once, so that not every put has to

Result = TypeVar("Result")


@dataclass(frozen=True)
class Quota:
    """Limit on the objects of a namespace.

    Attributes:
        num_bytes: of the pool, each object rounded up to its alignment; None for no limit.
        num_objects: how many; None for no limit.

    Raises:
        InvalidArgument: a limit is not a positive integer, or there is none.
    """

    num_bytes: int | None = None
    num_objects: int | None = None

    def __post_init__(self) -> None:
        limits = [limit for limit in (self.num_bytes, self.num_objects) if limit is not None]
        if not limits or any(not isinstance(limit, int) or limit < 1 for limit in limits):
            raise InvalidArgument(
                "Quota: num_bytes and num_objects must be positive integers, one of them at "
                f"least, got {self.num_bytes!r} and {self.num_objects!r}"
            )


MAX_QUOTAS = 64  # as the pool has room for


def set_quota(pool: ObjectPool, namespace: str, quota: Quota | None) -> None:
    """Keep a namespace to a quota in all stores that are opened on a pool from now on.

    Args:
        pool: which remembers it, for 64 namespaces.
        namespace: its keys must be prefix hashes.
        quota: None: it is not limited any more.

    Raises:
        InvalidArgument: an argument is wrong.
        Unavailable: the pool has room for no more.
    """
    check_pool("set_quota", pool)
    if not isinstance(quota, Quota | None):
        raise InvalidArgument(f"set_quota: quota must be a Quota or None, got {quota!r:.80}")
    limits = (0, 0) if quota is None else (quota.num_bytes or 0, quota.num_objects or 0)
    if not pool.set_quota(Keyspace(namespace).scope, *limits):
        raise Unavailable(f"set_quota: the pool has room for {MAX_QUOTAS} quotas, and has them")


def quotas_of(pool: ObjectPool) -> dict[int, Quota]:
    """The quotas that a pool remembers, by the scope of their namespaces."""
    return {
        scope: Quota(num_bytes or None, num_objects or None)
        for scope, (num_bytes, num_objects) in pool.quotas().items()
    }


class Usage(NamedTuple):
    """Usage of a namespace, counted as its ``Quota`` is."""

    num_bytes: int
    num_objects: int


class QuotaKeeper:
    """Admits puts as long as their namespace stays within its quota.

    The pool is the truth: the usage of a namespace is counted from ``pool.objects()``, plus what
    this process has begun to put since. Between two counts a process may put its share of the
    remaining room: the room divided by the number of processes that have the pool open. It counts
    again when its share is used up, and after a second. So a single process never exceeds the
    quota. Several may, by what the others put within that second or are still writing.

    Args:
        pool: where the objects are.
        scope: of the namespace's keys.
        quota: the limits.
        evict: removes by a policy, see ``Room.evict_by``.
        clock: seconds, from any origin.
    """

    def __init__(
        self,
        pool: ObjectPool,
        scope: int,
        quota: Quota,
        evict: Callable[[EvictionPolicy, int], Evicted],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._pool = pool
        self._scope = scope
        self._evict = evict
        self._clock = clock
        # Pairs of bytes and objects, from here on.
        limits = (quota.num_bytes, quota.num_objects)
        self._limit = np.array([min(limit or NO_LIMIT, NO_LIMIT) for limit in limits])
        self._under_way = np.zeros(2, np.int64)  # in attempts that have not returned
        self._share = np.zeros(2, np.int64)  # that may be put without counting
        self._counted_at = -np.inf
        self._open: weakref.WeakSet[ObjectPut] = weakref.WeakSet()
        self._lock = threading.Lock()

    def admit(
        self, key: Key, num_bytes: int, attempt: Callable[[], Result | PutResult]
    ) -> Result | PutResult:
        """Make room in the quota and put, or return ``OVER_QUOTA``; ``EXISTS`` needs no room."""
        if self._pool.contains(key):
            return PutResult.EXISTS
        is_size = isinstance(num_bytes, int | np.integer)
        if not (is_size and 0 <= num_bytes <= self._pool.capacity_bytes):
            return attempt()  # it refuses the size
        need = np.array([pool_bytes(self._pool, np.array([num_bytes]))[0], 1])
        with self._lock:
            if not self._has_room(need):
                return PutResult.OVER_QUOTA
            self._share -= need
            self._under_way += need
        result: Result | PutResult | None = None
        try:
            result = attempt()
        finally:
            with self._lock:
                self._under_way -= need
                if isinstance(result, ObjectPut):
                    self._open.add(result)
        return result

    def usage(self) -> Usage:
        """Count the usage of the namespace, including what this process is writing."""
        with self._lock:
            return Usage(*self._count()[1].tolist())

    def _has_room(self, need: np.ndarray) -> bool:
        if (need > self._limit).any():
            return False
        is_recent = self._clock() - self._counted_at < MAX_AGE_S
        if is_recent and (need <= self._share).all():
            return True
        own, count = self._count()
        over = count + need - self._limit
        if (over > 0).any():
            wanted = np.where(over > 0, np.maximum(over, self._limit // EVICT_SHARE), 0).tolist()
            self._evict(partial(_evict_own, own, wanted[1]), wanted[0])
            count = self._count()[1]
        self._share = (self._limit - count) // self._pool.stats().num_processes
        self._counted_at = self._clock()
        return bool((count + need <= self._limit).all())

    def _count(self) -> tuple[PoolObjects, np.ndarray]:
        """The namespace's objects, and the usage of these and of those being put."""
        # These first, so that what is committed meanwhile is counted twice rather than missed.
        writing = [put.num_bytes for put in self._open if put.is_open]
        objects = self._pool.objects()
        is_own = objects.keys[:, 1] == self._scope
        own = PoolObjects(**{name: column[is_own] for name, column in vars(objects).items()})
        sizes = np.concatenate([own.num_bytes, np.array(writing, np.uint64)])
        taken = np.array([pool_bytes(self._pool, sizes).sum(), len(sizes)])
        return own, taken + self._under_way


def _evict_own(own: PoolObjects, num_objects: int, pool: ObjectPool, num_bytes: int) -> Evicted:
    """Evict the least recently used of a namespace's objects."""
    return evict_in_order(pool, own, own.recency, num_bytes, num_objects)
