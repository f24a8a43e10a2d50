"""The interface of a policy, and the part shared by all that look at every object."""

from collections.abc import Callable

import numpy as np

from mooncake_kernels.pool import Evicted, ObjectPool, PoolObjects

EvictionPolicy = Callable[[ObjectPool, int], Evicted]

HARD = 2  # of PoolObjects.retention


def pool_bytes(pool: ObjectPool, num_bytes: np.ndarray) -> np.ndarray:
    """Space in the pool of objects of these sizes, ``[n]`` int64."""
    units = -(-np.maximum(num_bytes, 1).astype(np.int64) // pool.alignment)
    return units * pool.alignment


def evict_in_order(
    pool: ObjectPool, objects: PoolObjects, rank: np.ndarray, num_bytes: int, num_objects: int = 0
) -> Evicted:
    """Evict objects by rank until there is enough; "soft" ones after all others.

    Args:
        pool: where they are.
        objects: ``pool.objects()``, or some of them.
        rank: ``[n]``, the lowest is evicted first; among equals the least recently used.
        num_bytes: minimum number of bytes to evict.
        num_objects: minimum number of objects to evict.

    Returns:
        What was evicted: less than wanted if there was no more. Objects that are being read and
        "hard" ones stay.
    """
    order = np.lexsort([objects.recency, rank, objects.retention])
    order = order[objects.retention[order] < HARD]
    ends = np.cumsum(pool_bytes(pool, objects.num_bytes[order]))
    removed, freed, begin = [np.empty((0, 2), np.uint64)], 0, 0
    while begin < len(order) and (freed < num_bytes or sum(map(len, removed)) < num_objects):
        before = ends[begin - 1] if begin else 0
        end = int(np.searchsorted(ends, before + num_bytes - freed)) + 1
        end = max(end, begin + num_objects - sum(map(len, removed)))
        evicted = pool.evict_keys(objects.keys[order[begin:end]])
        removed.append(evicted.keys)
        freed += evicted.num_bytes
        begin = end
    if freed < num_bytes:
        pool.reap()  # what dead processes were reading can be evicted next time
    return Evicted(np.concatenate(removed), freed)
