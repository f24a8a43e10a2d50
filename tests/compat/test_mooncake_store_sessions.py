"""Sessions of ``MooncakeDistributedStore``: values written and read layer by layer."""

import threading

import numpy as np
import pytest

from mooncake_serving.compat.mooncake.store import (
    INVALID_PARAMS,
    NO_AVAILABLE_HANDLE,
    OBJECT_ALREADY_EXISTS,
    OBJECT_NOT_FOUND,
    MooncakeDistributedStore,
)

from .store_processes import processes
from .store_support import CAPACITY, Memory, reasons, set_up, settings_of, value_of

WRONG, ABSENT, THERE = INVALID_PARAMS, OBJECT_NOT_FOUND, OBJECT_ALREADY_EXISTS
LAYERS, LAYER_BYTES = 8, 3000
SIZE = LAYERS * LAYER_BYTES


def put_layer(store, keys, memory, layer, at=0):
    """Write one layer of each key from where it is in memory, in two pieces."""
    half = LAYER_BYTES // 3
    first = [memory.address + at + (i * LAYERS + layer) * LAYER_BYTES for i in range(len(keys))]
    offset = layer * LAYER_BYTES
    return store.batch_put_from_multi_buffer_ranges(
        keys,
        [[address, address + half] for address in first],
        [[half, LAYER_BYTES - half]] * len(keys),
        [[offset, offset + half]] * len(keys),
    )


def get_layer(store, keys, memory, layer, at):
    return store.batch_get_into_multi_buffer_ranges(
        keys,
        [[memory.address + at + i * LAYER_BYTES] for i in range(len(keys))],
        [[LAYER_BYTES]] * len(keys),
        [[layer * LAYER_BYTES]] * len(keys),
    )


def test_layer_by_layer(store, memory, path):
    keys = ["a", "b", "c"]
    other = set_up(path, 0)
    assert store.batch_put_session_start(keys, [SIZE] * 3) == [0, 0, 0]
    for layer in reversed(range(LAYERS)):
        assert other.batch_is_exist(keys) == [0, 0, 0] and other.get("a") == b""
        assert put_layer(store, keys, memory, layer) == [LAYER_BYTES] * 3
    assert store.batch_put_session_end(keys) == [0, 0, 0]
    for i, key in enumerate(keys):
        assert other.get(key) == memory.at(i * SIZE, SIZE)
    theirs = Memory(other)
    assert other.batch_get_session_start(["a", "none", "c"]) == [0, ABSENT, 0]
    for layer in range(LAYERS):
        assert get_layer(other, ["a", "c"], theirs, layer, 500_000) == [LAYER_BYTES] * 2
        for i, key in enumerate((0, 2)):
            expected = memory.at(key * SIZE + layer * LAYER_BYTES, LAYER_BYTES)
            assert theirs.at(500_000 + i * LAYER_BYTES, LAYER_BYTES) == expected
    assert other.batch_get_session_end(["a", "none", "c"]) == 0
    assert get_layer(other, ["a"], theirs, 0, 0) == [WRONG]
    other.close()


def test_second_put_session_for_a_key_is_rejected(store, memory, path, caplog):
    other = set_up(path, 0)
    assert store.batch_put_session_start(["a", "z", "b"], [10, 0, 10]) == [0, WRONG, 0]
    reasons(caplog, "at least 1 byte")
    assert store.batch_put_session_start(["a"], [10]) == [WRONG]
    reasons(caplog, "must have no put session yet, got 'a'")
    assert other.batch_put_session_start(["a"], [10]) == [THERE]
    reasons(caplog, "there is a value of 'a', or it is being written")
    assert other.put("a", b"mine") == 0 and other.get("a") == b""  # it is being written
    assert other.batch_put_session_end(["a"]) == [WRONG]
    reasons(caplog, "must have a put session, got 'a' without")
    assert store.batch_put_session_revoke(["a", "none"]) == [0, WRONG]
    assert other.put("a", b"mine") == 0 and other.get("a") == b"mine"
    assert store.batch_put_session_start(["a"], [10]) == [THERE]
    assert store.batch_put_session_end(["b", "b"]) == [0, WRONG]
    assert store.batch_put_session_revoke(["b"]) == [WRONG] and store.is_exist("b") == 1
    other.close()


def test_unwritten_bytes_are_zeros(store, memory):
    noise = value_of(1, CAPACITY // 2)
    assert store.put("noise", noise) == 0 and store.remove("noise") == 0
    assert store.batch_put_session_start(["a", "b"], [100_000, 1000]) == [0, 0]
    p = memory.address
    codes = store.batch_put_from_multi_buffer_ranges(
        ["a"], [[p, p, p, p, p]], [[100, 50, 300, 0, 1]], [[200, 250, 100, 5, 99_999]]
    )
    assert codes == [451]
    assert store.batch_put_session_end(["a", "b"]) == [0, 0]
    expected = np.zeros(100_000, np.uint8)
    for offset, size in ((200, 100), (250, 50), (100, 300), (99_999, 1)):
        expected[offset : offset + size] = memory.bytes[:size]
    assert store.get("a") == expected.tobytes() and store.get("b") == bytes(1000)


@pytest.mark.parametrize(
    ("sizes", "offsets", "reason"),
    [
        ([[11]], [[0]], "within the value's 10 bytes, got 11 from 0"),
        ([[1]], [[10]], "within the value's 10 bytes, got 1 from 10"),
        ([[1]], [[2**64 - 1]], "within the value's 10 bytes"),
        ([[1]], [[-1]], "offsets must be an integer from 0"),
        ([[-1]], [[0]], "size must be an integer from 0"),
        ([[1, 1]], [[0]], "sizes must be as many as buffer_ptrs, got 2 and 1"),
        ([[1]], [[0, 1]], "offsets must be as many as buffer_ptrs, got 2 and 1"),
        ([1], [[0]], "sizes must be a list, got 1"),
        ([[1]], [0], "offsets must be a list, got 0"),
        ([[1]], [], "must be as long as keys"),
        (5, [[0]], "must be a list, got 5"),
    ],
)
def test_wrong_ranges(store, memory, caplog, sizes, offsets, reason):
    value = memory.at(0, 10)
    assert store.put("old", value) == 0 and store.batch_get_session_start(["old"]) == [0]
    assert store.batch_put_session_start(["new"], [10]) == [0]
    pointers, before = [[memory.address]], memory.bytes.copy()
    assert store.batch_put_from_multi_buffer_ranges(["new"], pointers, sizes, offsets) == [WRONG]
    reasons(caplog, reason)
    assert store.batch_get_into_multi_buffer_ranges(["old"], pointers, sizes, offsets) == [WRONG]
    reasons(caplog, reason)
    np.testing.assert_array_equal(memory.bytes, before)
    assert store.batch_put_session_end(["new"]) == [0] and store.get("new") == bytes(10)


def test_one_invalid_key_among_many(store, memory):
    p = memory.address
    assert store.batch_put_session_start(["a", "b"], [10, 20]) == [0, 0]
    codes = store.batch_put_from_multi_buffer_ranges(
        ["a", "none", "b"], [[p], [p], [p]], [[10], [10], [20]], [[0], [0], [1]]
    )
    assert codes == [10, WRONG, WRONG]
    assert store.batch_put_session_start(["c", "d"], [10]) == [WRONG, WRONG]
    assert store.batch_put_session_start([], []) == [] == store.batch_get_session_start([])
    for call in ("start", "end"):
        assert getattr(store, f"batch_get_session_{call}")(5) in ([WRONG], WRONG)


def test_invalid_keys(store, memory, caplog):
    p = memory.address
    for keys in (np.array(5), range(2**70), "ab"):
        assert store.batch_put_session_start(keys, [10]) == [WRONG]
        assert store.batch_get_session_start(keys) == [WRONG]
        reasons(caplog, "keys must be a list")
    for key in (5, [1], None, b"\xff"):
        assert store.batch_put_session_start([key], [10]) == [WRONG]
        reasons(caplog, "key must be a string")
        assert store.batch_put_from_multi_buffer_ranges([key], [[p]], [[1]], [[0]]) == [WRONG]
        assert store.batch_put_session_end([key]) == [WRONG]
        assert store.batch_put_session_revoke([key]) == [WRONG]
        assert store.batch_get_session_start([key]) == [WRONG]
        assert store.batch_get_into_multi_buffer_ranges([key], [[p]], [[1]], [[0]]) == [WRONG]
        assert store.batch_get_session_end([key]) == WRONG
        reasons(caplog, "key must be a string")
    assert store.batch_put_session_start(["a", "", "b", "a"], [1, 1, 0, 1]) == [
        0, WRONG, WRONG, THERE,
    ]  # fmt: skip


def test_null_and_read_only_memory(store, caplog):
    assert store.batch_put_session_start(["a"], [10]) == [0]
    assert store.batch_put_from_multi_buffer_ranges(["a"], [[0]], [[10]], [[0]]) == [WRONG]
    reasons(caplog, "buffer_ptr must be memory of this process")
    assert store.batch_put_session_revoke(["a"]) == [0]


def test_no_room_and_room_returned(store, path):
    large = CAPACITY * 3 // 4
    assert store.batch_put_session_start(["a", "b"], [large, large]) == [0, NO_AVAILABLE_HANDLE]
    assert store.batch_put_session_start(["c"], [CAPACITY]) == [NO_AVAILABLE_HANDLE]
    assert store.close() == 0  # which ends them
    again = set_up(path)
    assert again.is_exist("a") == 0
    assert again.batch_put_session_start(["b"], [large]) == [0]
    again.close()


def test_get_session_outlives_removal(store, memory):
    assert store.put("a", value_of(1, SIZE)) == 0
    assert store.batch_get_session_start(["a"]) == [0]
    assert store.remove("a") == 0
    assert store.put("a", value_of(2, 100)) == 0
    assert get_layer(store, ["a"], memory, 7, 0) == [LAYER_BYTES]
    assert memory.at(0, LAYER_BYTES) == value_of(1, SIZE)[7 * LAYER_BYTES :]
    assert store.batch_get_session_start(["a"]) == [0]  # what there is now
    assert get_layer(store, ["a"], memory, 7, 0) == [WRONG]
    assert store.remove_all() == 1


def test_a_new_session_replaces_the_old_one(store, memory):
    assert store.put("a", value_of(1, SIZE)) == 0 and store.batch_get_session_start(["a"]) == [0]
    assert store.remove("a") == 0 and store.batch_get_session_start(["a"]) == [ABSENT]
    assert get_layer(store, ["a"], memory, 0, 0) == [WRONG]


def test_number_of_get_sessions_is_limited(store, caplog):
    keys = [f"k{i}" for i in range(4200)]
    assert store.put_batch(keys, [b"1"] * len(keys)) == 0
    codes = store.batch_get_session_start(keys)
    assert codes == [0] * 2048 + [NO_AVAILABLE_HANDLE] * (4200 - 2048)
    reasons(caplog, "2048 values are being read")
    assert store.batch_get_session_start(keys[:10]) == [0] * 10
    assert store.get("k4199") == b"1" and len(store.batch_get_replica_desc(keys)) == 4200
    assert store.batch_get_session_end(keys) == 0
    assert store.batch_get_session_start(keys[-10:]) == [0] * 10


def test_before_setup_and_after_close(path, caplog):
    store = MooncakeDistributedStore()
    for _ in range(2):
        assert store.batch_put_session_start(["a"], [10]) == [WRONG]
        reasons(caplog, "call setup first")
        assert store.batch_put_session_end(["a"]) == [WRONG]
        assert store.batch_put_session_revoke(["a"]) == [WRONG]
        assert store.batch_get_session_start(["a"]) == [WRONG]
        assert store.batch_get_session_end(["a"]) == WRONG
        assert store.batch_get_into_multi_buffer_ranges(["a"], [[1]], [[1]], [[0]]) == [WRONG]
        caplog.clear()
        arguments = ("127.0.0.1", "P2PHANDSHAKE", CAPACITY, 0, "tcp", "", path)
        assert store.setup(*arguments) == 0 and store.close() == 0
    assert store.batch_put_session_start("abc", [1, 1, 1]) == [WRONG]
    reasons(caplog, "keys must be a list")


def test_a_killed_writer_leaves_nothing(store, path):
    with processes(settings_of(path, 0)) as (other,):
        assert other.call("batch_put_session_start", ["a"], [CAPACITY // 2]) == [0]
        assert store.batch_put_session_start(["a"], [100]) == [THERE]
        other.kill()
    assert store.put("b", value_of(1, CAPACITY * 3 // 4)) == 0  # its room came back
    assert store.batch_put_session_start(["a"], [100]) == [0]


def test_threads_write_layers_of_one_value(store, memory):
    assert store.batch_put_session_start(["a"], [SIZE]) == [0]
    threads = [
        threading.Thread(target=put_layer, args=(store, ["a"], memory, layer))
        for layer in range(LAYERS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.batch_put_session_end(["a"]) == [0]
    assert store.get("a") == memory.at(0, SIZE)


@pytest.mark.parametrize("capacity", [32 << 20, 0])
def test_between_hosts(server, capacity):
    """With a pool of its own it is written there, without one into another's."""
    settings = settings_of(server.url)
    with processes(settings) as (other,):
        store = MooncakeDistributedStore()
        assert store.setup(settings | {"global_segment_size": capacity}) == 0
        memory, keys = Memory(store), ["a", "b"]
        assert store.batch_put_session_start(keys, [SIZE] * 2) == [0, 0]
        assert other.call("batch_is_exist", keys) == [0, 0]
        for layer in range(LAYERS):
            assert put_layer(store, keys, memory, layer) == [LAYER_BYTES] * 2
        assert store.batch_put_session_end(keys) == [0, 0]
        assert other.call("get_batch", keys) == [memory.at(0, SIZE), memory.at(SIZE, SIZE)]
        assert other.call("batch_put_session_start", ["a"], [SIZE]) == [THERE]
        assert store.batch_put_session_start(["b"], [SIZE]) == [THERE]

        value = value_of(3, SIZE)
        assert other.call("put", "theirs", value) == 0
        assert store.batch_get_session_start(["theirs", "none", "a"]) == [0, ABSENT, 0]
        for layer in (5, 0):
            assert get_layer(store, ["theirs", "a"], memory, layer, 500_000) == [LAYER_BYTES] * 2
            begin = layer * LAYER_BYTES
            assert memory.at(500_000, LAYER_BYTES) == value[begin : begin + LAYER_BYTES]
            assert memory.at(500_000 + LAYER_BYTES, LAYER_BYTES) == memory.at(begin, LAYER_BYTES)
        p = memory.address + 600_000
        many = [p + i * 100 for i in range(30)]
        offsets = [(i * 711) % (SIZE - 50) for i in range(30)]
        codes = store.batch_get_into_multi_buffer_ranges(
            ["theirs", "a"], [many, [p + 5000]], [[50] * 30, [SIZE + 1]], [offsets, [0]]
        )
        assert codes == [1500, WRONG]
        for i, offset in enumerate(offsets):
            assert memory.at(600_000 + i * 100, 50) == value[offset : offset + 50]
        assert other.call("remove", "theirs") == 0
        assert get_layer(store, ["theirs", "a"], memory, 1, 500_000) == [ABSENT, LAYER_BYTES]
        assert store.batch_get_session_end(["theirs", "a"]) == 0
        assert store.batch_put_session_start(["c"], [SIZE]) == [0]
        store.close()
        assert other.call("put", "c", b"c") == 0 and other.call("get", "c") == b"c"


@pytest.mark.parametrize("num_bytes", [SIZE, SIZE + 1, SIZE // 2])
def test_remote_value_replaced_during_a_get_session(server, num_bytes):
    """What was begun with one value never goes on with another."""
    settings = settings_of(server.url)
    with processes(settings) as (other,):
        store = MooncakeDistributedStore()
        assert store.setup(settings) == 0
        memory, value = Memory(store), value_of(1, SIZE)
        assert other.call("put", "a", value) == 0 == other.call("put", "b", value)
        assert store.batch_get_session_start(["a", "b"]) == [0, 0]
        assert get_layer(store, ["a", "b"], memory, 0, 0) == [LAYER_BYTES] * 2
        assert other.call("upsert", "a", value_of(2, num_bytes)) == 0
        code, b = get_layer(store, ["a", "b"], memory, 1, 0)
        assert code == ABSENT and b == LAYER_BYTES
        assert memory.at(LAYER_BYTES, LAYER_BYTES) == value[LAYER_BYTES : 2 * LAYER_BYTES]
        assert other.call("upsert", "a", value) == 0  # nor if it is as it was
        assert get_layer(store, ["a"], memory, 1, 0) == [ABSENT]
        assert store.batch_get_session_start(["a"]) == [0]
        assert get_layer(store, ["a"], memory, 1, 0) == [LAYER_BYTES]
        store.close()


def test_too_large_item_does_not_fail_its_batch(server):
    settings = settings_of(server.url)
    with processes(settings):
        store = MooncakeDistributedStore()
        assert store.setup(settings | {"global_segment_size": 0}) == 0
        keys = ["a", "large", "b", 5, "a"]
        codes = store.batch_put_session_start(keys, [100, 1 << 40, 100, 1, 100])
        assert codes == [0, NO_AVAILABLE_HANDLE, 0, WRONG, THERE]
        assert store.batch_put_session_end(["a", "b"]) == [0, 0] and store.get("a") == bytes(100)
        store.close()


def test_no_process_has_a_pool(server, caplog):
    store = MooncakeDistributedStore()
    assert store.setup(settings_of(server.url, 0)) == 0
    assert store.batch_put_session_start(["a"], [10]) == [-900]
    reasons(caplog, "no node with a pool takes it")
    server.stop()
    assert store.batch_get_session_start(["a", "b"]) == [-900, -900]
    store.close()
