"""``Store``: its arguments."""

import contextlib
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from mooncake_kernels.errors import ChecksumError, InvalidArgument
from mooncake_kernels.pool import ObjectPool, PinnedObject, PutResult
from mooncake_serving.store import Store, sieve

UNIT = 4096


@pytest.fixture
def pool_path(tmp_path_factory):
    path = Path("/dev/shm") / f"mk-test-{os.getpid()}-{tmp_path_factory.mktemp('store').name}"
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def store():
    with Store.create(64 * UNIT) as made:
        yield made


@pytest.mark.parametrize("make", [torch.zeros, np.zeros])
def test_buffers_may_be_rows_of_one_array(store, make):
    values = np.random.default_rng(0).random((3, 100))
    store.put_each([1, 2, 3], values)
    rows = make((3, 100), dtype=torch.float64 if make is torch.zeros else np.float64)
    assert store.get_into_each([1, 2, 3], rows).tolist() == [800] * 3
    assert np.array_equal(rows, values)


@pytest.mark.parametrize("keys", ["abc", b"abc", None, 5])
@pytest.mark.parametrize(
    "call",
    [
        lambda store, keys: store.exists_each(keys),
        lambda store, keys: store.match_prefix(keys),
        lambda store, keys: store.get_each(keys),
        lambda store, keys: store.put_each(keys, [b"1"] * 3),
        lambda store, keys: store.get_into_each(keys, [bytearray(1)] * 3),
    ],
)
def test_one_key_is_no_list_of_keys(store, call, keys):
    with pytest.raises(InvalidArgument, match="keys must be a list or an array of keys, got"):
        call(store, keys)
    assert store.stats().num_ready == 0


def test_values_are_a_list(store):
    with pytest.raises(InvalidArgument, match="put_each: values must be as many as keys, got None"):
        store.put_each([1], None)


@pytest.mark.parametrize("wrong", [1.5, 1.0, None, -1, 1 << 64, [1]])
def test_keys_are_names_or_hashes(store, wrong):
    """Also among names: a float is not the hash below it."""
    store.put(1, b"1")
    assert store.exists_each(["name", 1, np.int64(1)]).tolist() == [False, True, True]
    for keys in ([wrong, 1], [wrong], ["name", wrong]):
        with pytest.raises(InvalidArgument, match=r"Store: keys must be \[n\] names or integers"):
            store.exists_each(keys)


@pytest.mark.parametrize("position", [None, "1", 1.5, [1]])
def test_a_position_is_a_number(store, position):
    with pytest.raises(InvalidArgument, match="put_each: position must be an integer, got"):
        store.put_each([1, 2], [b"1", b"2"], position=position)


@pytest.mark.parametrize("pool", [None, "/dev/shm/kv", 1 << 20])
def test_a_store_is_of_a_pool(pool):
    with pytest.raises(InvalidArgument, match="Store: pool must be an ObjectPool, got"):
        Store(pool)


WRONG_OPTIONS = [
    ({"checksum": 1}, "checksum must be True or False, got 1"),
    ({"evict_ratio": 10**400}, "evict_ratio must be from 0 to 1, got 1000"),
    ({"eviction": "lru"}, "eviction must be a function, as lru is, got 'lru'"),
    ({"eviction": None}, "eviction must be a function"),
    ({"quota": 5}, "quota must be a Quota or None, got 5"),
    ({"watermark": 0.9}, r"watermark must be \(high, low\), got 0.9"),
    ({"watermark": (0.9, 0.8, 0.7)}, "watermark must be"),
    ({"watermark": ("0.9", "0.8")}, "low and high must be"),
    ({"evict_ratio": "0.5"}, "evict_ratio must be from 0 to 1, got '0.5'"),
    ({"verify": None}, "verify must be from 0 to 1, got None"),
]


@pytest.mark.parametrize(("options", "message"), WRONG_OPTIONS)
def test_a_wrong_option_leaves_nothing_behind(pool_path, options, message):
    with pytest.raises(InvalidArgument, match=message):
        Store.create(64 * UNIT, pool_path, **options)
    assert not pool_path.exists()
    with ObjectPool.create(64 * UNIT, pool_path) as pool:
        with pytest.raises(InvalidArgument, match=message):
            Store.open(pool_path, **options)
        assert pool.stats().num_processes == 1
        with pytest.raises(FileExistsError):
            Store.create(64 * UNIT, pool_path)
        assert pool_path.exists()


def test_the_policy_may_be_replaced_by_another_function_only(store):
    store.eviction = sieve
    with pytest.raises(InvalidArgument, match="eviction must be a function"):
        store.eviction = "lru"
    assert store.eviction is sieve


@pytest.mark.parametrize("path", ["", "/dev/shm/a\0b", b"/dev/shm/a", 5])
def test_paths_are_names_of_files(path):
    for call in (lambda: Store.create(64 * UNIT, path), lambda: Store.open(path)):
        with pytest.raises(InvalidArgument, match="path must be the name of a file, got"):
            call()


def test_of_a_prompt_the_tail_goes_first():
    """What was stored together is evicted from the last to the first, also after it was read."""
    with Store.create(16 * 4096) as store:
        store.put_each(range(8), [b"1"] * 8)
        store.put_each(range(8, 12), [b"1"] * 4, position=8)
        assert store.evict(2 * 4096).keys[:, 0].tolist() == [7, 6]
        store.get_into_each(range(4), [bytearray(1)] * 4)
        gone = store.evict(8 * 4096).keys[:, 0].tolist()
        assert gone == [5, 4, 11, 10, 9, 8, 3, 2]
        assert store.match_prefix(range(8)) == 2


def test_a_prompt_in_several_calls_goes_from_its_tail():
    with Store.create(16 * 4096) as store:
        store.put_each(range(4), [b"1"] * 4)
        store.get_into_each(range(4), [bytearray(1)] * 4)
        store.put_each(range(4, 8), [b"1"] * 4, position=4)
        store.put("other", b"1")
        store.order_prompt([*range(8), 99])  # what is not there is passed over
        store.order_prompt([])
        assert store.pool.objects().uses.max() == 2  # none counts as used once more
        assert store.evict(6 * 4096).keys[:, 0].tolist() == [7, 6, 5, 4, 3, 2]
        assert store.match_prefix(range(8)) == 2 and store.exists("other")
        with pytest.raises(InvalidArgument, match="keys must be"):
            store.order_prompt(5)


@pytest.mark.parametrize(
    "read, at",
    [
        (lambda store: store.view(1), (PinnedObject, "verify")),
        (lambda store: store.get_into(1, bytearray(9)), (ObjectPool, "get_into")),
        (lambda store: store.get_into_each([1], [bytearray(9)]), (ObjectPool, "get_into_each")),
    ],
)
def test_what_is_put_anew_after_a_damaged_object_stays(store, monkeypatch, read, at):
    """One reader finds it damaged, and another removes it and puts it again before the first has
    removed it.
    """
    store.put(1, b"damaged")
    with store.view(1) as pinned:
        pinned.tensor().numpy()[0] ^= 1
    original = getattr(*at)

    def read_late(*arguments, **options):
        monkeypatch.undo()
        try:
            return original(*arguments, **options)
        finally:
            assert store.remove(1) and store.put(1, b"whole") is PutResult.STORED

    monkeypatch.setattr(*at, read_late)
    with contextlib.suppress(ChecksumError):
        assert read(store).tolist() == [-4]
    assert store.get(1) == b"whole"


def test_a_damaged_object_is_removed(store):
    store.put(1, b"damaged")
    with store.view(1) as pinned:
        pinned.tensor().numpy()[0] ^= 1
        with pytest.raises(ChecksumError):
            store.get_into(1, bytearray(9))
    assert not store.exists(1) and store.stats().num_pins == 0
