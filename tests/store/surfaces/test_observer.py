"""Observers receive everything that a process does with a pool."""

import numpy as np
import pytest

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import ObjectPool, ObjectPut, PutResult, object_key
from mooncake_serving.store import SsdTier, Store, TieredStore, largest_first
from mooncake_serving.store.observer import ObservedPool, Observer

from .support import Recorder

UNIT = 4096


@pytest.fixture
def told(pool):
    recorder = Recorder()
    pool.observe(Observer(), recorder)  # the first one wants to know nothing
    return recorder


def test_puts_and_removals(pool, told):
    store = Store(pool, namespace="a")
    key = list(object_key("x", "a"))
    assert store.put_from("x", b"12", np.zeros(3)) is PutResult.STORED
    assert store.put("x", b"34") is PutResult.EXISTS
    assert told.take() == [("stored", [key], 26)]
    assert len(store.get("x")) == 26 and store.get("y") is None
    assert store.exists("x") and store.match_prefix([1, 2]) == 0 and told.take() == []
    assert store.remove("x") and not store.remove("x")
    assert told.take() == [("removed", [key])]


def test_what_is_put_with_heads(pool, told):
    value = np.ones(10, np.uint8)
    places = np.full((3, 1), value.ctypes.data, np.uint64), np.full((3, 1), 10, np.uint64)
    keys, heads = np.array([[1, 1], [2, 1], [1, 1]], np.uint64), [b"a", b"bb", b"ccc"]
    assert pool.put_headed(keys, heads, *places).count(PutResult.STORED) == 2
    assert told.take() == [("stored", [[1, 1], [2, 1]], 23)]
    keys[2] = 3
    assert pool.remove_each(keys).tolist() == [True, True, False]
    assert told.take() == [("removed", [[1, 1], [2, 1]])]
    assert not pool.put_headed(keys[:0], [], places[0][:0], places[1][:0])
    assert not pool.remove_each(keys).any() and told.take() == []


def test_what_goes_to_a_disk_is_told_as_evicted(pool, told, tmp_path):
    assert pool.put_from((1, 1), b"x") is PutResult.STORED
    assert told.take() == [("stored", [[1, 1]], 1)]
    tier = SsdTier(tmp_path / "tier", 2 << 20, bucket_bytes=1 << 20)
    with TieredStore(pool, tier, min_uses=1) as store:
        store.evict(1)
        assert store.flush()
        assert told.take() == [("evicted", [[1, 1]])]


def test_what_is_written_in_place_is_told_at_its_commit(pool, told):
    with pool.begin((1, 2), 10) as put:
        assert isinstance(put, ObjectPut) and told.take() == []
    assert told.take() == [("stored", [[1, 2]], 10)]
    put.abort()
    pool.begin((1, 3), 10).abort()
    with pytest.raises(ZeroDivisionError), pool.begin((1, 4), 10):
        raise ZeroDivisionError
    assert pool.begin((1, 2), 10) is PutResult.EXISTS and told.take() == []


@pytest.mark.parametrize("eviction", [None, largest_first])
def test_evictions(pool, told, eviction):
    store = Store(pool, evict_ratio=0, **({} if eviction is None else {"eviction": eviction}))
    for key in range(64):
        store.put(key, bytes(UNIT))
    told.take()
    store.put(64, bytes(UNIT))
    (kind, [victim]), stored = told.take()
    assert kind == "evicted" and victim[0] == 0 and stored[1][0][0] == 64
    evicted = store.evict(3 * UNIT)
    assert told.take() == [("evicted", sorted(evicted.keys.tolist()))] and len(evicted.keys) == 3


def test_what_others_do_is_theirs_to_tell(pool, told):
    with ObjectPool.open(pool.path) as other:
        other.put_from((1, 1), b"x")
        other.remove((1, 1))
    assert told.take() == []


def test_a_damaged_object_is_told_as_removed(pool, told):
    store = Store(pool, verify=1.0)
    store.put(7, b"whole")
    pool.memory()[: 64 * UNIT].fill_(1)
    assert store.get_into_each([7], [np.zeros(5, np.uint8)]).tolist() == [-4]
    assert [kind for kind, *_ in told.take()] == ["stored", "removed"]


def test_what_an_observer_raises_is_logged(pool, caplog):
    class Raises(Observer):
        def on_stored(self, keys, num_bytes):
            raise KeyError("of an observer")

        on_removed = on_stored

    recorder = Recorder()
    pool.observe(Raises(), recorder)
    store = Store(pool)
    assert store.put("a", b"x") is PutResult.STORED
    with pool.begin((1, 2), 10):
        pass
    assert store.get("a") == b"x" and store.remove("a") and pool.evict(1).num_bytes == UNIT
    kinds = [kind for kind, *_ in recorder.take()]
    assert kinds == ["stored", "stored", "removed", "evicted"]
    assert len(caplog.records) == 4 and "of an observer" in caplog.text


def test_only_observers_observe_and_each_of_them_once(pool):
    recorder = Recorder()
    pool.observe(recorder)
    for wrong in (5, Recorder):
        with pytest.raises(InvalidArgument, match=r"observe: observers\[1\] must be an Observer"):
            pool.observe(Recorder(), wrong)
    for observers in ([recorder], [other := Recorder(), other]):
        with pytest.raises(InvalidArgument, match="must not observe the pool already"):
            pool.observe(*observers)
    pool.put_from((1, 2), b"x")
    assert recorder.take() == [("stored", [[1, 2]], 1)] and other.take() == []


def test_a_pool_without_observers_is_a_pool(path):
    with ObservedPool.create(UNIT, path) as pool:
        assert pool.put_from((0, 0), b"a") is PutResult.STORED
        assert pool.get_into((0, 0), np.zeros(1, np.uint8)) == 1 and pool.remove((0, 0))
