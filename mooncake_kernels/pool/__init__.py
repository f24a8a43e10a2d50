"""Object pools in one host's shared memory, read and written directly by all its processes, or in
GPU memory.

Mechanism only: a pool never decides what to evict or when; ``mooncake_serving.store`` does.
docs/store/store.md says what holds when processes die.
"""

from .handles import ObjectPut, ObjectPuts, PinnedObject, PoolChanges, PoolWatch, Retention
from .object_pool import ObjectPool
from .values import (
    Evicted,
    Key,
    PoolCounts,
    PoolObjects,
    PoolStats,
    PutResult,
    as_key,
    as_keys,
    checksum_of,
    hash_name,
    hash_names,
    named_keys,
    object_key,
    object_keys,
)

__all__ = [
    "Evicted",
    "Key",
    "ObjectPool",
    "ObjectPut",
    "ObjectPuts",
    "PinnedObject",
    "PoolChanges",
    "PoolCounts",
    "PoolObjects",
    "PoolStats",
    "PoolWatch",
    "PutResult",
    "Retention",
    "as_key",
    "as_keys",
    "checksum_of",
    "hash_name",
    "hash_names",
    "named_keys",
    "object_key",
    "object_keys",
]
