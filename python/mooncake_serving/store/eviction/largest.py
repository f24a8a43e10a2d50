"""The largest objects first: the shortest policy that looks at what a pool has."""

import numpy as np

from mooncake_kernels.pool import Evicted, ObjectPool

from .policy import evict_in_order


def largest_first(pool: ObjectPool, num_bytes: int) -> Evicted:
    """Evict the largest objects, of equally large ones what was used longest ago; "soft" last."""
    objects = pool.objects()
    return evict_in_order(pool, objects, -objects.num_bytes.astype(np.int64), num_bytes)
