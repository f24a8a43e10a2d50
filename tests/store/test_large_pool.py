"""A store of many small objects: all are there, in their order, after eviction and a restart.

``--soak`` makes it a million objects; ``-rP`` prints how long each step took.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mooncake_kernels.pool import ObjectPool
from mooncake_serving.store import Store, lru

from .support import content

NUM_BYTES, BATCH = 128, 1000
NAMESPACE = "large"


def keys_of(first: int, count: int) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.uint64)


def values_of(store: Store, keys: np.ndarray) -> list[np.ndarray]:
    return [content(tuple(key), NUM_BYTES) for key in store.keyspace.keys(keys).tolist()]


def put(store: Store, first: int, count: int) -> None:
    for begin in range(first, first + count, BATCH):
        keys = keys_of(begin, BATCH)
        results = store.put_each(keys, values_of(store, keys))
        assert {result.name for result in results} == {"STORED"}


def check_all(store: Store, first: int, count: int) -> None:
    for begin in range(first, first + count, BATCH):
        keys = keys_of(begin, BATCH)
        out = np.empty((BATCH, NUM_BYTES), np.uint8)
        assert (np.asarray(store.get_into_each(keys, list(out))) == NUM_BYTES).all()
        assert (out == values_of(store, keys)).all()


@pytest.fixture
def path():
    made = Path("/dev/shm") / f"mk-test-{os.getpid()}-large"
    yield made
    made.unlink(missing_ok=True)


def timed(what: str, function: Callable, *arguments):
    began = time.perf_counter()
    result = function(*arguments)
    sys.stdout.write(f"{what}: {time.perf_counter() - began:.3f} s\n")
    return result


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def test_many_objects(path, soak):
    count, more = (1_000_000, 100_000) if soak else (20_000, 2_000)
    capacity = count * NUM_BYTES
    made = ObjectPool.create(capacity, path, num_objects=count, alignment=NUM_BYTES)
    store = Store(made, namespace=NAMESPACE, eviction=lru)
    before = resident_mb()
    timed(f"{count} puts, 1000 a call", put, store, 0, count)
    assert store.stats().num_ready == count
    timed(f"{count} gets, 1000 a call, compared", check_all, store, 0, count)
    objects = timed("a list of all", store.pool.objects)
    listed = np.sort(objects.keys[:, 0])
    assert (listed == np.sort(store.keyspace.keys(keys_of(0, count))[:, 0])).all()
    assert timed("match_prefix of 1000", store.match_prefix, keys_of(count - 1000, 1000)) == 1000

    timed(f"{more} puts into the full pool", put, store, count, more)
    check_all(store, count, more)
    assert timed("exists of all", store.exists_each, keys_of(0, count + more)).sum() <= count
    newest = store.exists_each(keys_of(count // 2, count // 2 + more))
    assert newest.all(), "evicted are the oldest"
    num_ready = store.stats().num_ready
    store.close()
    made.close()

    store = timed("open", lambda: Store.open(path, namespace=NAMESPACE))
    assert store.stats().num_ready == num_ready
    check_all(store, count, more)
    sys.stdout.write(f"resident memory, with the pool: {before:.0f} to {resident_mb():.0f} MB\n")
    timed("remove_all", store.remove_all)
    stats = store.stats()
    assert stats.num_ready == 0 and stats.free_bytes == stats.capacity_bytes == capacity
    assert stats.num_free_spans == 1
    store.close()
