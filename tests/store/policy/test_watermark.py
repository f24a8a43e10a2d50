"""Eviction ahead of need: when the thread evicts, that one process does it, and that it ends."""

import logging
import math
import os
import threading

import numpy as np
import pytest

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import Evicted, ObjectPool, PutResult
from mooncake_serving.store import Store, Watermark, lfu, lru

from ..support import child, ended_well, eventually, kill

UNIT = 4096
NEVER_S = 3600.0  # an interval that no test sees the end of


def make(num_units: int = 32, **options) -> Store:
    return Store.create(num_units * UNIT, evict_ratio=0.0, **options)


def put(store: Store, key: int, **options) -> PutResult:
    return store.put(key, bytes(UNIT), **options)


def used_units(store: Store) -> int:
    stats = store.stats()
    return (stats.capacity_bytes - stats.free_bytes) // UNIT


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("watermark")]


class Noted:
    """A policy that notes in which thread it was asked, and for how much."""

    def __init__(self, policy=lru):
        self.policy = policy
        self.calls: list[tuple[str, int]] = []

    def __call__(self, pool: ObjectPool, num_bytes: int) -> Evicted:
        self.calls.append((threading.current_thread().name, num_bytes))
        return self.policy(pool, num_bytes)


@pytest.mark.parametrize("policy", [lru, lfu])
def test_slow_puts_never_evict_themselves(policy):
    noted = Noted(policy)
    with make(eviction=noted, watermark=(0.75, 0.5)) as store:
        for key in range(300):
            assert put(store, key) is PutResult.STORED
            eventually(lambda: used_units(store) <= 24)
        assert len(noted.calls) >= 20
        assert all(name.startswith("watermark") for name, _ in noted.calls)
        assert all(num_bytes == 9 * UNIT for _, num_bytes in noted.calls)
        assert store.exists_each(range(300 - 16, 300)).all() or policy is lfu


def test_put_faster_than_the_watermark_evicts_by_itself():
    asked = threading.Event()
    go = threading.Event()

    def slow(pool: ObjectPool, num_bytes: int) -> Evicted:
        if threading.current_thread().name.startswith("watermark"):
            asked.set()
            go.wait(60)
        return lru(pool, num_bytes)

    with make(eviction=slow, watermark=(0.75, 0.5)) as store:
        for key in range(25):
            put(store, key)
        assert asked.wait(60)
        assert [put(store, key) for key in range(25, 50)] == [PutResult.STORED] * 25
        go.set()
        eventually(lambda: used_units(store) <= 24)


@pytest.mark.parametrize("policy", [lru, lfu])
def test_watermark_covers_the_index(policy):
    """Small objects use it up, and not the bytes."""
    pool = ObjectPool.create(1024 * UNIT, num_objects=20)
    with Store(pool, eviction=policy) as store:
        store._watermark = Watermark(store, 0.75, 0.5, interval_s=NEVER_S)
        for key in range(100):
            assert store.put(key, b"small") is PutResult.STORED
            eventually(lambda: store.stats().num_ready <= 15)
            assert store.stats().num_ready >= 10 or key < 10


def test_puts_of_other_stores_are_found_at_the_interval():
    with make() as store, Watermark(store, 0.75, 0.5, interval_s=0.005):
        for key in range(30):
            store.put(key, bytes(UNIT))
        eventually(lambda: used_units(store) <= 24)


def test_watermark_thread_ends_with_its_store():
    before = threads()
    store = make(watermark=(0.9, 0.8))
    assert len(threads()) == len(before) + 1
    store.close()
    store.close()
    assert threads() == before


def test_watermark_thread_ends_when_the_pool_is_closed(caplog):
    store = make()
    watermark = Watermark(store, interval_s=0.005)
    store.pool.close()
    eventually(lambda: not watermark._thread.is_alive())
    assert "ends: ObjectPool: pool must be open" in caplog.text
    watermark.close()


def test_failing_policy_is_logged_and_retried(caplog):
    def broken(pool: ObjectPool, num_bytes: int) -> Evicted:
        if len(calls) < 3:
            calls.append(num_bytes)
            raise OSError("not today")
        return lru(pool, num_bytes)

    calls: list[int] = []
    with caplog.at_level(logging.ERROR), make(eviction=broken) as store:
        for key in range(30):
            put(store, key)
        with Watermark(store, 0.5, 0.25, interval_s=0.005):
            eventually(lambda: used_units(store) == 8)
    assert caplog.text.count("could not evict") == 3


def test_a_full_pool_is_not_evicted_from_at_each_put():
    noted = Noted()
    with make(eviction=noted) as store:
        store._watermark = Watermark(store, 0.5, 0.25, interval_s=NEVER_S)
        for key in range(20):
            put(store, key, retention="hard")
        eventually(lambda: noted.calls)
        asked = len(noted.calls)
        for key in range(20, 32):
            put(store, key, retention="hard")
        store._watermark.close()
        assert len(noted.calls) <= asked + 1  # that was under way
        assert put(store, 99) is PutResult.FULL


def test_pinned_evicted_objects_are_not_counted_twice():
    """What readers hold of evicted objects is on its way out: no more goes for its sake."""
    with make() as store, Watermark(store, 0.75, 0.5, interval_s=NEVER_S) as watermark:
        for key in range(24):
            put(store, key)
        with store.view(0):
            store.remove(0)
            put(store, 24)
            assert used_units(store) == 25 and watermark.check() == 0


def test_only_one_of_two_watermarks_evicts():
    inside, go = threading.Event(), threading.Event()

    def slow(pool: ObjectPool, num_bytes: int) -> Evicted:
        inside.set()
        go.wait(60)
        return lru(pool, num_bytes)

    with make(eviction=slow) as store, Store.open(store.pool.path) as other:
        for key in range(30):
            put(other, key)
        with Watermark(store, 0.75, 0.5, interval_s=NEVER_S):
            assert inside.wait(60)
            with Watermark(other, 0.75, 0.5, interval_s=NEVER_S) as second:
                assert second.check() == 0 and used_units(other) == 30
                go.set()
                eventually(lambda: used_units(other) == 16)
                assert second.check() == 0


@pytest.mark.parametrize("kind", ["file", "nameless"])
def test_another_process_takes_over_after_a_kill(kind, tmp_path):
    reads, writes = os.pipe()
    with make(path=tmp_path / "pool" if kind == "file" else None) as store:
        for key in range(30):
            put(store, key)

        def life() -> None:
            def stuck(pool: ObjectPool, num_bytes: int) -> Evicted:
                os.write(writes, b"in")
                threading.Event().wait()
                raise AssertionError

            with Store.open(store.pool.path, eviction=stuck, watermark=(0.75, 0.5)):
                threading.Event().wait()

        with child(life) as pid:
            assert os.read(reads, 2) == b"in"
            with Watermark(store, 0.75, 0.5, interval_s=0.005) as watermark:
                assert [watermark.check() for _ in range(20)] == [0] * 20
                assert used_units(store) == 30
                kill(pid)
                eventually(lambda: used_units(store) == 16)
    os.close(reads)
    os.close(writes)


def test_forked_child_leaves_the_watermark_alone():
    with make(watermark=(0.9, 0.8)) as store:
        with child(store.close) as pid:
            assert ended_well(pid)
        assert store._watermark._thread.is_alive()


def test_simulated_day_of_a_watermark():
    """A look each 5 s, and between two of them up to a tenth of the pool is put."""
    rng = np.random.default_rng(5)
    key = 0
    with make(64) as store, Watermark(store, 0.9, 0.85, interval_s=NEVER_S) as watermark:
        for puts in rng.choice([0, 0, 0, 1, 6], 24 * 3600 // 5):
            for _ in range(int(puts)):
                put(store, key)
                key += 1
            watermark.check()
            assert used_units(store) <= 57
    assert key > 20_000


@pytest.mark.parametrize("interval_s", [math.inf, 1e30, 10**400])
def test_infinite_interval_still_reacts_to_puts(interval_s):
    """It does not end the thread: puts have it look."""
    with make() as store, Watermark(store, 0.5, 0.25, interval_s) as watermark:
        # One more than `high`, so that it evicts once, whenever it looks; the second time it has
        # begun, and only puts wake it.
        for keys in (range(17), range(17, 26)):
            for key in keys:
                put(store, key)
                watermark.added(UNIT)
            eventually(lambda: used_units(store) == 8)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"high": 0.5, "low": 0.6}, "low and high must be 0 < low <= high <= 1, got 0.6 and 0.5"),
        ({"high": 1.5}, "low and high"),
        ({"low": 0}, "low and high"),
        ({"interval_s": 0}, "interval_s must be above 0, got 0"),
        ({"interval_s": "1"}, "interval_s must be above 0, got '1'"),
        ({"high": "0.9"}, "low and high"),
    ],
)
def test_wrong_options(options, message):
    before = threads()
    with make() as store, pytest.raises(InvalidArgument, match=f"Watermark: {message}"):
        Watermark(store, **options)
    assert threads() == before
