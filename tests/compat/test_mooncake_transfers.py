"""Synchronous transfers and notifications, to a peer by a copy, by tcp, in another process."""

import numpy as np
import pytest

import mooncake_kernels as mk
from mooncake_serving.compat.mooncake import TransferNotify, TransferOpcode

from .support import SIZE, UNTOUCHED, addressed, refused, untouched

READ, WRITE = TransferOpcode.Read, TransferOpcode.Write
BLOCK = 4096


def test_write_and_read_back_one_block(pair):
    engine, near, far = pair.near.engine, pair.near.address, pair.far.address
    assert engine.transfer_sync_write(pair.name, near + 8, far + 24, BLOCK) == 0
    expected = untouched(SIZE)
    expected[24 : 24 + BLOCK] = addressed(SIZE)[8 : 8 + BLOCK]
    pair.far.sees(expected)
    assert engine.transfer_sync_read(pair.name, near, far, 2 * BLOCK) == 0
    pair.near.sees(np.concatenate([expected[: 2 * BLOCK], addressed(SIZE)[2 * BLOCK :]]))


@pytest.mark.parametrize("notify", [None, TransferNotify("request 7", "done é")])
def test_transfer_sync(pair, notify):
    engine, near, far = pair.near.engine, pair.near.address, pair.far.address
    assert engine.transfer_sync(pair.name, near, far, SIZE, WRITE, notify) == 0
    pair.far.sees(addressed(SIZE))
    pair.near.memory[:] = UNTOUCHED
    assert engine.transfer_sync(pair.name, near, far, SIZE, READ, notify=notify) == 0
    pair.near.sees(addressed(SIZE))
    assert notifies(pair.far) == [notify] * 2 * (notify is not None)
    assert notifies(pair.far) == []


def notifies(far) -> list[TransferNotify]:
    return far.engine.get_notifies() if hasattr(far, "engine") else far.call("get_notifies")


FORMS = {
    "list": list,
    "tuple": tuple,
    "signed": np.array,
    "unsigned": lambda column: np.array(column, "<u8"),
    "objects": lambda column: np.array(column, object),
    "mixed": lambda column: [np.uint64(column[0]), *column[1:]],
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_blocks_in_any_order(pair, form, opcode):
    engine = pair.near.engine
    order = np.random.default_rng(0).permutation(SIZE // BLOCK)
    local = [pair.near.address + i * BLOCK for i in range(len(order))]
    remote = [pair.far.address + int(i) * BLOCK for i in order]
    columns = (form(local), form(remote), form([BLOCK] * len(order)))
    assert engine.batch_transfer_sync_write(pair.name, *columns) == 0
    scattered = addressed(SIZE).reshape(-1, BLOCK)[np.argsort(order)].reshape(-1)
    pair.far.sees(scattered)
    pair.near.memory[:] = UNTOUCHED
    if opcode == READ:
        assert engine.batch_transfer_sync_read(pair.name, *columns) == 0
        pair.near.sees(addressed(SIZE))
    pair.near.memory[:] = addressed(SIZE)[::-1]
    assert engine.batch_transfer_sync(pair.name, *columns, opcode, transport_hint="tcp") == 0
    if opcode == READ:
        pair.near.sees(addressed(SIZE))
    else:
        pair.far.sees(addressed(SIZE)[::-1].reshape(-1, BLOCK)[np.argsort(order)].reshape(-1))


def test_blocks_of_different_sizes_and_empty_batches(pair):
    engine, near, far = pair.near.engine, pair.near.address, pair.far.address
    sizes = [1, 0, 4097, 0, 65536]
    local = [near + i * 70000 for i in range(5)]
    remote = [far + i * 70000 for i in (4, 3, 2, 1, 0)]
    assert engine.batch_transfer_sync_write(pair.name, local, remote, sizes) == 0
    expected = untouched(SIZE)
    for source, target, size in zip(local, remote, sizes, strict=True):
        block = addressed(SIZE)[source - near :][:size]
        expected[target - far : target - far + size] = block
    pair.far.sees(expected)
    # No block at all: Mooncake says 0, and so does this, wherever the addresses point.
    assert engine.transfer_sync_write(pair.name, 0, 0, 0) == 0
    assert engine.batch_transfer_sync_read(pair.name, [], [], []) == 0
    assert engine.batch_transfer_sync_read(pair.name, np.array([]), (), []) == 0
    assert engine.batch_transfer_sync(pair.name, [], [], [], WRITE, TransferNotify("n", "m")) == 0
    assert notifies(pair.far) == [TransferNotify("n", "m")]


def test_4096_blocks_in_one_batch(pair):
    """Mooncake refuses more than about 2,050 of one batch over tcp."""
    engine, block, count = pair.near.engine, SIZE // 4096, 4096
    order = [i * 37 % count for i in range(count)]
    local = [pair.near.address + i * block for i in range(count)]
    remote = [pair.far.address + i * block for i in order]
    assert engine.batch_transfer_sync_write(pair.name, local, remote, [block] * count) == 0
    pair.far.sees(addressed(SIZE).reshape(count, block)[np.argsort(order)].reshape(-1))
    pair.near.memory[:] = UNTOUCHED
    assert engine.batch_transfer_sync_read(pair.name, local, remote, [block] * count) == 0
    pair.near.sees(addressed(SIZE))


def test_duplicate_target_in_a_batch_is_rejected(pair, caplog):
    engine, near, far = pair.near.engine, pair.near.address, pair.far.address
    reason = r"descriptors\[0\] and descriptors\[2\] must not overlap"
    columns = ([near] * 3, [far, far + 100, far + 99], [100, 100, 1])
    batch = engine.batch_transfer_sync_write
    refused(caplog, -1, reason, batch, pair.name, *columns)
    pair.far.sees(untouched(SIZE))


def test_remote_range_outside_registered_memory_is_refused(pair, caplog):
    engine, near, far = pair.near.engine, pair.near.address, pair.far.address
    reason = f"transfer with {pair.name}: .*not inside a registered region"
    for address, size in ((far + SIZE, 1), (far - 1, 2), (far + 1, SIZE), (0, 8), (2**64 - 8, 8)):
        for move in (engine.transfer_sync_write, engine.transfer_sync_read):
            refused(caplog, -1, reason, move, pair.name, near, address, size)
    batch = engine.batch_transfer_sync_write
    columns = ([near, near], [far, far + SIZE], [BLOCK, BLOCK])
    refused(caplog, -1, r"descriptors\[1\]", batch, pair.name, *columns)
    pair.far.sees(untouched(SIZE))  # not even the block that could be written
    assert engine.transfer_sync_write(pair.name, near, far, BLOCK) == 0


def test_local_range_outside_registered_memory_is_rejected(pair, caplog):
    engine, near, far = pair.near.engine, pair.near.address, pair.far.address
    for address, size in ((near + SIZE, 1), (near - 1, 2), (near, SIZE + 1), (0, 8)):
        for move in (engine.transfer_sync_write, engine.transfer_sync_read):
            refused(caplog, -1, "local range", move, pair.name, address, far, size)
    pair.far.sees(untouched(SIZE))


def test_wrong_arguments(pair, caplog):
    engine, near, far = pair.near.engine, pair.near.address, pair.far.address
    one, many = engine.transfer_sync_write, engine.batch_transfer_sync_write
    integers = "must be .*integer"
    for wrong in (-1, 2**64, "x", None, 1.5):
        refused(caplog, -1, integers, one, pair.name, wrong, far, 8)
        refused(caplog, -1, integers, one, pair.name, near, wrong, 8)
        refused(caplog, -1, "lengths must", one, pair.name, near, far, wrong)
    for wrong in (None, 8, {8}, "8", [[8]], ["8"], [None], [8.0], np.array([[8]]), np.array(8)):
        refused(caplog, -1, "must be|must not be", many, pair.name, wrong, [far], [8])
        refused(caplog, -1, "must be|must not be", many, pair.name, [near], wrong, [8])
        refused(caplog, -1, "must be|must not be", many, pair.name, [near], [far], wrong)
    refused(caplog, -1, "equally long, got 2, 1, 1", many, pair.name, [near] * 2, [far], [8])
    refused(caplog, -1, "equally long, got 1, 1, 0", many, pair.name, [near], [far], [])
    for name in ("nonsense", "", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:99999"):
        refused(caplog, -1, "name must", one, name, near, far, 8)
    refused(caplog, -1, "target_hostname must be a string", one, None, near, far, 8)
    refused(caplog, -1, "cannot resolve", one, "no.such.host.invalid:1", near, far, 8)
    for opcode in (1, "Write", None):
        blocks = (pair.name, near, far, 8, opcode)
        refused(caplog, -1, "opcode must be a TransferOpcode", engine.transfer_sync, *blocks)
    pair.far.sees(untouched(SIZE))


@pytest.mark.parametrize(
    "notify",
    ["text", TransferNotify("n", None), TransferNotify(b"n", "m"), TransferNotify("\ud800")],
)
def test_invalid_notification_moves_nothing(pair, caplog, notify):
    call, blocks = pair.near.engine.transfer_sync, (pair.near.address, pair.far.address, SIZE)
    refused(caplog, -1, "notify must be", call, pair.name, *blocks, WRITE, notify)
    pair.far.sees(untouched(SIZE))


def test_long_notifications(pair, caplog):
    call, blocks = pair.near.engine.transfer_sync, (pair.near.address, pair.far.address, SIZE)
    longest = TransferNotify("n" * 1000, "m" * (65536 - 12 - 1000))
    assert call(pair.name, *blocks, READ, longest) == 0
    assert notifies(pair.far) == [longest]
    longer = TransferNotify(longest.name, longest.msg + "m")
    reason = "notify must be at most 65536 bytes, got 65537"
    refused(caplog, -1, reason, call, pair.name, *blocks, WRITE, longer)
    pair.far.sees(untouched(SIZE))
    assert notifies(pair.far) == []


def test_notifications_from_a_native_peer(pair):
    with mk.TransferEngine() as other, other.open(f"127.0.0.1:{pair.near.port}") as peer:
        for payload in (b"\xff\0hello", b"", b"MKNOTIFY", b"MKNOTIFY\xff\xff\xff\xffab"):
            other.write(peer, [], notify=payload).wait()
        name = other.name
    assert pair.near.engine.get_notifies() == [
        TransferNotify(name, "\\xff\0hello"),
        TransferNotify(name, ""),
        TransferNotify(name, "MKNOTIFY"),
        TransferNotify("ab", ""),  # a name that is said to be longer than what came
    ]


def test_unregistered_memory_is_rejected(pair, caplog):
    engine, near, far = pair.near.engine, pair.near.address, pair.far.address
    assert engine.transfer_sync_write(pair.name, near, far, BLOCK) == 0
    assert engine.unregister_memory(near) == 0
    refused(caplog, -1, "local range", engine.transfer_sync_write, pair.name, near, far, BLOCK)
    assert engine.register_memory(near, SIZE) == 0
    assert engine.transfer_sync_write(pair.name, near, far, BLOCK) == 0


def test_engine_transfers_to_itself(pair):
    engine, near = pair.near.engine, pair.near.address
    name = f"127.0.0.1:{pair.near.port}"
    assert engine.transfer_sync_write(name, near, near + SIZE // 2, SIZE // 2) == 0
    pair.near.sees(np.tile(addressed(SIZE // 2), 2))
