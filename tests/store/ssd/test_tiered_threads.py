"""TieredStore: reads, puts and removals while others read, write and evict."""

import threading
import time

import numpy as np
import pytest

from mooncake_kernels.errors import Unavailable
from mooncake_kernels.pool import PutResult
from mooncake_serving.store import Store
from mooncake_serving.store.tiered.demotion import Demoter

from ...threads import in_threads
from ..support import EXISTS, FULL, STORED, eventually
from .support import no_writes_from
from .tiered import IN_POOL, KEYS, OBJECT, put, read, value


def test_reader_waits_for_a_promotion_in_progress(opened, monkeypatch):
    store = opened()
    put(store, *KEYS)
    store.flush()
    cold = next(k for k in KEYS if not store.pool.contains(store.keyspace.key(k)))
    begun, goes_on = threading.Event(), threading.Event()
    real = store.tier.get_into_each

    def slow(*args, **options):
        begun.set()
        assert goes_on.wait(60)
        return real(*args, **options)

    monkeypatch.setattr(store.tier, "get_into_each", slow)
    results = []

    def look():
        with store.view(cold) as pinned:
            results.append(bytes(pinned.view))

    lives = [threading.Thread(target=look)]
    lives[0].start()
    assert begun.wait(60)
    lives += [threading.Thread(target=lambda: results.append(store.get(cold))) for _ in range(2)]
    lives += [threading.Thread(target=look)]
    for life in lives[1:]:
        life.start()
    goes_on.set()
    for life in lives:
        life.join()
    assert results == [value(cold).tobytes()] * 4


def test_concurrent_readers_of_one_object_all_get_it(opened):
    store = opened()
    put(store, *KEYS)
    store.flush()
    there = [k for k in KEYS if store.tier.contains_each(store.keyspace.keys([k]))[0]]
    gate = threading.Barrier(3)

    def life():
        for key in there:
            gate.wait(60)
            assert store.get(key) == value(key).tobytes()

    in_threads(life, life, life)


def test_removed_objects_do_not_return(opened, soak):
    """While others evict it, and bring it up."""
    store = opened()
    done = threading.Event()

    def evict():
        while not done.is_set():
            store.evict(IN_POOL * OBJECT)

    def remove():
        try:
            for key in range(2000 if soak else 200):
                put(store, key)
                assert store.remove(key)
                assert not store.exists(key) and store.get(key) is None
                if key % 20 == 0:
                    put(store, key, key + 10_000)
                    store.remove_all()
                    assert not store.exists_each([key, key + 10_000]).any()
        finally:
            done.set()

    def look():
        chance = np.random.default_rng(1)
        while not done.is_set():
            key = int(chance.integers(0, 200))
            assert store.get(key) in (None, value(key).tobytes())

    in_threads(evict, remove, look)
    store.flush()
    assert not store.exists_each(range(200)).any()


@pytest.mark.parametrize("call", [Store.put_key, Store.begin_key], ids=["put", "begin"])
@pytest.mark.parametrize("look", [0, 1])
def test_object_demoted_during_a_lookup_exists(opened, monkeypatch, call, look):
    """A put looks at the disk, where the object is not yet, and then at the pool."""
    store = opened()
    put(store, 0)
    key, real, num_looks = store.keyspace.key(0), store.tier.contains_each, 0

    def contains_each(keys):
        nonlocal num_looks
        found = real(keys)
        num_looks += 1
        if num_looks == look + 1:
            assert store._demoter.offer(key)
            eventually(lambda: real(keys).all())
            time.sleep(0.05)  # for the demoter to evict it, if it may
        return found

    monkeypatch.setattr(store.tier, "contains_each", contains_each)
    name = call.__name__
    assert getattr(store, name)(key, b"other" if name == "put_key" else 5) is EXISTS
    assert num_looks > look and store.flush()
    assert store.get(0) == value(0).tobytes()


@pytest.fixture
def slow(opened, monkeypatch):
    """A store whose object 0 is being written to the disk until the event is set."""
    store, begun, goes_on = opened(), threading.Event(), threading.Event()
    real = store.tier.put_each

    def put_each(*values):
        begun.set()
        assert goes_on.wait(60)
        return real(*values)

    monkeypatch.setattr(store.tier, "put_each", put_each)
    put(store, 0)
    assert store._demoter.offer(store.keyspace.key(0)) and begun.wait(60)
    yield store, goes_on
    goes_on.set()


@pytest.mark.parametrize("who", ["this store", "another process"])
def test_object_replaced_during_its_write_stays(slow, who):
    store, goes_on = slow
    others = Store(store.pool, namespace="model")  # as of a process that has not the tier
    assert others.remove(0)
    assert (store if who == "this store" else others).put(0, b"other") is STORED
    goes_on.set()
    assert store.flush() and store.get(0) == b"other"
    store.evict(IN_POOL * OBJECT)
    assert store.flush() and store.get(0) == b"other"


def test_removal_the_disk_cannot_record_is_hidden_until_it_can(slow, opened, monkeypatch):
    store, goes_on = slow
    put(store, 1)
    assert store._demoter.offer(store.keyspace.key(1))
    key, others = store.keyspace.keys([0]), Store(store.pool, namespace="model")

    def fail(key):
        raise Unavailable("the disk could not be written")

    with monkeypatch.context() as patch:
        patch.setattr(store.tier, "remove", fail)
        assert others.remove(0)
        goes_on.set()
        assert store._demoter.flush()
        assert store.tier.contains_each(key).all()  # where it still is
        assert not store.exists(0) and store.match_prefix([0]) == 0 and store.get(0) is None
        assert read(store, 0) == [-1] and key.tolist()[0] not in store.list_objects()[0].tolist()
        assert not store.pool.contains(store.keyspace.key(1)) and read(store, 1) == [OBJECT]
        assert store.put(0, b"other") is STORED
        assert store._demoter.offer(store.keyspace.key(0)) and store._demoter.flush()
        assert store.get(0) is None and store.demotion_stats().num_unwritten == 1
    assert store.flush() and not store.tier.contains_each(key).any()
    assert store.put(0, b"new") is STORED
    assert store._demoter.offer(store.keyspace.key(0)) and store.flush()
    assert store.tier.contains_each(key).all() and store.get(0) == b"new"


def test_removal_the_disk_cannot_record_is_recorded_on_close(slow, opened, monkeypatch):
    store, goes_on = slow
    real, num_failures = store.tier.remove, 0

    def fail_once(key):
        nonlocal num_failures
        num_failures += 1
        if num_failures == 1:
            raise Unavailable("the disk could not be written")
        return real(key)

    monkeypatch.setattr(store.tier, "remove", fail_once)
    assert Store(store.pool, namespace="model").remove(0)
    goes_on.set()
    store.close()
    assert num_failures == 2 and not opened().exists(0)


def test_objects_gone_from_both_are_reported(opened):
    """What the disk could not take, and not what it has."""
    store, told = opened(), set()
    store.on_evicted.append(lambda keys: told.update(keys[:, 0].tolist()))
    put(store, *KEYS)
    store.flush()
    read(store, *KEYS)
    assert told == set() and store.exists_each(KEYS).all()
    new = range(100, 130)
    with no_writes_from(0):
        put(store, *new)
        store.flush()
    assert told == {key for key in new if not store.exists(key)} and len(told) >= 30 - IN_POOL


def test_wait_for_queue_room_ends_when_queued_objects_are_removed(opened, monkeypatch):
    goes_on, real = threading.Event(), Demoter._take

    def take(demoter):
        assert goes_on.wait(60)
        return real(demoter)

    monkeypatch.setattr(Demoter, "_take", take)
    store = opened()
    put(store, 0)
    assert store._demoter.offer(store.keyspace.key(0))
    waits = threading.Thread(target=store._demoter.wait_written)
    waits.start()
    time.sleep(0.05)  # until it does
    assert store.remove(0)
    waits.join(10)
    is_waiting = waits.is_alive()
    put(store, 1)
    assert store._demoter.offer(store.keyspace.key(1))
    goes_on.set()
    assert not is_waiting


def test_close_gives_up_in_time(opened, monkeypatch):
    store = opened(close_deadline_s=0.05)
    goes_on, waits = threading.Event(), threading.Event()
    real = store.tier.put_each

    def slow(*values):
        waits.set()
        assert goes_on.wait(60)
        return real(*values)

    monkeypatch.setattr(store.tier, "put_each", slow)
    put(store, *range(6))
    assert store._demoter.offer(store.keyspace.key(0)) and waits.wait(60)
    assert all(store._demoter.offer(store.keyspace.key(k)) for k in range(1, 6))
    closer = threading.Thread(target=store.close)
    closer.start()
    while store.demotion_stats().num_closed < 5:
        assert closer.is_alive()  # what is being written ends first
    goes_on.set()
    closer.join()
    assert store.demotion_stats().num_written == 1
    assert opened().exists_each(range(6)).tolist() == [True, *[False] * 5]


def test_threads(opened, soak):
    """Each thread puts and reads keys of all: what is there is what was put."""
    store = opened(num_buckets=4)

    def life(number):
        chance = np.random.default_rng(number)
        for _ in range(400 if soak else 40):
            keys = chance.integers(0, 40, 5).tolist()
            results = put(store, *dict.fromkeys(keys))
            assert set(results) <= {STORED, EXISTS, PutResult.BEING_WRITTEN, FULL}
            assert set(read(store, *keys)) <= {OBJECT, -1}
            if chance.random() < 0.1:
                store.remove(keys[0])

    in_threads(*(lambda i=i: life(i) for i in range(3)))
    assert store.flush()
    stats = store.stats()
    assert (stats.num_writing, stats.num_pins, stats.num_doomed) == (0, 0, 0)
    assert store.tier.stats().num_damaged == store.tier.stats().num_write_errors == 0
