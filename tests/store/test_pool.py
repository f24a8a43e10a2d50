"""Objects in a pool: put, found, read in place, copied out, removed; and every refusal."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import mooncake_kernels as mk
from mooncake_kernels.buffers import as_buffer, parts_of
from mooncake_kernels.errors import ChecksumError, InvalidArgument, Unavailable
from mooncake_kernels.pool import (
    ObjectPool,
    ObjectPut,
    PutResult,
    checksum_of,
    named_keys,
    object_key,
    object_keys,
)

from .support import check, content, put

KEY = (7, 1)


def test_objects_are_shared_by_all_openers_of_the_pool(pool):
    with ObjectPool.open(pool.path) as other:
        assert other.pin(KEY) is None and not other.contains(KEY)
        assert put(pool, KEY, 5000) is PutResult.STORED
        with other.pin(KEY) as pinned:
            assert pinned.num_bytes == 5000 and pinned.view.readonly
            assert bytes(pinned.view) == content(KEY, 5000).tobytes()
            pinned.verify()
        assert other.contains(KEY) and not other.contains((7, 2)) and not other.contains((1, 7))
        assert other.remove(KEY) and not pool.contains(KEY) and not pool.remove(KEY)
    assert check(pool) == 0


@pytest.mark.parametrize("num_bytes", [0, 1, 4095, 4096, 4097, 64 * 4096])
def test_sizes(pool, num_bytes):
    assert put(pool, KEY, num_bytes) is PutResult.STORED
    out = np.zeros(num_bytes + 3, np.uint8)
    assert pool.get_into(KEY, out, verify=True) == num_bytes
    np.testing.assert_array_equal(out[:num_bytes], content(KEY, num_bytes))
    assert not out[num_bytes:].any()
    assert pool.pin(KEY).tensor().tolist() == content(KEY, num_bytes).tolist()
    assert check(pool) == 1


def test_put_is_visible_once_committed(pool):
    with pool.begin(KEY, 100) as writing:
        writing.tensor(torch.float32).fill_(2.5)
        assert not pool.contains(KEY) and pool.pin(KEY) is None and not pool.remove(KEY)
        assert pool.begin(KEY, 100) is PutResult.BEING_WRITTEN
        assert put(pool, KEY, 5) is PutResult.BEING_WRITTEN
    assert not writing.is_open
    assert pool.pin(KEY).tensor(torch.float32).tolist() == [2.5] * 25
    assert pool.begin(KEY, 1) is PutResult.EXISTS and put(pool, KEY, 1) is PutResult.EXISTS
    with pytest.raises(InvalidArgument, match="commit: put must be open"):
        writing.commit()
    writing.abort()
    assert pool.contains(KEY)


def test_aborted_put_leaves_nothing(pool):
    with pytest.raises(RuntimeError, match="no more"), pool.begin(KEY, 4096):
        raise RuntimeError("no more")
    dropped = pool.begin(KEY, 64 * 4096)
    assert isinstance(dropped, ObjectPut) and pool.stats().free_bytes == 0
    del dropped
    with pool.begin(KEY, 9) as writing:
        writing.abort()
    assert check(pool) == 0 and pool.stats().free_bytes == pool.capacity_bytes


def test_remove_exactly_removes_only_the_given_object(pool):
    writing = pool.begin(KEY, 9)
    both = [KEY, (2, 2)]
    assert pool.ids_of(both).tolist() == [0, 0] and not pool.remove_exactly(KEY, writing.id)
    writing.commit()
    assert pool.ids_of(both).tolist() == [writing.id, 0] and writing.id > 0
    assert pool.objects().ids.tolist() == [writing.id]
    with pool.pin(KEY) as pinned:
        assert pool.remove_exactly(KEY, writing.id) and not pool.contains(KEY)
        assert pinned.num_bytes == 9
    assert not pool.remove_exactly(KEY, writing.id)
    assert put(pool, KEY, 9) is PutResult.STORED  # in the same entry
    assert not pool.remove_exactly(KEY, writing.id) and pool.contains(KEY)
    for wrong in (0, (1 << 64) - 1, 1 << 31):
        assert not pool.remove_exactly(KEY, wrong)
    for wrong in (-1, 1 << 64, "a", None):
        with pytest.raises(InvalidArgument, match="remove_exactly: object_id must be an integer"):
            pool.remove_exactly(KEY, wrong)
    assert pool.contains(KEY) and pool.remove_exactly(KEY, int(pool.ids_of([KEY])[0]))


def test_put_returns_full_when_the_pool_has_no_room(pool):
    assert put(pool, (1, 0), 60 * 4096) is PutResult.STORED
    assert pool.begin((2, 0), 5 * 4096) is PutResult.FULL
    assert put(pool, (2, 0), 4 * 4096) is PutResult.STORED
    pool.evict(pool.capacity_bytes)
    for i in range(32):
        assert put(pool, (i, 0), 1) is PutResult.STORED
    assert put(pool, (32, 0), 1) is PutResult.FULL  # no entry
    with pytest.raises(InvalidArgument, match=r"put: num_bytes must be at most the pool's 262144"):
        pool.begin(KEY, 64 * 4096 + 1)


def test_parts_and_ranges(pool):
    parts = [content((i, 0), size) for i, size in enumerate([100, 0, 4096, 3])]
    assert pool.put_from(KEY, *parts[:2], bytes(parts[2]), torch.from_numpy(parts[3])) is (
        PutResult.STORED
    )
    whole = np.concatenate(parts)
    pieces = [np.zeros(size, np.uint8) for size in (1, 4000, 200)]
    assert pool.get_into(KEY, *pieces) == len(whole)
    np.testing.assert_array_equal(np.concatenate(pieces)[: len(whole)], whole)
    some = np.zeros(300, np.uint8)
    assert pool.get_into(KEY, some[:100], some[100:], offset=50, verify=True) == len(whole)
    np.testing.assert_array_equal(some, whole[50:350])
    assert pool.get_into((0, 0), some) is None
    with pytest.raises(InvalidArgument, match="buffers must have room for 4199 bytes, got 300"):
        pool.get_into(KEY, some)
    with pytest.raises(InvalidArgument, match=r"within the object's 4199 bytes, got 300 from 3900"):
        pool.get_into(KEY, some, offset=3900)


def test_batch_lookups_and_reads(pool):
    keys = object_keys(np.arange(20), "scope")
    for i, key in enumerate(keys.tolist()):
        if i != 12:
            put(pool, tuple(key), 100 + i)
    there = np.arange(20) != 12
    np.testing.assert_array_equal(pool.contains_each(keys), there)
    assert pool.match_prefix(keys) == 12 and pool.match_prefix(keys[13:]) == 7
    assert pool.match_prefix(keys[12:]) == 0 and pool.match_prefix([]) == 0
    buffers = [np.zeros(300, np.uint8) for _ in keys]
    buffers[3] = np.zeros(5, np.uint8)
    sizes = pool.get_into_each(keys, buffers, verify=True)
    expected = np.where(there, 100 + np.arange(20), -1)
    expected[3] = -2
    np.testing.assert_array_equal(sizes, expected)
    for key, size, buffer in zip(keys.tolist(), sizes, buffers, strict=True):
        if size > 0:
            np.testing.assert_array_equal(buffer[:size], content(tuple(key), size))


def table(*rows) -> tuple[np.ndarray, np.ndarray]:
    """Addresses and sizes of arrays, a row for each object."""
    places = np.array([[(a.ctypes.data, a.nbytes) for a in row] for row in rows], np.uint64)
    return places[..., 0], places[..., 1]


def test_put_headed_and_get_headed(pool):
    keys, parts = object_keys(range(4), 1), [content((i, 1), 100 + i) for i in range(4)]
    heads, none = [b"head", b"", b"a longer head", b"HEAD"], np.empty(0, np.uint8)
    places = table(*[(part[:50], none, part[50:]) for part in parts])
    assert pool.put_headed(keys, heads, *places) == [PutResult.STORED] * 4
    assert pool.put_headed(keys[::-1], heads, *places) == [PutResult.EXISTS] * 4
    for key, head, part in zip(keys.tolist(), heads, parts, strict=True):
        with pool.pin(tuple(key)) as pinned:
            assert pinned.to_bytes() == head + part.tobytes()
            pinned.verify()
    outs = [(np.zeros(30, np.uint8), np.zeros(200, np.uint8)) for _ in range(5)]
    sizes = pool.get_headed(object_keys(range(5), 1), [*heads, b"x"], *table(*outs), verify=True)
    assert sizes.tolist() == [100, 101, 102, 103, -1]
    for out, part in zip(outs, parts, strict=False):
        np.testing.assert_array_equal(np.concatenate(out)[: len(part)], part)
    assert pool.remove_each(object_keys([3, 9, 0], 1)).tolist() == [True, False, True]
    assert pool.contains_each(keys).tolist() == [False, True, True, False]
    empty = np.empty((0, 1), np.uint64)
    assert pool.put_headed([], [], empty, empty) == []
    assert pool.get_headed([], [], empty, empty).tolist() == pool.remove_each([]).tolist() == []


def test_batch_puts_have_positions(pool):
    keys, places = object_keys(range(3), 1), table(*[(np.zeros(5, np.uint8),)] * 3)
    pool.put_headed(keys, [b""] * 3, *places, positions=[5, 1 << 40, 6])
    objects = pool.objects()
    order = np.argsort(objects.keys[:, 0])
    assert objects.position[order].tolist() == [5, 65535, 6]
    for wrong in ([1, 2], [[1, 2, 3]], [-1] * 3, 5):
        with pytest.raises(InvalidArgument, match="put_headed: positions must be"):
            pool.put_headed(keys, [b""] * 3, *places, positions=wrong)


def begin_each(pool, keys, objects, retention=0, positions=None):
    """Begin objects of many parts, as ``Store.begin_keys`` does."""
    buffers = [[as_buffer(part) for part in parts] for parts in objects]
    parts, counts, num_bytes = parts_of(buffers)
    assert num_bytes == sum(len(part) for parts in objects for part in parts)
    places = np.zeros(len(keys), np.uint16) if positions is None else positions
    kept = np.full(len(keys), retention, np.uint8)
    return pool.native.begin_each(np.array(keys, np.uint64), parts, counts, True, kept, places)


def test_objects_begun_together_are_visible_once_committed(pool):
    pool.put_from((1, 0), b"old")
    being_written = pool.begin((2, 0), 3)
    keys = [(i, 0) for i in range(5)] + [(0, 0)]
    objects = [(b"a", b"bc"), (b"new",), (b"new",), (), (b"", b"dropped"), (b"again",)]
    positions = np.arange(3, 9).astype(np.uint16)
    with begin_each(pool, keys, objects, retention=1, positions=positions) as begun:
        assert begun.states == [0, 1, 2, 0, 0, 2] and begun.sizes == [3, 0, 7]
        assert begun.ids.astype(bool).tolist() == [True, False, False, True, True, False]
        assert pool.contains_each(keys).tolist() == [False, True, False, False, False, False]
        begun.commit(np.array([0, 3]))
        assert pool.stats().num_writing == 2  # the one that is not committed, and the other's
        with pytest.raises(InvalidArgument, match="put must be open"):
            begun.commit(np.array([0]))
        with pytest.raises(InvalidArgument, match="put must be open"):
            begun.commit(np.array([1]))
    being_written.abort()
    assert pool.stats().num_writing == 0
    assert pool.contains_each(keys).tolist() == [True, True, False, True, False, True]
    for key, stored, position in (((0, 0), b"abc", 3), ((3, 0), b"", 6)):
        with pool.pin(key) as pinned:
            pinned.verify()
            assert pinned.to_bytes() == stored and pinned.position == position
            assert pinned.checksum == checksum_of(stored)
    objects = pool.objects()
    assert sorted(objects.retention.tolist()) == [0, 1, 1]
    assert set(begun.ids[[0, 3]].tolist()) < set(objects.ids.tolist())


def test_objects_begun_together_need_room_for_all(pool):
    big = bytes(pool.capacity_bytes // 2)
    assert begin_each(pool, [(i, 0) for i in range(4)], [(b"x",), (big,), (big,), (b"y",)]) is None
    assert pool.stats().num_writing == 0 and pool.stats().num_ready == 0
    with begin_each(pool, [(1, 0), (2, 0)], [(big,), (b"x",)]) as begun:
        begun.commit(np.array([0, 1]))
    assert pool.stats().num_ready == 2


def test_heads_are_compared(pool):
    pool.put_from((1, 1), b"MAGIC..name", b"value")
    out = np.zeros(5, np.uint8)
    read = partial(pool.get_headed, [(1, 1)])
    for head, free, size in (
        (b"MAGIC..name", (0, 0), 5),
        (b"MAGIC01name", (5, 7), 5),
        (b"MAGIC01name", (5, 6), -5),
        (b"MAGIC01nama", (5, 7), -5),
        (b"magic01name", (5, 7), -5),
        (b"MAGIC", (5, 5), -2),
        (b"MAGIC..namevalue!", (0, 0), -5),
        (b"MAGIC..namevalue", (0, 16), 0),
    ):
        out[:] = 0
        assert read([head], *table((out,)), free=free).tolist() == [size]
        assert out.tobytes() == (b"value" if size == 5 else bytes(5))
    pool.memory()[12] = 0
    assert read([b"MAGIC"], *table((np.zeros(11, np.uint8),)), verify=True).tolist() == [-4]
    for free in ((-1, 2), (3, 2), (0, 6)):
        with pytest.raises(InvalidArgument, match="free must be a range within each head"):
            read([b"MAGIC"], *table((out,)), free=free)


def test_batch_put_stops_at_the_first_without_room(pool):
    keys, part = object_keys(range(6), 1), np.zeros(15 * 4096 - 4, np.uint8)
    places = table(*[(part,)] * 6)
    results = pool.put_headed(keys, [b"head"] * 6, *places, retention="hard")
    assert results == [PutResult.STORED] * 4 + [PutResult.FULL]
    assert pool.objects().retention.tolist() == [2] * 4 and not pool.objects().position.any()
    too_large = np.full((1, 1), 64 * 4096 + 1, np.uint64)
    sizes = np.concatenate([places[1][:1], too_large])
    other = object_keys([0, 9], 1)
    assert pool.put_headed(other, [b""] * 2, places[0][:2], sizes) == [PutResult.EXISTS]
    with pytest.raises(InvalidArgument, match="must be at most the pool's"):
        pool.put_headed(other[1:], [b"x"], places[0][:1], too_large)


def test_pin_lasts_as_long_as_its_views(pool):
    put(pool, KEY, 4096)
    pinned = pool.pin(KEY)
    array, tensor = np.frombuffer(pinned.view, np.uint8), pinned.tensor()
    pinned.close()
    with pytest.raises(InvalidArgument, match="tensor: the object must be open"):
        pinned.tensor()
    assert pool.remove(KEY) and not pool.contains(KEY)
    assert put(pool, KEY, 63 * 4096) is PutResult.STORED  # next to it, not over it
    assert (pool.stats().num_pins, pool.stats().doomed_bytes) == (1, 4096)
    np.testing.assert_array_equal(array, content(KEY, 4096))
    pool.close()
    np.testing.assert_array_equal(tensor, content(KEY, 4096))


def test_closing_a_pin_releases_its_views(pool):
    put(pool, KEY, 10)
    with pool.pin(KEY) as pinned:
        view = pinned.view
    with pytest.raises(ValueError, match="released"):
        bytes(view)
    assert pool.stats().num_pins == 0
    with pytest.raises(TypeError):
        pool.pin(KEY).view[0] = 1


def test_pins_are_limited(pool):
    for i in range(9):
        put(pool, (i, 0), 1)
    pins = [pool.pin((i % 9, 0)) for i in range(8)]
    with pytest.raises(Unavailable, match="pin: this process holds 8 pins"):
        pool.pin((8, 0))
    assert pool.pin((99, 0)) is None
    pins.pop()
    pool.pin((8, 0)).close()


def test_damage_is_detected(pool):
    put(pool, KEY, 5000)
    put(pool, (8, 1), 5000, checksum=False)
    pool.memory().flip(0)[0]  # readable to its end
    pool.memory()[123] ^= 4
    out = np.zeros(5000, np.uint8)
    with pytest.raises(ChecksumError, match=r"object \(7, 1\) is not what its checksum says"):
        pool.get_into(KEY, out, verify=True)
    assert not out.any()
    with pytest.raises(ChecksumError), pool.pin(KEY) as pinned:
        pinned.verify()
    assert pool.get_into_each([KEY], [out], verify=True).tolist() == [-4]
    assert pool.get_into(KEY, out) == 5000 and pool.get_into((8, 1), out, verify=True) == 5000


def test_keys():
    assert object_key("a", "x") == object_key(b"a", "x")
    names = [("a", 0), ("b", 0), ("a", 1), ("a", "x"), ("", 0)]
    assert len({object_key(*name) for name in names}) == 5
    for scope in (0, 7, 2**64 - 1, "x"):
        names = ("a", b"b", "", "\u00e9\0\U0001f600", b"\xff\0", np.str_("c"))
        expected = [object_key(name, scope) for name in names]
        assert list(map(tuple, named_keys(names, scope).tolist())) == expected
    assert named_keys([]).shape == (0, 2)
    keys = object_keys(np.array([3, 2**64 - 1], np.uint64), 5)
    assert keys.tolist() == [[3, 5], [2**64 - 1, 5]] and keys.dtype == np.uint64
    assert object_keys([1], "x")[0, 1] == object_keys([1], "x")[0, 1] != object_keys([1], "y")[0, 1]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda p: p.contains(7), "contains: key must be two integers"),
        (lambda p: p.pin((1, 2, 3)), "pin: key must be two integers"),
        (lambda p: p.remove((1, 1 << 64)), "remove: key must be two integers"),
        (lambda p: p.remove_each([1]), r"keys must be \[n, 2\] integers"),
        (lambda p: p.get_headed([KEY], [], [[0]], [[0]]), "heads must be bytes for each key"),
        (lambda p: p.put_headed([KEY], ["x"], [[0]], [[0]]), "heads must be bytes for each key"),
        (lambda p: p.get_headed([KEY], [b""], [0], [0]), r"sizes must be \[n, w\] for 1 keys"),
        (lambda p: p.put_headed([KEY], [b""], [[0]], [[0, 0]]), r"must be \[n, w\] for 1 keys"),
        (lambda p: p.put_headed([KEY], [b""], [[-1]], [[0]]), "addresses must be"),
        (lambda p: p.match_prefix(np.zeros(3, np.uint64)), r"keys must be \[n, 2\] integers"),
        (lambda p: p.contains_each([[1.5, 2.0]]), r"keys must be \[n, 2\] integers"),
        (lambda p: p.begin(KEY, -1), "begin: num_bytes must be an integer"),
        (lambda p: p.begin(KEY, 1, retention="no"), "begin: retention must be one of"),
        (lambda p: p.begin(KEY, 1, position=-1), "begin: position must be"),
        (lambda p: p.put_from(KEY, b"1", position="first"), "put_from: position must be"),
        (lambda p: p.put_from(KEY, b"1", position=1.5), "put_from: position must be"),
        (lambda p: p.put_from(KEY, 5), r"put_from: buffers\[0\] must be"),
        (lambda p: p.put_from(KEY, np.zeros((4, 4))[:, 1]), r"buffers\[0\] must be packed"),
        (lambda p: p.put_from(KEY, "text"), r"put_from: buffers\[0\] must be"),
        (lambda p: p.get_into(KEY, b"123"), r"get_into: buffers\[0\] must be writable"),
        (lambda p: p.get_into(KEY, bytearray(1), offset=-1), "get_into: offset must be an integer"),
        (lambda p: p.get_into_each([KEY], []), "buffers must be as many as keys, got 0 and 1"),
        (lambda p: p.evict(1, policy="fifo"), "evict: policy must be one of"),
        (lambda p: p.retain(KEY, None), "retain: retention must be one of"),
        (lambda p: object_key(5), "object_key: name must be a str or bytes"),
        (lambda p: object_key("\ud800"), "object_key: name must be text that UTF-8 can hold"),
        (lambda p: object_key("a", "\ud800"), "object_key: scope must be text that UTF-8 can"),
        (lambda p: named_keys(["a", 5]), "named_keys: names must be a sequence of str or bytes"),
        (lambda p: named_keys(["\ud800"]), r"names must be a sequence .*, got \['\\ud800'\]"),
        (lambda p: named_keys(5), "names must be a sequence of str or bytes, got 5"),
        (lambda p: named_keys("\u20ac"), "names must be a sequence of str or bytes, got '\u20ac'"),
        (lambda p: named_keys(b"ab"), "names must be a sequence of str or bytes, got b'ab'"),
        (lambda p: object_keys([[1]]), r"object_keys: hashes must be \[n\]"),
        (lambda p: object_keys([1], 1.5), "object_keys: scope must be a str or an integer from"),
        (lambda p: object_keys([1], 1 << 64), "scope must be .*, got 18446744073709551616"),
        (lambda p: p.contains_each(7), r"contains_each: keys must be \[n, 2\] integers, got"),
        (lambda p: p.match_prefix(None), r"match_prefix: keys must be \[n, 2\] .*, got None"),
        (lambda p: p.begin(KEY, 1, checksum=1), "begin: checksum must be True or False, got 1"),
        (lambda p: p.put_from(KEY, b"", checksum="y"), "put_from: checksum must be .*, got 'y'"),
        (lambda p: p.get_into(KEY, verify=None), "get_into: verify must be .*, got None"),
        (lambda p: p.get_into_each([], [], verify="y"), "get_into_each: verify must be True or"),
        (lambda p: p.get_into_each([KEY], 5), "buffers must be a list of buffers, got 5"),
        (lambda p: ObjectPool.open("\ud800"), "ObjectPool.open: path must be text that UTF-8 can"),
        (lambda p: ObjectPool.create(0), "ObjectPool.create: capacity_bytes must be"),
        (lambda p: ObjectPool.create(4095), "ObjectPool: capacity_bytes must be from 4096"),
        (lambda p: ObjectPool.create(4096, alignment=96), "alignment must be a power of two"),
    ],
)
def test_invalid_arguments_are_rejected(pool, call, message):
    with pytest.raises(InvalidArgument, match=message):
        call(pool)


def test_object_dtype_arrays_are_rejected(pool):
    pool.put_from(KEY, b"\1" * 16)
    array = np.array([None, None], object)
    for call in (
        lambda: pool.put_from((8, 1), array),
        lambda: pool.get_into(KEY, array),
        lambda: pool.get_into(KEY, memoryview(array)),
        lambda: pool.get_into_each([KEY], [array]),
    ):
        with pytest.raises(InvalidArgument, match=r"buffers\[0\] must hold no Python objects"):
            call()
    assert array.tolist() == [None, None] and not pool.contains((8, 1))


def test_tensor_dtype_must_divide_the_object_size(pool):
    put(pool, KEY, 6)
    with pytest.raises(InvalidArgument, match="dtype must divide the object's 6 bytes"):
        pool.pin(KEY).tensor(torch.float32)


@pytest.mark.parametrize("dtype", [None, "uint8", np.uint8, 1])
def test_invalid_tensor_dtype_is_rejected(pool, dtype):
    put(pool, KEY, 6)
    with pytest.raises(InvalidArgument, match="tensor: dtype must be a torch.dtype, got"):
        pool.pin(KEY).tensor(dtype)
    with pool.begin((8, 1), 4) as written, pytest.raises(InvalidArgument, match="dtype must be a"):
        written.tensor(dtype)


def test_named_keys_of_temporary_strings():
    """An array makes each string anew when it is asked for it, and so does such a sequence."""

    class Names(Sequence):
        def __len__(self):
            return 100

        def __getitem__(self, i):
            if i >= 100:
                raise IndexError
            return f"name {i}"

    expected = named_keys([f"name {i}" for i in range(100)]).tolist()
    assert named_keys(Names()).tolist() == expected
    assert named_keys(np.array(list(Names()))).tolist() == expected


@pytest.mark.parametrize("arguments, got", [((64 << 20,), "67108864"), ((), "None")])
def test_pool_constructor_is_not_public(arguments, got):
    message = rf"^ObjectPool: make one by ObjectPool.create\(capacity_bytes\) or .*, got {got}$"
    with pytest.raises(InvalidArgument, match=message):
        ObjectPool(*arguments)


def test_closed_pool_is_rejected(pool):
    other = ObjectPool.open(pool.path)
    other.close()
    other.close()
    with pytest.raises(InvalidArgument, match="ObjectPool: pool must be open, got the closed"):
        other.contains(KEY)
    for call in (other.watch, other.stats, lambda: other.buffer, lambda: other.get_into(KEY)):
        with pytest.raises(InvalidArgument, match="ObjectPool: pool must be open, got the closed"):
            call()
    assert other.closed and not pool.closed
    with pytest.raises(InvalidArgument, match="^ObjectPool: what is entered must be open, got"):
        other.__enter__()


def test_open_rejects_files_that_are_no_pool(tmp_path, pool):
    for size in (0, 10, 1 << 20):
        (tmp_path / "file").write_bytes(bytes(size))
        with pytest.raises(InvalidArgument, match="ObjectPool.open: path must be the memory of"):
            ObjectPool.open(tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        ObjectPool.open(tmp_path / "none")
    others = [ObjectPool.open(pool.path) for _ in range(3)]
    with pytest.raises(Unavailable, match="all 4 processes that the pool has room for"):
        ObjectPool.open(pool.path)
    others.pop().close()
    ObjectPool.open(pool.path).close()


@pytest.mark.parametrize("path", [None, "/dev/shm/mk-test-too-large"])
def test_create_fails_when_there_is_not_enough_memory(path):
    with pytest.raises(OSError):
        ObjectPool.create((1 << 48) - 1, path, alignment=2 << 20, num_objects=1)
    assert path is None or not os.path.exists(path)


def test_other_layouts_and_truncated_files_are_rejected(tmp_path):
    with ObjectPool.create(4096, tmp_path / "pool", num_objects=1, num_processes=1):
        with pytest.raises(FileExistsError):
            ObjectPool.create(4096, tmp_path / "pool")
    whole = (tmp_path / "pool").read_bytes()
    (tmp_path / "pool").write_bytes(whole[:8] + b"\x63" + whole[9:])
    with pytest.raises(Unavailable, match="has layout 99, and this build has 7"):
        ObjectPool.open(tmp_path / "pool")
    (tmp_path / "pool").write_bytes(whole[:-1])
    with pytest.raises(InvalidArgument, match="path must be the whole memory of a pool"):
        ObjectPool.open(tmp_path / "pool")


def test_pool_from_before_a_reboot_is_rejected(tmp_path):
    """On a disk, a file outlasts the processes and the mutex that it describes."""
    with ObjectPool.create(4096, tmp_path / "pool", num_objects=1, num_processes=1):
        whole = (tmp_path / "pool").read_bytes()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().replace("-", "")[:16]
    now = int(boot, 16).to_bytes(8, "little")
    assert whole.count(now) == 1
    (tmp_path / "pool").write_bytes(whole.replace(now, bytes(8)))
    with pytest.raises(Unavailable, match="was made before this machine was last started"):
        ObjectPool.open(tmp_path / "pool")


def test_engine_reads_a_peers_pool(pool):
    """A pool's memory is registered as any other, and an object in it is a range of it."""
    put(pool, KEY, 5000)
    with mk.TransferEngine() as near, mk.TransferEngine() as far:
        region = far.register(pool.memory())
        out = np.zeros(5000, np.uint8)
        near.register(out)
        with pool.pin(KEY) as pinned, near.open(far.name) as peer:
            offset = np.frombuffer(pinned.view, np.uint8).ctypes.data - region.address
            near.read(peer, [(out.ctypes.data, region.address + offset, 5000)]).wait()
        region.close()
    np.testing.assert_array_equal(out, content(KEY, 5000))


@pytest.mark.parametrize("num_bytes", [0, 1, 1000, 300_000])
def test_checksum_of_parts_equals_that_of_the_object(num_bytes):
    whole = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, np.uint8)
    with ObjectPool.create(1 << 20) as pool:
        assert pool.put_from((1, 2), whole) is PutResult.STORED
        assert pool.put_from((3, 4), whole, checksum=False) is PutResult.STORED
        with pool.pin((1, 2)) as pinned, pool.pin((3, 4)) as unsummed:
            assert pinned.checksum == checksum_of(whole) == checksum_of(bytes(whole))
            assert unsummed.checksum is None
            for cut in (0, num_bytes // 3, num_bytes):
                assert checksum_of(whole[:cut], torch.from_numpy(whole[cut:])) == pinned.checksum
            if num_bytes:
                whole[num_bytes // 2] ^= 1
                assert checksum_of(whole) != pinned.checksum
    with pytest.raises(InvalidArgument, match=r"checksum_of: buffers\[1\] must be"):
        checksum_of(b"", 5)
