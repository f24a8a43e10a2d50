"""Which objects go when room is needed: functions of a pool and a number of bytes."""

from collections.abc import Callable

import numpy as np

from mooncake_kernels.pool import Evicted, ObjectPool

EvictionPolicy = Callable[[ObjectPool, int], Evicted]


def lru(pool: ObjectPool, num_bytes: int) -> Evicted:
    """Evict what was used longest ago, as the paper does (FAST'25, section 3.2)."""
    return pool.evict(num_bytes, "lru")


def sieve(pool: ObjectPool, num_bytes: int) -> Evicted:
    """Evict what was not used since a hand last passed it (Zhang et al., NSDI 2024)."""
    return pool.evict(num_bytes, "sieve")


def telling(policy: EvictionPolicy, tell: Callable[[np.ndarray], object]) -> EvictionPolicy:
    """Make a policy that says which objects went: ``tell`` is called with their keys."""

    def evict(pool: ObjectPool, num_bytes: int) -> Evicted:
        evicted = policy(pool, num_bytes)
        if len(evicted.keys):
            tell(evicted.keys)
        return evicted

    return evict


def largest_first(pool: ObjectPool, num_bytes: int) -> Evicted:
    """Evict the largest objects, of equally large ones what was used longest ago; "soft" last.

    Looks at every object of the pool: for pools of thousands, or a large ``num_bytes``.
    """
    objects = pool.objects()
    order = np.lexsort([objects.recency, -objects.num_bytes.astype(np.int64), objects.retention])
    order = order[objects.retention[order] < 2]
    units = -(-np.maximum(objects.num_bytes[order], 1).astype(np.int64) // pool.alignment)
    taken = np.searchsorted(np.cumsum(units * pool.alignment), num_bytes) + 1
    return pool.evict_keys(objects.keys[order[:taken]])
