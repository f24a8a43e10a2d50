"""Batches of ``MooncakeDistributedStore`` in one call of the pool: the same as one by one."""

import contextlib
import fractions
import mmap
import re

import numpy as np
import pytest
import torch

from mooncake_kernels.pool import ObjectPool
from mooncake_serving.compat.mooncake.store import (
    INVALID_PARAMS,
    OBJECT_NOT_FOUND,
    ReplicateConfig,
)
from mooncake_serving.compat.mooncake.store.backend import LocalBackend
from mooncake_serving.compat.mooncake.store.naming import header_of
from mooncake_serving.store import Store

from .store_support import Memory, pool_file, set_up

KIB = 1024
CAPACITY = 256 * KIB
FAR = 512 * KIB  # where values are copied to
NAMESPACE = "mooncake/default"
LONG = "long" * 100


@pytest.fixture
def calls(monkeypatch):
    """The calls of a store or its pool that move or remove objects, as they are made."""
    made = []

    def noted(kind, name):
        original = getattr(kind, name)

        def call(*args, **kwargs):
            made.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(kind, name, call)

    for name in ("get_headed", "put_headed", "put_from", "remove", "remove_each"):
        noted(ObjectPool, name)
    noted(Store, "get_into")
    noted(Store, "remove_keys")  # one call of the pool, whose check of the keys is not made again
    return made


def test_batch_takes_one_pool_call(store, memory, calls):
    keys, p = [*"abc", LONG], memory.address
    places, sizes = [p, p + 100, p + 200, p + 300], [100, 90, 80, 70]
    assert store.batch_put_from(keys, places, sizes) == [0] * 4
    assert store.batch_put_from(tuple(keys), np.array(places), np.array(sizes)) == [0] * 4
    targets = [p + FAR + i * KIB for i in range(4)]
    assert store.batch_get_into(keys, targets, [KIB] * 4) == sizes
    assert store.batch_get_into(["a", "no"], targets[:2], [100] * 2) == [100, OBJECT_NOT_FOUND]
    many, parts = [[p, p + 500], [p + 50, p + 900]], [[10, 20], [30, 40]]
    assert store.batch_put_from_multi_buffers(["m", "n"], many, parts) == [0, 0]
    into = [[p + FAR + 8000, p + FAR + 8100], [p + FAR + 8200, p + FAR + 8300]]
    assert store.batch_get_into_multi_buffers(["m", "n"], into, parts) == [30, 70]
    assert store.batch_remove(["a", "no", LONG]) == [0, OBJECT_NOT_FOUND, 0]
    assert calls == [
        "put_headed", "put_headed", "get_headed", "get_headed", "put_headed", "get_headed",
        "remove_keys",
    ]  # fmt: skip
    for i, size in enumerate(sizes):
        assert memory.at(FAR + i * KIB, size) == memory.at(i * 100, size)
    assert memory.at(FAR + 8000, 10) + memory.at(FAR + 8100, 20) == store.get("m")
    assert store.get("n") == memory.at(50, 30) + memory.at(900, 40)


def test_batch_of_values_takes_one_pool_call(store, memory, calls):
    keys, values = [*"abc"], [b"1" * 100, np.arange(9), torch.arange(7)]
    assert store.put_batch(keys, values) == 0
    assert store.put_batch(keys, [b"other"] * 3) == 0
    assert store.get_batch(keys) == [bytes(memoryview(value)) for value in values[:2]] + [
        values[2].numpy().tobytes()
    ]
    assert calls == ["put_headed", "put_headed"]
    assert store.upsert_batch([*"cd", LONG], [b"3", b"44", b"555"]) == 0
    assert store.get_batch([*"cd", LONG]) == [b"3", b"44", b"555"]
    p = memory.address
    assert store.batch_upsert_from([*"ac"], [p, p + 100], [10, 20]) == [0, 0]
    assert store.get_batch([*"ac"]) == [memory.at(0, 10), memory.at(100, 20)]
    assert calls[2:] == ["remove_keys", "put_headed"] * 2


def test_upsert_replaces_a_concurrent_put(store, monkeypatch):
    remove_each = ObjectPool.remove_each

    def remove_slowly(pool, keys):
        removed = remove_each(pool, keys)
        monkeypatch.setattr(ObjectPool, "remove_each", remove_each)
        assert store.put("b", b"theirs") == 0
        return removed

    monkeypatch.setattr(ObjectPool, "remove_each", remove_slowly)
    assert store.upsert_batch([*"abc"], [b"1", b"2", b"3"]) == 0
    assert store.get_batch([*"abc"]) == [b"1", b"2", b"3"]


def test_buffers_cannot_be_resized_during_put(store, memory, monkeypatch):
    values = [bytearray(b"a" * 100), bytearray(b"b" * 100)]
    refused = []
    put_headed = Store.put_headed

    def resize(*args, **kwargs):  # another thread might
        with pytest.raises(BufferError):
            values[0].clear()
        refused.append(True)
        return put_headed(*args, **kwargs)

    monkeypatch.setattr(Store, "put_headed", resize)
    assert store.put_batch([*"ab"], values) == 0
    assert store.upsert_batch([*"ab"], values) == 0
    assert refused == [True] * 2


def test_only_unusual_values_are_read_one_by_one(store, memory, calls, caplog):
    keys, p = [*"abc"], memory.address
    assert store.batch_put_from(keys, [p, p + 100, p + 200], [100] * 3) == [0] * 3
    calls.clear()
    targets = [p + FAR + i * KIB for i in range(4)]
    codes = store.batch_get_into(["a", "b", "no", "c"], targets, [100, 99, 100, 100])
    assert codes == [100, INVALID_PARAMS, OBJECT_NOT_FOUND, 100]
    assert calls == ["get_headed", "get_into"]
    assert [record.getMessage() for record in caplog.records] == [
        "batch_get_into: size must be at least the value's 100 bytes, got 99"
    ]


def test_batch_is_read_in_reverse_order(store, memory):
    keys = [f"k{i}" for i in range(8)]
    places = [memory.address] * 8
    assert store.batch_put_from(keys, places, [10] * 8) == [0] * 8
    assert store.batch_get_into(keys, places, [10] * 8) == [10] * 8
    pool = store._running().backend._own.pool
    objects = pool.objects()
    order = dict(zip(map(tuple, objects.keys.tolist()), objects.recency.tolist(), strict=True))
    used = [order[store._running().backend._keyspace.key(key)] for key in keys]
    assert used == sorted(used, reverse=True)


def test_hash_collision_is_not_returned(store, memory):
    backend = store._running().backend
    others = [header_of("other"), header_of("a")[:-1] + b"x", header_of("b")[:20], b"raw"]
    for name, start in zip("abcd", others, strict=True):
        assert backend._store.put_from(name, start + bytes(100 * (name != "c")))
    assert store.put("e", b"e" * 100) == 0
    before = memory.at(FAR, 5 * KIB)
    targets = [memory.address + FAR + i * KIB for i in range(5)]
    codes = store.batch_get_into([*"abcde"], targets, [KIB] * 5)
    assert codes == [OBJECT_NOT_FOUND] * 4 + [100]
    assert memory.at(FAR + 4 * KIB, 100) == b"e" * 100
    assert memory.at(FAR + 4 * KIB + 100, KIB - 100) == before[-(KIB - 100) :]


class Odd:
    """An integer by ``__index__`` only."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


def odd_batches(p: int, read_only: int, other: int):
    """Keys, addresses and sizes, some of which are wrong, or unusual."""
    keys, places, sizes = [*"abc"], [p, p + KIB, p + 2 * KIB], [100, 200, 300]
    yield keys, places, sizes
    for wrong in (0, -1, 4096, 1 << 45, 1 << 63, 1 << 64, 1 << 70, 1.5, float(p), "1", None, [p],
                  Odd(p), True, np.uint64(p), np.int64(p), np.array(p), torch.tensor(p),
                  b"12345678", fractions.Fraction(p), p + (1 << 20) - 150, p + (1 << 20), p - 1,
                  read_only, read_only + 4000, other, np.float32(1), np.bool_(True)):  # fmt: skip
        yield keys, [p, wrong, p + KIB], sizes
    for wrong in (0, -1, 1 << 20, 1 << 63, (1 << 64) - 1, 1 << 64, 2.0, "9", None, Odd(50), True,
                  np.uint8(7), torch.tensor(7), CAPACITY - 64, CAPACITY - 63):  # fmt: skip
        yield keys, [p, p, p], [100, wrong, 300]
    for name in ("", "a", "x" * 44, "x" * 45, "x" * 65536, "x" * 65537, "\ud800", b"a", 5, None,
                 "é", np.str_("n")):  # fmt: skip
        yield ["a", name, "c"], places, sizes
    for wrong in (None, 5, "abc", b"abc", [], [p], [p] * 4, range(p, p + 3), iter([p] * 3), {p: 1},
                  torch.tensor(places), np.array(places, np.uint64), np.array(places, float),
                  np.array(places, object), np.array(p), np.array([places]), tuple(places),
                  [places]):  # fmt: skip
        yield keys, wrong, sizes
        yield keys, places, wrong
    for wrong in ("abc", b"abc", None, 5, {"a": 1}, np.array(keys), tuple(keys), iter(keys), []):
        yield wrong, places, sizes
    yield [], [], []


def odd_pieces(p: int, read_only: int, other: int):
    """The same, of two pieces each; and lists of other lengths."""
    for keys, places, sizes in odd_batches(p, read_only, other):
        if isinstance(places, list) and isinstance(sizes, list):
            yield keys, [[p, one] for one in places], [[9, one] for one in sizes]
    keys = [*"ab"]
    for places, sizes in (
        ([[p], [p, p]], [[5], [5, 5]]),
        ([[p, p], [p]], [[5, 5], [5, 5]]),
        ([[], []], [[], []]),
        ([[p], []], [[5], []]),
        ([p, p], [5, 5]),
        ([(p, p)] * 2, [(5, 0)] * 2),
        (np.array([[p, p]] * 2), np.array([[5, 6]] * 2)),
        ([np.array([p, p])] * 2, [np.array([5, 6])] * 2),
        ([torch.tensor([p, p])] * 2, [[5, 6]] * 2),
        ([range(p, p + 2)] * 2, [[5, 6]] * 2),
        ([[[p]], [[p]]], [[[5]], [[5]]]),
        (["ab", "cd"], [[5, 5]] * 2),
        ([b"ab", b"cd"], [[5, 5]] * 2),
    ):
        yield keys, places, sizes


def odd_values(*_):
    """Keys and values, some of which are wrong, or unusual."""
    keys, values = [*"abc"], [b"1" * 100, b"2" * 200, b"3" * 300]
    yield keys, values
    memory = np.arange(100.0)
    for wrong in (b"", None, 5, "text", bytearray(b"xy"), memoryview(b"xyz"), memory, memory[::2],
                  memory[:0], torch.arange(9), torch.arange(9)[::2], [b"x"], np.str_("n"),
                  bytes(CAPACITY - 64), bytes(CAPACITY - 63), bytes(2 * CAPACITY)):  # fmt: skip
        yield keys, [b"1" * 100, wrong, b"3" * 300]
    for name in ("", "a", "b", "x" * 45, "x" * 65537, "\ud800", b"a", b"\xff", 5, None, "é"):
        yield ["a", name, "c"], values
    for wrong in (None, 5, "abc", b"abc", [], values[:2], tuple(values), iter(values), {b"1": 1},
                  np.array(values), np.ones((3, 5)), torch.ones(3, 5)):  # fmt: skip
        yield keys, wrong
    for wrong in ("abc", None, np.array(keys), tuple(keys), iter(keys), []):
        yield wrong, values
    yield [], []
    yield [*"abab"], [b"1", b"2", b"33", b"44"]
    yield [*"abcd"], [bytes(CAPACITY // 3)] * 4  # which evict each other


@contextlib.contextmanager
def odd_store(memory, pages):
    """A store of three values, with its memory, and read-only memory."""
    with pool_file() as path, contextlib.closing(set_up(path, CAPACITY)) as store:
        assert store.register_buffer(memory.ctypes.data, memory.nbytes) == 0
        assert store.register_buffer(pages.ctypes.data, pages.nbytes) == 0
        for name in ("b", "x" * 45):
            assert store.put(name, name.encode() * 100) == 0
        yield store


def contents(store):
    return {name: store.get(name) for name in store._running().backend.names()}


@pytest.mark.parametrize(
    ("call", "batches"),
    [
        ("batch_put_from", odd_batches),
        ("batch_upsert_from", odd_batches),
        ("batch_get_into", odd_batches),
        ("batch_put_from_multi_buffers", odd_pieces),
        ("batch_get_into_multi_buffers", odd_pieces),
        ("put_batch", odd_values),
        ("upsert_batch", odd_values),
    ],
)
def test_odd_batches_fail_as_single_calls_do(call, batches, monkeypatch, caplog):
    original = np.random.default_rng(1).integers(0, 256, 3 << 20, np.uint8)
    whole = original.copy()  # what is written next to registered memory is here, too
    memory, other = whole[1 << 20 : 2 << 20], whole[100:]
    pages = np.frombuffer(mmap.mmap(-1, 12 * KIB, prot=mmap.PROT_READ), np.uint8)[
        4 * KIB : -4 * KIB
    ]
    addresses = memory.ctypes.data, pages.ctypes.data, other.ctypes.data
    found = []
    for one_by_one in (False, True):
        with monkeypatch.context() as patched:
            if one_by_one:
                for name in ("put_at_once", "get_at_once"):
                    patched.setattr(LocalBackend, name, lambda *_, **__: None)
            found.append([])
            for arguments in batches(*addresses):
                with odd_store(memory, pages) as store:
                    caplog.clear()
                    try:
                        codes = getattr(store, call)(*arguments)
                    except TypeError as error:  # an iterator has no length
                        codes = str(error)
                    reasons = [
                        re.sub("object at 0x[0-9a-f]*", "", record.getMessage())
                        for record in caplog.records
                    ]
                    found[-1].append((codes, reasons, contents(store), hash(whole.tobytes())))
            whole[:] = original
    for i, (at_once, alone) in enumerate(zip(*found, strict=True)):
        assert at_once == alone, i


def test_odd_names_are_removed_as_by_single_calls(store, monkeypatch, caplog):
    found = []
    for plain in (LocalBackend._plain_store, lambda _: None):
        monkeypatch.setattr(LocalBackend, "_plain_store", plain)
        caplog.clear()
        for names in (
            [*"abab"],
            ["a", "\ud800", "b"],
            ["a", b"b", "b"],
            ["a", 5, None],
            ("a", "no"),
            np.array(["a", "b"]),
            ["", "a"],
            [],
            ["x" * 70000, "b"],
        ):
            assert store.put("a", b"1") == store.put("b", b"2") == 0
            found.append((store.batch_remove(names), store.batch_is_exist(["a", "b"])))
        found.append([record.getMessage() for record in caplog.records])
    assert found[: len(found) // 2] == found[len(found) // 2 :]


def test_batch_evicts_its_own_tail_as_it_goes():
    with pool_file() as path, contextlib.closing(set_up(path, CAPACITY)) as store:
        memory = Memory(store)
        keys = [f"k{i}" for i in range(12)]
        places, sizes = [memory.address + i * KIB for i in range(12)], [40 * KIB] * 12
        assert store.batch_put_from(keys, places, sizes) == [0] * 12
        assert store.batch_is_exist(keys) == [1] * 6 + [0] * 6  # the head of the prompt
        for i in range(6):
            assert store.get(keys[i]) == memory.at(i * KIB, 40 * KIB)


def test_batch_without_room_fails_per_key(caplog):
    with pool_file() as path, contextlib.closing(set_up(path, CAPACITY)) as store:
        memory = Memory(store)
        keys, places = [f"k{i}" for i in range(4)], [memory.address] * 4
        sizes = [100 * KIB, 100 * KIB, 100 * KIB, 10 * KIB]
        config = ReplicateConfig(with_hard_pin=True)
        assert store.batch_put_from(keys, places, sizes, config) == [0, 0, -200, 0]
        assert [record.getMessage() for record in caplog.records] == [
            "batch_put_from: there is no room for 'k2': all must stay that is"
        ]
        assert store.batch_put_from(keys, places, sizes, "no config") == [INVALID_PARAMS] * 4
        assert store.batch_is_exist(keys) == [1, 1, 0, 1]


def test_values_stored_before_a_batch_fails_are_not_put_again(store, memory, monkeypatch):
    put_headed = Store.put_headed

    def fails_later(self, keys, heads, addresses, sizes, **options):
        put_headed(self, keys[:1], heads[:1], addresses[:1], sizes[:1], **options)
        raise TimeoutError

    monkeypatch.setattr(Store, "put_headed", fails_later)
    p = memory.address
    assert store.batch_put_from(["a", "b"], [p, p + 8], [8, 8]) == [0, 0]
    assert store.get("a") == memory.at(0, 8) and store.get("b") == memory.at(8, 8)


def test_memory_of_many_ranges(store):
    memories = [Memory(store, 64 * KIB) for _ in range(5)]
    keys = [f"k{i}" for i in range(5)]
    places = [memory.address + i for i, memory in enumerate(memories)]
    assert store.batch_put_from(keys, places, [KIB] * 5) == [0] * 5
    targets = [memory.address + 32 * KIB for memory in reversed(memories)]
    assert store.batch_get_into(keys, targets, [KIB] * 5) == [KIB] * 5
    for i in range(5):
        assert memories[4 - i].at(32 * KIB, KIB) == memories[i].at(i, KIB)
    assert store.unregister_buffer(memories[2].address) == 0  # then it is looked up
    assert store.batch_get_into(keys, targets, [KIB] * 5) == [KIB] * 5
