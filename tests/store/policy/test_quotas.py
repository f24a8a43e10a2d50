"""Quotas of namespaces: what a put over quota does, and how exact they are between processes."""

import itertools
import os
import threading
from collections import OrderedDict
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_kernels.errors import InvalidArgument, Unavailable
from mooncake_kernels.pool import ObjectPool, ObjectPut, object_keys
from mooncake_serving.store import Quota, Store, lru, set_quota
from mooncake_serving.store.eviction.room import Room
from mooncake_serving.store.quotas import QuotaKeeper

from ...threads import in_threads
from ..support import EXISTS, OVER_QUOTA, STORED, child, ended_well

UNIT = 4096


@pytest.fixture
def store():
    """A namespace of at most 10 units and 8 objects in a pool of 64 units."""
    with Store.create(64 * UNIT, namespace="ours", quota=Quota(10 * UNIT, 8)) as made:
        yield made


def test_namespace_over_quota_evicts_its_own_objects(store):
    other = Store(store.pool, namespace="theirs")
    assert [other.put(i, bytes(UNIT)) for i in range(40)] == [STORED] * 40
    assert [store.put(i, bytes(UNIT)) for i in range(8)] == [STORED] * 8
    assert store.usage() == (8 * UNIT, 8) and other.usage() is None
    store.get(0)
    assert store.put(8, bytes(3 * UNIT)) is STORED  # by bytes 1 is too much, by objects 1
    assert store.exists_each(range(9)).tolist() == [True, False] + [True] * 7
    assert store.usage() == (10 * UNIT, 8)
    assert store.put(9, b"") is STORED and store.usage() == (10 * UNIT, 8)
    assert other.exists_each(range(40)).all()


def test_evictions_for_a_quota_are_reported(store):
    gone = []
    store.on_evicted.append(lambda keys: gone.extend(keys.tolist()))
    assert [store.put(i, bytes(UNIT)) for i in range(10)] == [STORED] * 10
    assert gone == store.keyspace.keys(range(2)).tolist()


def test_put_over_quota_fails_when_nothing_can_be_evicted(store):
    for i in range(8):
        assert store.put(i, bytes(UNIT), retention="hard" if i else "soft") is STORED
    assert store.put(0, bytes(UNIT)) is EXISTS
    with store.view(0):
        assert store.put(8, bytes(UNIT)) is OVER_QUOTA
    assert store.put(9, bytes(11 * UNIT)) is OVER_QUOTA and store.exists(0)  # nothing went for it
    assert store.put_each([8, 9], [bytes(UNIT)] * 2) == [STORED] * 2
    assert not store.exists(0) and not store.exists(8)
    assert isinstance(store.begin(10, 1), ObjectPut)
    assert store.usage().num_objects <= 8


def test_open_puts_count_towards_the_quota(store):
    writing = [store.begin(i, UNIT) for i in range(8)]
    assert store.usage() == (8 * UNIT, 8) and store.pool.stats().num_ready == 0
    assert store.put(8, b"1") is OVER_QUOTA and store.begin(8, 1) is OVER_QUOTA
    writing.pop().abort()
    assert store.put(8, b"1") is STORED
    writing.pop().commit()
    del writing
    assert store.usage() == (2 * UNIT, 2)


def test_name_keys_are_rejected(store):
    for op, call in (
        ("put", lambda: store.put("a name", b"1")),
        ("begin", lambda: store.begin(b"a name", 1)),
    ):
        with pytest.raises(InvalidArgument, match=f"{op}: key must be an integer in a namespace"):
            call()


def test_invalid_arguments_are_rejected_under_a_quota(store):
    for call in (
        lambda: store.put(1, bytes(65 * UNIT)),
        lambda: store.begin(1, -1),
        lambda: store.begin(1, "all"),
        lambda: store.put(-1, b"1"),
    ):
        with pytest.raises(InvalidArgument):
            call()


@pytest.mark.parametrize("limits", [(), (0,), (None, -1), (1.5,), (None, None)])
def test_wrong_quotas(limits):
    with pytest.raises(InvalidArgument, match="num_bytes and num_objects must be positive"):
        Quota(*limits)


def test_quotas_are_stored_in_the_pool(store):
    """In any process, and for puts under a key of any namespace; what a process names itself holds
    there.
    """
    set_quota(store.pool, "theirs", Quota(3 * UNIT))
    set_quota(store.pool, "small", Quota(num_objects=2))
    path = store.pool.path

    def life() -> None:
        with Store.open(path, namespace="theirs") as theirs:
            assert theirs.usage() == (0, 0) and theirs.has_quota
            for i in range(10):
                assert theirs.put(i, bytes(UNIT)) is STORED
                assert theirs.usage().num_bytes <= 3 * UNIT
            with pytest.raises(InvalidArgument, match="must be an integer in a namespace with a"):
                theirs.put("a name", b"1")

    with child(life) as pid:
        assert ended_well(pid)
    assert store.stats().num_ready == 3
    with Store.open(path) as any_of_them:
        assert any_of_them.has_quota and any_of_them.usage() is None
        assert any_of_them.put("a name", b"1") is STORED
        keys = object_keys(list(range(100, 110)), "small").tolist()
        assert [any_of_them.put_key(tuple(key), b"1") for key in keys] == [STORED] * 10
        assert any_of_them.pool.contains_each(keys).tolist() == [False] * 8 + [True] * 2
        begun = any_of_them.begin_key((1, keys[0][1]), 1)
        assert isinstance(begun, ObjectPut)
        begun.commit()
        with any_of_them.pool.pin((1, keys[0][1])), any_of_them.pool.pin(tuple(keys[-1])):
            assert any_of_them.put_key(tuple(keys[0]), b"1") is OVER_QUOTA
    with Store.open(path, namespace="theirs", quota=Quota(5 * UNIT)) as theirs:
        assert [theirs.put(i, bytes(UNIT)) for i in range(20, 30)] == [STORED] * 10
        assert theirs.usage() == (5 * UNIT, 5)
    store.remove_all()
    set_quota(store.pool, "theirs", Quota(4 * UNIT, 3))
    set_quota(store.pool, "small", None)
    with (
        Store.open(path, namespace="small") as small,
        Store.open(path, namespace="theirs") as other,
    ):
        assert small.usage() is None and other.usage() == (0, 0)
        assert [small.put(i, b"1") for i in range(4)] == [STORED] * 4
        assert [other.put(i, b"1") for i in range(4)] == [STORED] * 4
        assert small.exists_each(range(4)).all() and other.usage().num_objects == 3


def test_a_pool_has_room_for_64_quotas(store):
    for i in range(64):
        set_quota(store.pool, f"tenant-{i}", Quota(UNIT + i, i or None))
    with pytest.raises(Unavailable, match="set_quota: the pool has room for 64 quotas"):
        set_quota(store.pool, "another", Quota(UNIT))
    set_quota(store.pool, "another", None)
    set_quota(store.pool, "tenant-5", Quota(7 * UNIT))
    scopes = [int(object_keys([0], f"tenant-{i}")[0, 1]) for i in range(64)]
    expected = {scope: (UNIT + i, i) for i, scope in enumerate(scopes)} | {scopes[5]: (7 * UNIT, 0)}
    assert store.pool.quotas() == expected
    set_quota(store.pool, "tenant-3", None)
    set_quota(store.pool, "another", Quota(UNIT))
    del expected[scopes[3]]
    another = int(object_keys([0], "another")[0, 1])
    assert store.pool.quotas() == {**expected, another: (UNIT, 0)}
    for wrong in (lambda: set_quota(store.pool, "a", 5), lambda: set_quota(None, "a", None)):
        with pytest.raises(InvalidArgument, match="set_quota: (quota|pool) must be"):
            wrong()
    with pytest.raises(InvalidArgument, match="set_quota: num_objects must be an integer"):
        store.pool.set_quota(1, 2, -1)


PUTS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 4 * UNIT), st.sampled_from("pwr")), max_size=80
)


@settings(deadline=None, max_examples=60)
@given(puts=PUTS, num_units=st.integers(1, 20) | st.none(), num_objects=st.integers(1, 20))
def test_one_process_never_exceeds_the_quota(puts, num_units, num_objects):
    """And its objects are those that an LRU of this size would have, where one goes at a time."""
    limit = 1 << 40 if num_units is None else num_units * UNIT
    quota = Quota(None if num_units is None else limit, num_objects)
    model: OrderedDict[int, int] = OrderedDict()
    with Store.create(256 * UNIT, quota=quota) as store:
        neighbour = Store(store.pool, namespace="another")
        neighbour.put(1, b"1")
        for key, size, kind in puts:
            if kind == "r":
                assert (store.get(key) is not None) == (key in model)
                if key in model:
                    model.move_to_end(key)
                continue
            taken = max(1, -(-size // UNIT))
            if kind == "w" and isinstance(put := store.begin(key, size), ObjectPut):
                put.commit()
                result = STORED
            else:
                result = store.put(key, bytes(size))
            if key in model:
                assert result is EXISTS
                continue
            if taken * UNIT > limit:
                assert result is OVER_QUOTA
                continue
            assert result is STORED
            while len(model) >= num_objects or (sum(model.values()) + taken) * UNIT > limit:
                model.popitem(last=False)
            model[key] = taken
            assert store.usage() == (sum(model.values()) * UNIT, len(model))
            assert store.exists_each(list(model)).all()
        assert neighbour.exists(1)


def test_threads_of_one_process_keep_the_quota():
    with Store.create(256 * UNIT, quota=Quota(20 * UNIT)) as store:

        def life(first: int) -> None:
            for i in range(first, first + 100):
                store.put(i, bytes(UNIT + i % UNIT))
                assert store.usage().num_bytes - store._quota._under_way[0] <= 20 * UNIT

        in_threads(*(partial(life, 1000 * i) for i in range(4)))
        assert store.usage().num_bytes <= 20 * UNIT


def test_two_processes_keep_the_quota():
    """Each counts what the other put; neither passes the quota by more than the other's share."""
    quota = Quota(32 * UNIT)
    with Store.create(256 * UNIT, quota=quota) as store:
        reads, writes = os.pipe()

        def life() -> None:
            with Store.open(store.pool.path, quota=quota) as own:
                os.write(writes, b"go")
                for key in range(1000, 1400):
                    assert own.put(key, bytes(UNIT)) in (STORED, OVER_QUOTA)

        with child(life) as pid:
            assert os.read(reads, 2) == b"go"
            most = 0
            for key in range(400):
                assert store.put(key, bytes(UNIT)) in (STORED, OVER_QUOTA)
                most = max(most, store.stats().num_ready)
            assert ended_well(pid)
        os.close(reads)
        os.close(writes)
        assert 16 < most <= 32 + 16 + 2
        store._quota._counted_at = -np.inf  # as if it were long ago
        assert store.put(5000, bytes(UNIT)) is STORED and store.usage().num_bytes <= 32 * UNIT


def test_simulated_day_of_two_processes():
    """Who has just counted leaves the quota kept; in between it is passed by one share at most."""
    rng = np.random.default_rng(9)
    now, limit = 0.0, 24
    scope = int(object_keys([0], "ours")[0, 1])
    with ObjectPool.create(256 * UNIT) as first, ObjectPool.open(first.path) as second:
        keepers = [
            QuotaKeeper(
                pool, scope, Quota(limit * UNIT), Room(pool, lru, 0).evict_by, clock=lambda: now
            )
            for pool in (first, second)
        ]
        counted = [-9.0, -9.0]
        num_passed = 0
        while now < 24 * 3600:
            now += float(rng.choice([0.01, 0.3, 200.0]))
            which = int(rng.integers(2))
            pool, keeper = (first, second)[which], keepers[which]
            key = (int(rng.integers(1 << 40)), scope)
            put = partial(pool.put_from, key, b"1", checksum=False)
            result = keeper.admit(key, UNIT, put)
            assert result is STORED
            counts_anew = keeper._counted_at == now
            counted[which] = keeper._counted_at
            taken = pool.stats().num_ready
            assert taken <= limit + limit // 2
            if counts_anew:
                assert taken <= limit
            num_passed += taken > limit
        assert min(counted) > 24 * 3600 - 10_000
        assert num_passed < 100


def test_quota_is_always_set_while_it_changes(store):
    pool, limits = store.pool, [(5000, 0), (0, 9)]
    scope = int(store.keyspace.scope)
    assert pool.set_quota(scope, *limits[0])
    stop = threading.Event()

    def change():
        for i in itertools.count():
            if stop.is_set():
                return
            pool.set_quota(scope, *limits[i % 2])

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(20_000):
            assert pool.quotas()[scope] in limits
    finally:
        stop.set()
        thread.join()
