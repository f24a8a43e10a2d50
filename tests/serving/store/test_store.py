"""The store of one host: values put and read by prefix hashes and names, and evicted."""

import os

import numpy as np
import pytest
import torch

import mooncake_kernels as mk
from mooncake_kernels.errors import ChecksumError, InvalidArgument
from mooncake_kernels.pool import PutResult
from mooncake_serving.store import LengthAware, Store, largest_first, length_aware, lfu, lru, sieve

UNIT = 4096
STORED, EXISTS, FULL = PutResult.STORED, PutResult.EXISTS, PutResult.FULL


@pytest.fixture
def store():
    with Store.create(32 * UNIT, evict_ratio=0.0) as made:
        yield made


def value(seed: int, num_bytes: int = UNIT) -> bytes:
    return np.random.default_rng(seed).bytes(num_bytes)


def test_values_and_parts(store):
    assert store.put("a", value(1)) is STORED and store.put("a", value(2)) is EXISTS
    assert store.get("a") == value(1) and store.get("b") is None and store.get(b"a") == value(1)
    layers = torch.arange(600.0).reshape(3, 200)
    assert store.put_from(17, *layers, value(3, 5)) is STORED
    assert store.get(17) == layers.numpy().tobytes() + value(3, 5)
    third = torch.zeros(200)
    assert store.get_into(17, third, offset=1600) == 2405  # one layer of three
    assert torch.equal(third, layers[2])
    with store.view(17) as seen:
        assert bytes(seen.view[:2400]) == layers.numpy().tobytes()
    with store.begin("in place", 800) as writing:
        writing.tensor(torch.float32).copy_(layers[1])
    assert store.get("in place") == layers[1].numpy().tobytes()
    assert store.exists("a") and store.remove("a") and not store.exists("a")
    assert store.remove_all() == 2 and store.stats().num_ready == 0


def test_a_prefix_of_blocks(store):
    tokens = np.arange(40, dtype=np.uint32)
    keys = mk.block_hashes(tokens, 4)
    blocks = [value(i, 1000) for i in range(10)]
    assert store.put_each(keys[:7], blocks[:7]) == [STORED] * 7
    assert store.match_prefix(keys) == 7 and store.match_prefix(list(map(int, keys))) == 7
    assert store.exists_each(keys).tolist() == [True] * 7 + [False] * 3
    assert store.get_each(keys) == blocks[:7] + [None] * 3
    buffers = [np.zeros(1000, np.uint8) for _ in keys]
    assert store.get_into_each(keys, buffers).tolist() == [1000] * 7 + [-1] * 3
    assert [bytes(buffer) for buffer in buffers[:7]] == blocks[:7]


@pytest.mark.parametrize("read", ["get_each", "get_into_each"])
def test_the_tail_of_a_prefix_is_evicted_first(store, read):
    keys = list(range(8))
    store.put_each(keys, [value(i) for i in keys])
    if read == "get_each":
        store.get_each(keys)
    else:
        store.get_into_each(keys, [np.zeros(UNIT, np.uint8) for _ in keys])
    lru(store.pool, 3 * UNIT)
    assert store.match_prefix(keys) == 5 == store.exists_each(keys).sum()


def test_positions_follow_one_another(store):
    store.put_each(range(4), [b"1"] * 4, position=3)
    store.put(9, b"1", position=20)
    objects = store.pool.objects()
    positions = dict(zip(objects.keys[:, 0].tolist(), objects.position.tolist(), strict=True))
    assert positions == {0: 3, 1: 4, 2: 5, 3: 6, 9: 20}
    Store(store.pool, eviction=LengthAware(depth=4)).evict(UNIT)
    assert not store.exists(9) and store.match_prefix(range(4)) == 4


def test_room_ahead_of_need(store):
    store.put_each(range(10), [value(i) for i in range(10)])
    assert store.evict(3 * UNIT).num_bytes == 3 * UNIT
    assert store.exists_each(range(10)).tolist() == [True] * 7 + [False] * 3


def test_namespaces_do_not_see_each_other(store):
    other = Store(store.pool, namespace="another")
    for key in (5, "five"):
        assert store.put(key, b"ours") is STORED
        assert other.get(key) is None and other.put(key, b"theirs") is STORED
        assert (store.get(key), other.get(key)) == (b"ours", b"theirs")
    assert Store(store.pool, namespace="another").get(5) == b"theirs"


@pytest.mark.parametrize("eviction", [lru, sieve, lfu, length_aware, largest_first])
def test_room_is_made(eviction):
    with Store.create(32 * UNIT, eviction=eviction) as store:
        for i in range(100):
            assert store.put(i, value(i, 1 + 977 * (i % 20))) is STORED
            assert store.get(i) == value(i, 1 + 977 * (i % 20))
        assert store.put("all of it", value(0, 32 * UNIT)) is STORED
        assert store.stats().num_ready == 1
        assert isinstance(store.begin("again", 31 * UNIT), mk.ObjectPut)


def test_no_more_is_evicted_than_needed(store):
    for i in range(32):
        store.put(i, value(i))
    store.put("one", value(99))
    assert store.exists_each(range(32)).tolist() == [False] + [True] * 31
    with Store(store.pool, evict_ratio=0.25) as quarter:
        quarter.put("another", value(98))
        assert quarter.stats().free_bytes == 7 * UNIT


def test_what_cannot_be_evicted(store):
    for i in range(31):
        store.put(i, value(i), retention="hard")
    pinned = store.view(30)
    assert store.retain(30, "normal")
    assert store.put("x", value(1, 2 * UNIT)) is FULL
    pinned.close()
    assert store.put("x", value(1, 2 * UNIT)) is STORED and not store.exists(30)
    with pytest.raises(InvalidArgument, match="num_bytes must be at most the pool's 131072, got"):
        store.put("y", bytes(33 * UNIT))


def test_a_fragmented_pool(store):
    """Room in one piece: evicting as much as is needed leaves holes, until it is twice as much."""
    for i in range(32):
        store.put(i, value(i), retention="soft" if i % 2 else "normal")
    assert store.put("x", value(1, 8 * UNIT)) is STORED
    assert store.get("x") == value(1, 8 * UNIT)


def test_what_is_damaged_is_removed(store):
    careless = Store(store.pool, verify=0.0)
    reads = [
        lambda: store.get("a"),
        lambda: store.view("a"),
        lambda: store.get_into("a", bytearray(UNIT)),
    ]
    for read in reads:
        store.put("a", value(1))
        with store.view("a") as seen:
            at = np.frombuffer(seen.view, np.uint8).ctypes.data - store.pool.memory().data_ptr()
        store.pool.memory()[at + 7] ^= 1
        assert careless.get("a") != value(1)
        with pytest.raises(ChecksumError):
            read()
        assert not store.exists("a") and store.stats().num_doomed == 0
    store.put("a", value(1))
    store.pool.memory()[:] ^= 1
    assert store.get_into_each(["a"], [bytearray(UNIT)]).tolist() == [-4] and not store.exists("a")


def test_another_process(store):
    store.put("theirs", b"12345")
    pid = os.fork()
    if pid == 0:
        with Store.open(store.pool.path) as own:
            result = own.put("ours", own.get("theirs") * 2)
        os._exit(0 if result is STORED else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert store.get("ours") == b"1234512345"


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda s: Store(s.pool, verify=2), "Store: verify must be from 0 to 1, got 2"),
        (lambda s: Store(s.pool, namespace=3), "Store: namespace must be a str"),
        (lambda s: s.get(1.5), "Store: key must be a name or an integer from 0 to"),
        (lambda s: s.get(-1), r"key must be a name or an integer from 0 to .*, got -1"),
        (lambda s: s.get(None), "key must be a name or an integer from 0 to"),
        (
            lambda s: s.get(10**5000),
            "key must be a name or an integer from 0 to .*, got a huge int",
        ),
        (lambda s: s.match_prefix([1.5]), r"Store: keys must be \[n\] names or integers"),
        (lambda s: s.put("a", "text"), r"put_from: buffers\[0\] must be"),
        (lambda s: s.put_each([1], []), "put_each: values must be as many as keys, got 0 and 1"),
        (lambda s: s.get_into_each([1], []), "get_into_each: buffers must be as many as keys"),
    ],
)
def test_refusals(store, call, message):
    with pytest.raises(InvalidArgument, match=message):
        call(store)
