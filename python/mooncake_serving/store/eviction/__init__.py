"""Eviction policies, which choose objects to make room: functions of a pool and a number of bytes.

``lru`` and ``sieve`` are the pool's own and take time in proportion to what they evict. The others
look at all objects of the pool, about 0.1 us each: they are for evictions of many at once
(``evict_ratio``, a ``Watermark``), not of one.
"""

from .policy import (
    EvictionPolicy,
    LengthAware,
    Lfu,
    belady,
    check_eviction,
    evict_in_order,
    largest_first,
    length_aware,
    lfu,
    lru,
    sieve,
)

__all__ = [
    "EvictionPolicy",
    "LengthAware",
    "Lfu",
    "belady",
    "check_eviction",
    "evict_in_order",
    "largest_first",
    "length_aware",
    "lfu",
    "lru",
    "sieve",
]
