"""The policies for which a pool itself keeps the order."""

from mooncake_kernels.pool import Evicted, ObjectPool


def lru(pool: ObjectPool, num_bytes: int) -> Evicted:
    """Evict the least recently used, as the paper does (FAST'25, section 3.2)."""
    return pool.evict(num_bytes, "lru")


def sieve(pool: ObjectPool, num_bytes: int) -> Evicted:
    """Evict what was not used since the hand last passed it (Zhang et al., NSDI 2024)."""
    return pool.evict(num_bytes, "sieve")
