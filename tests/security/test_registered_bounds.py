"""A registration is a bound: no call of the Mooncake API moves what lies behind the end of one."""

import contextlib
import inspect

import numpy as np
import pytest
import torch

from mooncake_serving.compat.mooncake import TransferEngine, TransferOpcode
from mooncake_serving.compat.mooncake.store import (
    INVALID_PARAMS,
    MooncakeDistributedStore,
    ParallelAxis,
    TensorParallelism,
)

from ..compat.store_support import pool_file, reasons, set_up, value_of
from ..compat.support import addressed, side

ROOM = 8192  # registered, between memory of the same array that is not
WRONG = INVALID_PARAMS
VALUE, TENSOR = value_of(0, 2 * ROOM), torch.arange(ROOM // 4, dtype=torch.int32)
TP = TensorParallelism([ParallelAxis("tp", 0, 1, split_dim=0)])

# What each call that takes an address returns for memory at `p` of `n` bytes that it must refuse.
REFUSED = {
    "get_into": lambda s, p, n: [s.get_into("v", p, n)],
    "batch_get_into": lambda s, p, n: s.batch_get_into(["v", "v"], [p, p], [n, n]),
    "batch_get_into_multi_buffers": lambda s, p, n: s.batch_get_into_multi_buffers(
        ["v", "v"], [[p, p]] * 2, [[n, n]] * 2
    ),
    "batch_get_into_multi_buffer_ranges": lambda s, p, n: s.batch_get_into_multi_buffer_ranges(
        ["v"], [[p]], [[n]], [[0]]
    ),
    "get_into_ranges": lambda s, p, n: s.get_into_ranges([p], [["v"]], [[[0]]], [[[0]]], [[[n]]])[
        0
    ][0],
    "get_tensor_into": lambda s, p, n: [s.get_tensor_into("t", p, n)],
    "batch_get_tensor_into": lambda s, p, n: s.batch_get_tensor_into(["t"], [p], [n]),
    "get_tensor_with_tp_into": lambda s, p, n: [s.get_tensor_with_tp_into("t", p, n)],
    "batch_get_tensor_with_tp_into": lambda s, p, n: s.batch_get_tensor_with_tp_into(
        ["t"], [p], [n]
    ),
    "get_tensor_with_parallelism_into": lambda s, p, n: [
        s.get_tensor_with_parallelism_into("t", p, n)
    ],
    "batch_get_tensor_with_parallelism_into": lambda s, p, n: (
        s.batch_get_tensor_with_parallelism_into(["t"], [p], [n])
    ),
    "put_from": lambda s, p, n: [s.put_from("new", p, n)],
    "upsert_from": lambda s, p, n: [s.upsert_from("new", p, n)],
    "put_from_with_metadata": lambda s, p, n: [
        s.put_from_with_metadata("new", p, p, n, 8),
        s.put_from_with_metadata("new", p, p, 8, n),
    ],
    "batch_put_from": lambda s, p, n: s.batch_put_from(["new", "new2"], [p, p], [n, n]),
    "batch_upsert_from": lambda s, p, n: s.batch_upsert_from(["new", "new2"], [p, p], [n, n]),
    "batch_put_from_multi_buffers": lambda s, p, n: s.batch_put_from_multi_buffers(
        ["new", "new2"], [[p, p]] * 2, [[8, n]] * 2
    ),
    "batch_put_from_multi_buffer_ranges": lambda s, p, n: s.batch_put_from_multi_buffer_ranges(
        ["begun"], [[p]], [[n]], [[0]]
    ),
    "put_tensor_from": lambda s, p, n: [s.put_tensor_from("new", p, n)],
    "upsert_tensor_from": lambda s, p, n: [s.upsert_tensor_from("new", p, n)],
    "batch_put_tensor_from": lambda s, p, n: s.batch_put_tensor_from(["new"], [p], [n]),
    "batch_upsert_tensor_from": lambda s, p, n: s.batch_upsert_tensor_from(["new"], [p], [n]),
    "put_tensor_with_tp_from": lambda s, p, n: [s.put_tensor_with_tp_from("new", p, n)],
    "batch_put_tensor_with_tp_from": lambda s, p, n: s.batch_put_tensor_with_tp_from(
        ["new"], [p], [n]
    ),
    "put_tensor_with_parallelism_from": lambda s, p, n: [
        s.put_tensor_with_parallelism_from("new", p, n, TP)
    ],
    "upsert_tensor_with_parallelism_from": lambda s, p, n: [
        s.upsert_tensor_with_parallelism_from("new", p, n, TP)
    ],
    "batch_put_tensor_with_parallelism_from": lambda s, p, n: (
        s.batch_put_tensor_with_parallelism_from(["new"], [p], [n], [TP])
    ),
    "batch_upsert_tensor_with_parallelism_from": lambda s, p, n: (
        s.batch_upsert_tensor_with_parallelism_from(["new"], [p], [n], [TP])
    ),
}


@contextlib.contextmanager
def _arena():
    """A store, the values it has, and an array of which it knows the second third."""
    with pool_file() as path, contextlib.closing(set_up(path)) as store:
        arena = addressed(3 * ROOM)
        middle = arena.ctypes.data + ROOM
        assert store.register_buffer(middle, ROOM) == 0
        assert store.put("v", VALUE) == 0 and store.put_tensor("t", TENSOR) == 0
        assert store.put_tensor("other", TENSOR) == 0
        assert store.batch_get_session_start(["v"]) == [0]
        assert store.batch_put_session_start(["begun"], [2 * ROOM]) == [0]
        yield store, arena, middle


def test_all_pointer_taking_calls_are_covered():
    calls = inspect.getmembers(MooncakeDistributedStore, inspect.isfunction)
    takes = {
        name
        for name, call in calls
        if name[0] != "_" and any("_ptr" in one for one in inspect.signature(call).parameters)
    }
    assert takes - {"register_buffer", "unregister_buffer"} == set(REFUSED)


@pytest.mark.parametrize("name", REFUSED)
def test_range_beyond_registration_is_rejected(name, caplog):
    with _arena() as (store, arena, middle):
        for begin, size in ((0, ROOM + 1), (ROOM - 1, 2), (16, ROOM), (0, 2 * ROOM), (8, 2**63)):
            caplog.clear()
            answers = REFUSED[name](store, middle + begin, size)
            assert answers and all(one in (WRONG, None) for one in answers), (begin, size)
            reasons(caplog, "must stay within the registered buffer, .* \\+ 8192 bytes, got")
        np.testing.assert_array_equal(arena, addressed(3 * ROOM))
        assert store.batch_is_exist(["new", "new2", "new_tp_0"]) == [0, 0, 0]
        assert store.batch_put_session_end(["begun"]) == [0]
        assert not any(store.get("begun"))  # nothing was written into it


def test_out_of_bounds_item_does_not_fail_its_batch():
    with _arena() as (store, arena, middle):
        codes = store.batch_put_from(
            ["a", "b", "c"], [middle, middle + 8, middle + 8], [8, ROOM, 8]
        )
        assert codes == [0, WRONG, 0] and store.batch_is_exist(["a", "b", "c"]) == [1, 0, 1]
        assert store.batch_get_into(["a", "c"], [middle + ROOM - 8, middle + ROOM - 7], [8, 8]) == [
            8,
            WRONG,
        ]
        expected = addressed(3 * ROOM)
        expected[2 * ROOM - 8 : 2 * ROOM] = expected[ROOM : ROOM + 8]
        np.testing.assert_array_equal(arena, expected)


def test_offsets_stay_within_their_registration(caplog):
    """The bound is that of the registration the pointer is in, wherever an offset leads."""
    with _arena() as (store, arena, middle):

        def get(pointer: int, offset: int, size: int) -> int:
            [[[code]]] = store.get_into_ranges(
                [pointer], [["v"]], [[[offset]]], [[[0]]], [[[size]]]
            )
            return code

        assert get(middle, ROOM - 4, 4) == 4
        arena[:] = addressed(3 * ROOM)
        for pointer, offset in (
            (0, ROOM),
            (0, ROOM + 8),
            (ROOM - 1, 1),
            (0, ROOM - 3),
            (-8, 2**62),
        ):
            assert get(middle + pointer, offset, 4) == WRONG
        # From outside of it: to its end, not over it.
        assert get(middle - 8, 8 + ROOM - 4, 5) == WRONG
        reasons(caplog, "must stay within the registered buffer")
        np.testing.assert_array_equal(arena, addressed(3 * ROOM))
        assert get(middle - 8, 8 + ROOM - 4, 4) == 4


def test_adjacent_registrations_are_not_merged():
    """Two that are adjacent are not one, as for the transfer engine; none may overlap another."""
    with _arena() as (store, arena, middle):
        assert store.register_buffer(middle + ROOM, ROOM) == 0
        for begin, size in ((0, ROOM + 1), (0, 2 * ROOM), (ROOM - 1, 2)):
            assert store.put_from("new", middle + begin, size) == WRONG
            assert store.get_into("v", middle + begin, size) == WRONG
        np.testing.assert_array_equal(arena, addressed(3 * ROOM))
        assert store.put_from("new", middle + ROOM, ROOM) == 0
        assert store.unregister_buffer(middle) == store.unregister_buffer(middle + ROOM) == 0
        assert store.register_buffer(middle, 2 * ROOM) == 0
        for begin, size in ((0, ROOM), (8, 8), (-8, 16), (2 * ROOM - 1, 2)):
            assert store.register_buffer(middle + begin, size) == WRONG
        assert store.get_into("v", middle, 2 * ROOM) == 2 * ROOM


def test_unregistered_memory_is_accepted_by_lookup():
    with _arena() as (store, arena, middle):
        assert store.get_into("v", middle - 8, 2 * ROOM) == 2 * ROOM
        assert arena[ROOM - 8 : 3 * ROOM - 8].tobytes() == VALUE
        assert store.unregister_buffer(middle) == 0
        assert store.get_into("v", middle, 2 * ROOM) == 2 * ROOM


def test_transfers_stay_within_registered_memory():
    """Neither here nor at the peer, in any call of the engine, also into an adjacent one."""
    near, far = addressed(3 * ROOM), addressed(3 * ROOM)
    begin, begin_far = near.ctypes.data, far.ctypes.data
    with side(near[:ROOM]) as here, side(far[:ROOM]) as there:
        engine: TransferEngine = here.engine
        for one, start in ((engine, begin), (there.engine, begin_far)):
            assert one.register_memory(start + ROOM, ROOM) == 0
        for host in ("127.0.0.1", "localhost"):
            name = f"{host}:{there.port}"
            for offset, size in ((0, ROOM + 1), (ROOM - 1, 2), (0, 2 * ROOM), (2 * ROOM - 1, 2)):
                for local, remote in ((begin + offset, begin_far), (begin, begin_far + offset)):
                    one, many = (local, remote, size), ([local], [remote], [size])
                    calls = [
                        engine.transfer_sync_write(name, *one),
                        engine.transfer_sync_read(name, *one),
                        engine.transfer_sync(name, *one, TransferOpcode.Read),
                        engine.batch_transfer_sync_write(name, *many),
                        engine.batch_transfer_sync_read(name, *many),
                        engine.batch_transfer_sync(name, *many, TransferOpcode.Read),
                        _end(engine, engine.batch_transfer_async_write(name, *many)),
                        _end(engine, engine.batch_transfer_async_read(name, *many)),
                        _end(engine, engine.transfer_submit_write(name, *one)),
                    ]
                    assert calls == [-1] * len(calls)
                assert engine.write_bytes_to_buffer(begin + offset, bytes(size), size) == -1
        np.testing.assert_array_equal(near, addressed(3 * ROOM))
        np.testing.assert_array_equal(far, addressed(3 * ROOM))


def _end(engine: TransferEngine, batch_id: int) -> int:
    return engine.get_batch_transfer_status([batch_id]) if batch_id > 0 else -1
