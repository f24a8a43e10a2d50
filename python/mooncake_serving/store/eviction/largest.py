"""The largest objects first: a minimal policy that looks at all objects of a pool."""

import numpy as np

from mooncake_kernels.pool import Evicted, ObjectPool

from .policy import evict_in_order


def largest_first(pool: ObjectPool, num_bytes: int) -> Evicted:
    """Evict the largest objects, among equally large ones the least recently used; "soft" last."""
    objects = pool.objects()
    return evict_in_order(pool, objects, -objects.num_bytes.astype(np.int64), num_bytes)
