"""Objects and calls of the tests of TieredStore."""

import numpy as np

from mooncake_kernels.pool import ObjectPool, PutResult
from mooncake_serving.store import (
    Store,
    TieredStore,
    largest_first,
    length_aware,
    lfu,
    lru,
    sieve,
)

from ..support import content
from .support import PAGE

BUCKET = 256 << 10
OBJECT = 2 * PAGE
IN_POOL = 8  # objects that it has room for
KEYS = list(range(30))
POLICIES = [lru, sieve, lfu, length_aware, largest_first]


def value(key: int) -> np.ndarray:
    return content((key, 0), OBJECT)


def put(store: Store, *keys: int) -> list[PutResult]:
    return store.put_each(keys, [value(key) for key in keys])


def read(store: Store, *keys: int) -> list[int]:
    """Sizes of objects, each of which is what was put."""
    buffers = [np.full(OBJECT, 7, np.uint8) for _ in keys]
    sizes = store.get_into_each(keys, buffers)
    for key, buffer, size in zip(keys, buffers, sizes.tolist(), strict=True):
        np.testing.assert_array_equal(buffer, value(key) if size > 0 else np.uint8(7))
    return sizes.tolist()


def others_of(store: TieredStore) -> Store:
    """Another process's store on its pool."""
    return Store(ObjectPool.open(store.pool.path), namespace="model")


def to_disk(store: TieredStore, *keys: int) -> None:
    for key in keys:
        assert store._demoter.offer(store.keyspace.key(key))
    assert store.flush() and is_on_disk(store, *keys)
    assert not store.pool.contains_each(store.keyspace.keys(keys)).any()


def is_on_disk(store: TieredStore, *keys: int) -> bool:
    return bool(store.tier.contains_each(store.keyspace.keys(keys)).all())


def flip_in_pool(store: TieredStore, key: int) -> None:
    memory = store.pool.memory().numpy()
    at = memory.tobytes().find(value(key)[:64].tobytes())
    assert at >= 0
    memory[at + 5] ^= 1
