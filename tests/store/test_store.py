"""``Store``: values put and read by prefix hashes and names, and evicted; its arguments."""

import contextlib
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import mooncake_kernels as mk
from mooncake_kernels.errors import ChecksumError, InvalidArgument
from mooncake_kernels.pool import ObjectPool, PinnedObject, PutResult
from mooncake_serving.store import (
    LengthAware,
    Quota,
    SsdTier,
    Store,
    TieredStore,
    largest_first,
    length_aware,
    lfu,
    lru,
    sieve,
)
from mooncake_serving.store import store as store_module

from .support import EXISTS, FULL, STORED, child, ended_well

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


@pytest.fixture
def small():
    with Store.create(32 * UNIT, evict_ratio=0.0) as made:
        yield made


def value(seed: int, num_bytes: int = UNIT) -> bytes:
    return np.random.default_rng(seed).bytes(num_bytes)


def test_values_and_parts(small):
    assert small.put("a", value(1)) is STORED and small.put("a", value(2)) is EXISTS
    assert small.get("a") == value(1) and small.get("b") is None and small.get(b"a") == value(1)
    layers = torch.arange(600.0).reshape(3, 200)
    assert small.put_from(17, *layers, value(3, 5)) is STORED
    assert small.get(17) == layers.numpy().tobytes() + value(3, 5)
    third = torch.zeros(200)
    assert small.get_into(17, third, offset=1600) == 2405  # one layer of three
    assert torch.equal(third, layers[2])
    with small.view(17) as seen:
        assert bytes(seen.view[:2400]) == layers.numpy().tobytes()
    with small.begin("in place", 800) as writing:
        writing.tensor(torch.float32).copy_(layers[1])
    assert small.get("in place") == layers[1].numpy().tobytes()
    assert small.exists("a") and small.remove("a") and not small.exists("a")
    assert small.remove_all() == 2 and small.stats().num_ready == 0


def test_a_prefix_of_blocks(small):
    tokens = np.arange(40, dtype=np.uint32)
    keys = mk.block_hashes(tokens, 4)
    blocks = [value(i, 1000) for i in range(10)]
    assert small.put_each(keys[:7], blocks[:7]) == [STORED] * 7
    assert small.match_prefix(keys) == 7 and small.match_prefix(list(map(int, keys))) == 7
    assert small.exists_each(keys).tolist() == [True] * 7 + [False] * 3
    assert small.exists_each(["name", int(keys[0]), np.uint64(keys[1])]).tolist() == [
        False,
        True,
        True,
    ]
    assert small.get_each(keys) == blocks[:7] + [None] * 3
    buffers = [np.zeros(1000, np.uint8) for _ in keys]
    assert small.get_into_each(keys, buffers).tolist() == [1000] * 7 + [-1] * 3
    assert [bytes(buffer) for buffer in buffers[:7]] == blocks[:7]


def test_positions_of_a_batch_are_consecutive(small):
    small.put_each(range(4), [b"1"] * 4, position=3)
    small.put(9, b"1", position=20)
    objects = small.pool.objects()
    positions = dict(zip(objects.keys[:, 0].tolist(), objects.position.tolist(), strict=True))
    assert positions == {0: 3, 1: 4, 2: 5, 3: 6, 9: 20}
    Store(small.pool, eviction=LengthAware(depth=4)).evict(UNIT)
    assert not small.exists(9) and small.match_prefix(range(4)) == 4


def test_batch_put_takes_one_pool_call(small, monkeypatch):
    def one_by_one(*_, **__):
        pytest.fail("not in one call")

    small.put(2, b"old")
    keys = [0, 1, 2, 3, 0]
    values = [b"", bytearray(value(1)), value(2), torch.arange(5), b"again"]
    with monkeypatch.context() as patched:
        patched.setattr(ObjectPool, "put_from", one_by_one)
        assert small.put_each(keys, values) == [STORED, STORED, EXISTS, STORED, EXISTS]
        assert small.put_each([], []) == []
    assert small.get_each(range(4)) == [b"", value(1), b"old", torch.arange(5).numpy().tobytes()]


def test_batch_put_that_evicts_equals_single_puts(small):
    small.put_each(range(100, 130), [value(i) for i in range(30)])
    small.put("hard", value(30, 24 * UNIT), retention="hard")
    sizes = [UNIT, 4 * UNIT, 9 * UNIT, 5, 9 * UNIT]
    values = [value(i, size) for i, size in enumerate(sizes)]
    assert small.put_each(range(5), values, position=7) == [STORED, STORED, FULL, STORED, FULL]
    assert small.get_each([0, 1, 3]) == [values[i] for i in (0, 1, 3)]
    objects = small.pool.objects()
    positions = dict(zip(objects.keys[:, 0].tolist(), objects.position.tolist(), strict=True))
    assert [positions[i] for i in (0, 1, 3)] == [7, 8, 10]


def test_evict_frees_room_in_advance(small):
    small.put_each(range(10), [value(i) for i in range(10)])
    assert small.evict(3 * UNIT).num_bytes == 3 * UNIT
    assert small.exists_each(range(10)).tolist() == [True] * 7 + [False] * 3


def headed(*values: np.ndarray) -> tuple[list[bytes], np.ndarray, np.ndarray]:
    """Heads, addresses and sizes, as ``put_headed`` takes them."""
    addresses = np.array([[value.ctypes.data] for value in values], np.uint64)
    return [b"head"] * len(values), addresses, np.array([[v.nbytes] for v in values], np.uint64)


def test_put_headed_evicts_like_single_puts():
    told: list = []
    for at_once in (True, False):
        with Store.create(32 * UNIT, evict_ratio=0.0) as store:
            store.on_evicted.append(told.append)
            values = [np.full((i % 5 + 1) * UNIT - 4, i, np.uint8) for i in range(40)]
            keys = store.keyspace.keys(range(100, 140))
            store.put_each(range(30), [value(i) for i in range(30)])
            if at_once:
                results = store.put_headed(keys, *headed(*values), retention="soft")
            else:
                results = [
                    store.put_key(tuple(key), b"head", one, retention="soft")
                    for key, one in zip(keys.tolist(), values, strict=True)
                ]
            told += [results, store.exists_each(range(140)).tolist()]
            told.append(sorted(store.pool.objects().retention.tolist()))
            assert store.get(139) == b"head" + values[39].tobytes()
    told = [np.array(one).tolist() for one in told]
    assert told[: len(told) // 2] == told[len(told) // 2 :] and len(told) > 20


def test_put_headed_respects_quotas_watermarks_and_tiers(pool_path, tmp_path):
    values = [np.full(UNIT, i, np.uint8) for i in range(4)]
    with Store.create(32 * UNIT, pool_path, quota=Quota(num_objects=2)) as store:
        words = store.keyspace.keys(range(4))
        assert store.put_headed(words, *headed(*values)) == [STORED] * 4
        assert store.exists_each(range(4)).tolist() == [False, False, True, True]
        assert store.usage().num_objects == 2
    with Store.open(pool_path, namespace="other", watermark=(0.9, 0.5)) as store:
        words = store.keyspace.keys(range(4))
        before = [room.added for room in (store._watermark._bytes, store._watermark._objects)]
        assert store.put_headed(words, *headed(*values)) == [STORED] * 4
        after = [room.added for room in (store._watermark._bytes, store._watermark._objects)]
        assert np.subtract(after, before).tolist() == [4 * (UNIT + 4), 4]
    tier = SsdTier(tmp_path / "tier", 2 << 20, bucket_bytes=1 << 20)
    with TieredStore.create(32 * UNIT, tier=tier, min_uses=1) as store:
        words = store.keyspace.keys(range(4))
        store.put(1, b"on disk")
        store.evict(1)
        assert store.flush()
        assert store.put_headed(words, *headed(*values)) == [STORED, EXISTS, STORED, STORED]
        assert store.remove_each(range(5)).tolist() == [True] * 4 + [False]
        store.put(7, b"on disk")
        store.evict(32 * UNIT)
        assert store.flush() and store.exists(7)
        with Store.open(store.pool.path) as without_disk:
            assert without_disk.remove_each([7, 8]).tolist() == [False, False]
            assert store.get(7) is None


def test_namespaces_are_isolated(small):
    other = Store(small.pool, namespace="another")
    for key in (5, "five"):
        assert small.put(key, b"ours") is STORED
        assert other.get(key) is None and other.put(key, b"theirs") is STORED
        assert (small.get(key), other.get(key)) == (b"ours", b"theirs")
    assert Store(small.pool, namespace="another").get(5) == b"theirs"


@pytest.mark.parametrize("eviction", [lru, sieve, lfu, length_aware, largest_first])
def test_put_into_a_full_store_evicts(eviction):
    with Store.create(32 * UNIT, eviction=eviction) as store:
        for i in range(100):
            assert store.put(i, value(i, 1 + 977 * (i % 20))) is STORED
            assert store.get(i) == value(i, 1 + 977 * (i % 20))
        assert store.put("all of it", value(0, 32 * UNIT)) is STORED
        assert store.stats().num_ready == 1
        assert isinstance(store.begin("again", 31 * UNIT), mk.ObjectPut)


def test_no_more_is_evicted_than_needed(small):
    for i in range(32):
        small.put(i, value(i))
    small.put("one", value(99))
    assert small.exists_each(range(32)).tolist() == [False] + [True] * 31
    with Store(small.pool, evict_ratio=0.25) as quarter:
        quarter.put("another", value(98))
        assert quarter.stats().free_bytes == 7 * UNIT


@pytest.mark.parametrize(
    ("eviction", "at_once"), [(lru, 2), (sieve, 2), (lfu, 10), (LengthAware(), 10)]
)
def test_policies_that_scan_all_objects_evict_in_bulk(eviction, at_once):
    with Store(ObjectPool.create(1000 * 64, alignment=64), eviction=eviction) as store:
        store.put_each(range(1000), [b"1"] * 1000)
        assert store.stats().num_ready == 1000
        store.put(1000, b"1")
        assert store.stats().num_ready == 1001 - at_once


@pytest.mark.parametrize("eviction", [lru, sieve, lfu, length_aware, largest_first])
def test_full_index_evicts_a_share_of_objects_not_of_bytes(eviction):
    pool = ObjectPool.create(1024 * UNIT, num_objects=100)
    with Store(pool, eviction=eviction, evict_ratio=0.1) as store:
        for i in range(100):
            assert store.put(i, value(i, UNIT * (1 + i % 3))) is STORED
        pinned = store.pool.pin(store.keyspace.key(0), touch=False)
        assert store.put(100, value(100)) is STORED
        assert store.stats().num_ready == 91 and store.exists(0)
        pinned.close()
        for i in range(101, 400):
            assert store.put(i, value(i)) is STORED
            assert 90 < store.stats().num_ready <= 100


def test_put_returns_full_when_nothing_can_be_evicted(small):
    for i in range(31):
        small.put(i, value(i), retention="hard")
    pinned = small.view(30)
    assert small.retain(30, "normal")
    assert small.put("x", value(1, 2 * UNIT)) is FULL
    pinned.close()
    assert small.put("x", value(1, 2 * UNIT)) is STORED and not small.exists(30)
    with pytest.raises(InvalidArgument, match="value must be at most the pool's 131072 bytes"):
        small.put("y", bytes(33 * UNIT))


def test_put_blocked_by_hard_objects_evicts_nothing(small):
    for i in range(32):
        small.put(i, value(i), retention="hard" if i < 20 else "normal")
    assert small.put("x", value(1, 13 * UNIT)) is FULL
    assert small.begin("x", 12 * UNIT + 1) is FULL
    assert small.exists_each(range(32)).all()
    assert small.put("x", value(1, 12 * UNIT)) is STORED


def test_put_into_a_fragmented_pool(small):
    """Room in one piece: evicting as much as is needed leaves holes, until it is twice as much."""
    for i in range(32):
        small.put(i, value(i), retention="soft" if i % 2 else "normal")
    assert small.put("x", value(1, 8 * UNIT)) is STORED
    assert small.get("x") == value(1, 8 * UNIT)


def test_damaged_object_is_removed(small):
    careless = Store(small.pool, verify=0.0)
    reads = [
        lambda: small.get("a"),
        lambda: small.view("a"),
        lambda: small.get_into("a", bytearray(UNIT)),
    ]
    for read in reads:
        small.put("a", value(1))
        with small.view("a") as seen:
            at = np.frombuffer(seen.view, np.uint8).ctypes.data - small.pool.memory().data_ptr()
        small.pool.memory()[at + 7] ^= 1
        assert careless.get("a") != value(1)
        with pytest.raises(ChecksumError):
            read()
        assert not small.exists("a") and small.stats().num_doomed == 0
    small.put("a", value(1))
    small.pool.memory()[:] ^= 1
    assert small.get_into_each(["a"], [bytearray(UNIT)]).tolist() == [-4] and not small.exists("a")
    small.put("a", value(1))
    with small.view("a") as seen:  # others may still read it
        seen.tensor().numpy()[0] ^= 1
        with pytest.raises(ChecksumError):
            small.get_into("a", bytearray(UNIT))
    assert not small.exists("a") and small.stats().num_pins == 0


@pytest.mark.parametrize("damaged_at", [0, 70, 1999])
@pytest.mark.parametrize("offset", [None, 0, 64, 100])
def test_no_bytes_of_a_damaged_object_are_returned(small, damaged_at, offset):
    """Wherever it is damaged, in what is read or not; memory beyond stays as it is."""
    small.put("a", value(1, 2000))
    with small.view("a") as seen:
        seen.tensor().numpy()[damaged_at] ^= 1
        target = np.full(3000, 7, np.uint8)
        sizes = [65, 0, 1000, 200] if offset is not None else [65, 0, 1000, 1500]
        with pytest.raises(ChecksumError):
            small.get_into(
                "a", *np.split(target[: sum(sizes)], np.cumsum(sizes)[:-1]), offset=offset
            )
    read = min(sum(sizes), 2000)
    assert not target[:read].any() and (target[read:] == 7).all()


def test_store_shared_with_another_process(small):
    small.put("theirs", b"12345")

    def life():
        with Store.open(small.pool.path) as own:
            assert own.put("ours", own.get("theirs") * 2) is STORED

    with child(life) as pid:
        assert ended_well(pid)
    assert small.get("ours") == b"1234512345"


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda s: Store(s.pool, verify=2), "Store: verify must be from 0 to 1, got 2"),
        (lambda s: Store(s.pool, namespace=3), "Store: namespace must be a str"),
        (
            lambda s: s.get(10**5000),
            "key must be a name or an integer from 0 to .*, got a huge int",
        ),
        (lambda s: s.put("a", bytes(33 * UNIT)), "^put: value must be at most the pool's 131072"),
        (lambda s: s.put_from("a", b"", {}), r"^put_from: parts\[1\] must be a torch tensor"),
        (
            lambda s: s.put_from("a", bytes(17 * UNIT), bytes(16 * UNIT)),
            "^put_from: parts must be at most the pool's 131072 bytes, got 135168",
        ),
        (lambda s: s.put_each([1], []), "put_each: values must be as many as keys, got 0 and 1"),
        (lambda s: s.get_into_each([1], []), "get_into_each: buffers must be as many as keys"),
    ],
)
def test_invalid_arguments_are_rejected(small, call, message):
    with pytest.raises(InvalidArgument, match=message):
        call(small)


@pytest.mark.parametrize(
    "keys", [["name", 1.5], ["name", None], ["name", np.True_], [1.0, 1], [[1], 1]]
)
def test_floats_among_names_and_hashes_are_rejected(store, keys):
    """A float is not the hash below it."""
    with pytest.raises(
        InvalidArgument, match=r"^exists_each: keys must be \[n\] names or integers"
    ):
        store.exists_each(keys)


@pytest.mark.parametrize("make", [torch.zeros, np.zeros])
def test_rows_of_one_array_can_be_buffers(store, make):
    values = np.random.default_rng(0).random((3, 100))
    store.put_each([1, 2, 3], values)
    rows = make((3, 100), dtype=torch.float64 if make is torch.zeros else np.float64)
    assert store.get_into_each([1, 2, 3], rows).tolist() == [800] * 3
    assert np.array_equal(rows, values)


@pytest.mark.parametrize(
    "keys, values, message",
    [
        ([1, 2], [b"a", "text"], r"^put_each: values\[1\] must be a torch tensor"),
        ([1, 2, 3], [b"a", b"b", np.zeros(4)[::2]], r"^put_each: values\[2\] must be packed"),
        (
            [1, 2, 3],
            [b"a", bytes(65 * UNIT), b"c"],
            r"^put_each: values\[1\] must be at most the pool's 262144 bytes, got 266240",
        ),
        ([1, -1], [b"a", b"b"], "^put_each: keys must be"),
    ],
)
def test_all_values_are_checked_before_any_is_stored(store, keys, values, message):
    with pytest.raises(InvalidArgument, match=message):
        store.put_each(keys, values)
    assert store.stats().num_ready == 0


@pytest.mark.parametrize(
    "wrong, what",
    [
        (np.zeros(4, np.uint8)[::2], "packed"),
        (b"read-only", "writable"),
        (torch.zeros(4)[::2], "packed"),
        ("text", "a torch tensor"),
    ],
)
def test_error_names_index_of_invalid_buffer(store, wrong, what):
    store.put(1, b"a")
    first = bytearray(1)
    with pytest.raises(InvalidArgument, match=rf"^get_into_each: buffers\[1\] must be {what}"):
        store.get_into_each([1, 2], [first, wrong])
    assert first == b"\0"


def test_closed_store_is_rejected(small):
    other = Store.open(small.pool.path)
    assert not other.closed
    other.close()
    assert other.closed
    with pytest.raises(InvalidArgument, match="^Store: what is entered must be open, got a closed"):
        other.__enter__()
    with pytest.raises(InvalidArgument, match="^Store: pool must be open, got the closed '/proc"):
        Store(other.pool)


@pytest.mark.parametrize("pool", [None, "/dev/shm/kv", 1 << 20])
def test_store_requires_a_pool(pool):
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
def test_invalid_option_leaves_nothing_behind(pool_path, options, message):
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


def test_policy_can_only_be_replaced_by_a_function(store):
    store.eviction = sieve
    with pytest.raises(InvalidArgument, match="eviction must be a function"):
        store.eviction = "lru"
    assert store.eviction is sieve


@pytest.mark.parametrize("path", ["", "/dev/shm/a\0b", b"/dev/shm/a", 5])
def test_paths_are_names_of_files(path):
    for call in (lambda: Store.create(64 * UNIT, path), lambda: Store.open(path)):
        with pytest.raises(InvalidArgument, match="path must be the name of a file, got"):
            call()


@pytest.mark.parametrize(
    "read",
    [
        lambda store, keys: store.get_each(keys),
        lambda store, keys: store.get_into_each(keys, [bytearray(1) for _ in keys]),
    ],
)
def test_tail_of_a_prompt_is_evicted_first(read):
    """What was stored together is evicted from the last to the first, also after it was read."""
    with Store.create(16 * 4096) as store:
        store.put_each(range(8), [b"1"] * 8)
        store.put_each(range(8, 12), [b"1"] * 4, position=8)
        assert store.evict(2 * 4096).keys[:, 0].tolist() == [7, 6]
        read(store, range(4))
        gone = store.evict(8 * 4096).keys[:, 0].tolist()
        assert gone == [5, 4, 11, 10, 9, 8, 3, 2]
        assert store.match_prefix(range(8)) == 2


def test_prompt_put_in_several_calls_is_evicted_from_its_tail():
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
        (lambda store: store.get_into(1, bytearray(9)), (store_module, "with_buffers")),
        (lambda store: store.get_into_each([1], [bytearray(9)]), (ObjectPool, "get_into_each")),
    ],
)
def test_object_put_again_after_damage_stays(store, monkeypatch, read, at):
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
