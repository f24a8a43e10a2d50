"""TieredStore: objects that a process without the tier removes, whenever somebody dies."""

import threading
import time

import numpy as np
import pytest

from mooncake_kernels.errors import Unavailable
from mooncake_kernels.pool import ObjectPool
from mooncake_serving.store import SsdTier, Store, TieredStore
from mooncake_serving.store.tiered import demotion

from ..support import STORED, child, ended_well, eventually, kill
from .support import PAGE
from .tiered import (
    BUCKET,
    IN_POOL,
    OBJECT,
    flip_in_pool,
    is_on_disk,
    others_of,
    put,
    read,
    to_disk,
    value,
)

NEW = b"new" * 1000
NUM_KEPT = 1 << 14  # removals, in csrc/store/layout.h


def is_nowhere(store: TieredStore, key: int) -> bool:
    """By every call that could find it."""
    words = store.keyspace.keys([key])
    assert store.get(key) is None and store.view(key) is None and read(store, key) == [-1]
    assert store.match_prefix([key]) == 0 and store.ids_of(words).tolist() == [0]
    assert words.tolist()[0] not in store.list_objects()[0].tolist()
    return not store.exists(key) and not store.pool.contains_each(words).any()


def test_remove_each_removes_from_both_tiers(opened):
    store = opened()
    put(store, 0, 1, 2)
    to_disk(store, 0, 1)
    assert read(store, 1) == [OBJECT]  # both have it
    assert store.remove_each([0, 9, 1, 2, 0]).tolist() == [True, False, True, True, False]
    assert all(is_nowhere(store, key) for key in range(3))
    assert not len(store.tier.keys())


def test_duplicate_removal_of_queued_objects(opened, monkeypatch):
    store = opened()
    put(store, 0, 1)
    monkeypatch.setattr(store._demoter, "_is_whole", lambda *_: time.sleep(0.2) or True)
    for key in (0, 1):  # the first is being written
        assert store._demoter.offer(store.keyspace.key(key))
    assert store.remove_each([1, 0, 1]).tolist() == [True, True, False]
    assert is_nowhere(store, 0) and is_nowhere(store, 1)


@pytest.fixture(params=["pool and disk", "disk", "pool", "queue"])
def holding(opened, request, monkeypatch):
    """A store that has object 0 there, and another process's store on its pool."""
    store = opened()
    put(store, 0)
    if "disk" in request.param:
        to_disk(store, 0)
    if request.param == "pool and disk":
        assert read(store, 0) == [OBJECT]
    if request.param == "queue":  # and stays there, or is being written, for a while
        monkeypatch.setattr(store._demoter, "_is_whole", lambda *_: time.sleep(0.2) or True)
        assert store._demoter.offer(store.keyspace.key(0))
    with others_of(store) as others:
        yield store, others


def test_object_removed_by_another_process_is_gone(holding):
    store, others = holding
    others.remove(0)
    assert is_nowhere(store, 0)
    assert store.flush() and is_nowhere(store, 0) and not is_on_disk(store, 0)
    assert not store.remove(0)


def test_object_put_after_a_foreign_removal_stays(holding):
    store, others = holding
    others.remove(0)
    assert others.put(0, NEW) is STORED
    assert store.get(0) == NEW
    store.flush()
    if store.pool.contains(store.keyspace.key(0)):
        to_disk(store, 0)
    assert store.get(0) == NEW and store.tier.stats().num_objects == 1
    assert others.remove(0) and is_nowhere(store, 0)
    assert store.put(0, value(0)) is STORED and read(store, 0) == [OBJECT]


@pytest.mark.parametrize("call", ["remove", "remove_all"])
def test_object_removed_by_another_process_cannot_be_removed_again(opened, call):
    store = opened()
    put(store, 0, 1)
    to_disk(store, 0, 1)
    with others_of(store) as others:
        for key in (0, 1) if call == "remove" else ():
            others.remove(key)
        if call == "remove_all":
            others.remove_all()
    assert not store.remove(0) and store.remove_all() == 0
    assert store.tier.stats().num_objects == 0


def test_unrelated_process_removes_objects(opened):
    store = opened()
    put(store, 0, 1)
    to_disk(store, 0, 1)
    assert read(store, 0) == [OBJECT]

    def life():
        with others_of(store) as others:
            assert others.remove_each([0, 1]).tolist() == [True, False]

    with child(life) as pid:
        assert ended_well(pid)
    assert is_nowhere(store, 0) and is_nowhere(store, 1)


def test_remove_all_by_another_process(opened):
    store = opened()
    put(store, 0, 1)
    to_disk(store, 0, 1)
    put(store, 2)
    with others_of(store) as others:
        assert others.remove_all() == 1
        assert others.put(3, value(3)) is STORED
    assert all(is_nowhere(store, key) for key in range(3)) and read(store, 3) == [OBJECT]
    to_disk(store, 3)
    assert read(store, 3) == [OBJECT] and store.tier.stats().num_objects == 1


def test_more_removals_than_the_pool_records(opened, monkeypatch):
    """Then nothing on the disk may be given out, and nothing is lost from the pool."""
    monkeypatch.setattr(demotion, "LOOK_S", 3600.0)
    store = opened()
    put(store, 0, 1)
    to_disk(store, 0, 1)
    put(store, 2)
    with others_of(store) as others:
        for key in range(3, NUM_KEPT + 2):
            others.remove(key)
        assert store.exists(0)
        others.remove(1)
        assert is_nowhere(store, 1) and store.exists(0)
        for key in range(3, NUM_KEPT + 3):
            others.remove(key)
    assert is_nowhere(store, 0) and read(store, 2) == [OBJECT]
    assert store.put(0, NEW) is STORED
    to_disk(store, 0)
    assert store.get(0) == NEW and store.tier.stats().num_objects == 1


def test_object_removed_during_promotion_does_not_return(opened, monkeypatch):
    store = opened()
    put(store, 0)
    to_disk(store, 0)
    real = store.tier.get_into_each
    with others_of(store) as others:

        def then_removed(*args, **options):
            sizes = real(*args, **options)
            assert not others.remove(0)  # it is being written
            return sizes

        with monkeypatch.context() as patch:
            patch.setattr(store.tier, "get_into_each", then_removed)
            store.get(0)
        assert is_nowhere(store, 0) and store.pool.stats().num_writing == 0
        assert others.put(0, NEW) is STORED and store.get(0) == NEW


@pytest.mark.parametrize("when", ["before", "after"])
def test_object_removed_during_its_write_is_not_visible(opened, monkeypatch, when):
    store = opened()
    put(store, 0)
    key, real, seen = store.keyspace.key(0), store.tier.put_each, []
    retry = threading.Thread(target=store._disk.retry)
    with others_of(store) as others:

        def with_removal(*values):
            if when == "before":
                assert others.remove(0)
                retry.start()
                retry.join(0.2)  # if it does not wait for what is being written
            results = real(*values)
            if when == "after":
                assert others.remove(0)
                retry.start()
            seen.append(store.exists(0) or store.get(0) is not None)
            return results

        with monkeypatch.context() as patch:
            patch.setattr(store.tier, "put_each", with_removal)
            assert store._demoter.offer(key) and store.flush()
        retry.join(60)
        assert seen == [False]
        assert is_nowhere(store, 0) and not is_on_disk(store, 0)


def test_object_removed_while_queued_is_not_written(opened, monkeypatch):
    """Also if the removal was recorded by then: nothing is left of it that would hide it."""
    store = opened()
    put(store, 0)
    with others_of(store) as others:

        def then_removed(key, pinned):
            assert others.remove(0)
            store._disk.retry()
            return True

        def see(keys, *values):
            seen.extend(keys)
            return real(keys, *values)

        real, seen = store.tier.put_each, []
        with monkeypatch.context() as patch:
            patch.setattr(store._demoter, "_is_whole", then_removed)
            patch.setattr(store.tier, "put_each", see)
            assert store._demoter.offer(store.keyspace.key(0)) and store.flush()
        assert seen == [] and is_nowhere(store, 0)
        stats = store.demotion_stats()
        assert stats.num_dropped == stats.num_removed == 1


@pytest.mark.parametrize("how", ["written", "on the disk"])
def test_object_put_again_before_eviction_of_the_old_one_stays(opened, monkeypatch, how):
    store = opened()
    put(store, 0)
    if how == "on the disk":
        to_disk(store, 0)
        assert read(store, 0) == [OBJECT]
    real = store.pool.evict_keys
    with others_of(store) as others:

        def evict_keys(*args):
            assert others.remove(0) and others.put(0, NEW) is STORED
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(store.pool, "evict_keys", evict_keys)
            store.evict(OBJECT)
            assert store.flush()
    assert store.get(0) == NEW
    to_disk(store, 0)
    assert store.get(0) == NEW


def test_foreign_removal_reaches_the_disk_in_the_background(opened, monkeypatch):
    monkeypatch.setattr(demotion, "LOOK_S", 0.01)
    store = opened()
    put(store, 0)
    to_disk(store, 0)
    with others_of(store) as others:
        others.remove(0)
    eventually(lambda: not is_on_disk(store, 0))


def test_damaged_object_dropped_by_another_process_stays_on_disk(opened):
    store = opened()
    put(store, 0)
    to_disk(store, 0)
    assert read(store, 0) == [OBJECT]
    flip_in_pool(store, 0)
    with others_of(store) as others:
        others.remove_damaged(others.keyspace.key(0))
        assert not others.exists(0)
    assert read(store, 0) == [OBJECT]


def test_object_id_is_stable_across_tiers(opened):
    store = opened()
    put(store, 0, 1)
    words = store.keyspace.keys([0, 1])
    ids = store.ids_of(words).tolist()
    assert len({0, *ids}) == 3
    to_disk(store, 0, 1)
    assert store.ids_of(words).tolist() == ids
    assert read(store, 0) == [OBJECT] and store.ids_of(words).tolist() == ids
    store.evict(IN_POOL * OBJECT)
    assert store.ids_of(words).tolist() == ids
    assert sorted(store.list_objects()[1].tolist()) == sorted(ids)
    store.remove(0)
    put(store, 0)
    new = int(store.ids_of(words)[0])
    assert new not in (0, *ids)
    assert not store.remove_exactly(tuple(words[0].tolist()), ids[0]) and read(store, 0) == [OBJECT]
    to_disk(store, 0)
    assert not store.remove_exactly(tuple(words[0].tolist()), ids[0]) and read(store, 0) == [OBJECT]
    assert store.remove_exactly(tuple(words[0].tolist()), new) and is_nowhere(store, 0)
    assert store.remove_exactly(tuple(words[1].tolist()), ids[1]) and is_nowhere(store, 1)


# The process with the tier dies, and another one opens the pool and the tier.


def open_tier(tmp_path) -> SsdTier:
    return SsdTier(
        tmp_path / "tier", 8 * BUCKET, bucket_bytes=BUCKET, slot_bytes=4 * PAGE, retry_s=0
    )


@pytest.fixture
def pool():
    with ObjectPool.create(IN_POOL * OBJECT) as pool:
        yield pool


def reopened(tmp_path, pool) -> TieredStore:
    return TieredStore(
        ObjectPool.open(pool.path), open_tier(tmp_path), namespace="model", min_uses=1
    )


def killed_after(tmp_path, pool, life) -> None:
    """A process that has a store, and is killed when this is done with it."""

    def with_store():
        store = reopened(tmp_path, pool)
        life(store)
        (tmp_path / "done").touch()
        time.sleep(600)

    with child(with_store) as pid:
        eventually((tmp_path / "done").exists)
        kill(pid)
    (tmp_path / "done").unlink()


def fill(store: TieredStore) -> None:
    put(store, 0, 1)
    to_disk(store, 0, 1)
    assert read(store, 0) == [OBJECT]


@pytest.mark.parametrize("what", ["one", "all"])
def test_removal_while_the_tier_owner_is_dead(tmp_path, pool, what):
    killed_after(tmp_path, pool, fill)
    others = Store(pool, namespace="model")
    assert others.remove(0) if what == "one" else others.remove_all() == 1
    with reopened(tmp_path, pool) as store:
        assert is_nowhere(store, 0) and read(store, 1) == [OBJECT if what == "one" else -1]


def test_tier_owner_dies_before_recording_a_removal(tmp_path, pool):
    def life(store):
        def fail(key):
            raise Unavailable("the disk could not be written")

        fill(store)
        store.tier.remove = fail
        others = others_of(store)
        assert others.remove(0)
        assert not store.exists(0) and store.exists(1)
        assert store.flush() and is_on_disk(store, 0)

    killed_after(tmp_path, pool, life)
    with reopened(tmp_path, pool) as store:
        assert is_nowhere(store, 0) and read(store, 1) == [OBJECT]


def test_object_put_after_removal_survives_a_crash(tmp_path, pool):
    def life(store):
        fill(store)
        others = others_of(store)
        assert others.remove(0) and others.put(0, NEW) is STORED
        assert others.remove_all() == 1 and others.put(1, NEW) is STORED
        to_disk(store, 1)

    killed_after(tmp_path, pool, life)
    with reopened(tmp_path, pool) as store:
        assert is_nowhere(store, 0) and store.get(1) == NEW


def test_remover_killed_at_any_moment(tmp_path, pool):
    """At any moment: then the object is there as a whole, in one tier or both, or nowhere."""
    with reopened(tmp_path, pool) as store:
        fill(store)

        def life():
            with others_of(store) as others:
                for key in range(1 << 20):
                    others.remove(key % 5)

        for delay_s in np.linspace(0.01, 0.05, 5):
            with child(life) as pid:
                time.sleep(delay_s)
                kill(pid)
            assert store.exists(0) == (store.get(0) is not None)
            store.flush()
            put(store, *range(5))
            assert read(store, *range(5)) == [OBJECT] * 5
