"""Asynchronous transfers, whose results are queried later by their ids."""

import numpy as np
import pytest

from mooncake_serving.compat.mooncake import TransferOpcode

from .support import SIZE, UNTOUCHED, addressed, checked, in_threads, refused, untouched

BLOCK = SIZE // 16


def blocks(pair):
    local = [pair.near.address + i * BLOCK for i in range(16)]
    remote = [pair.far.address + i * BLOCK for i in range(16)]
    return pair.name, local, remote, [BLOCK] * 16


@pytest.mark.parametrize("wait", ["check", "status"])
def test_write_and_read(pair, wait):
    engine = pair.near.engine

    def finish(*batch_ids):
        assert all(batch_id > 0 for batch_id in batch_ids)
        if wait == "check":
            assert [checked(engine, batch_id) for batch_id in batch_ids] == [1] * len(batch_ids)
        else:
            assert engine.get_batch_transfer_status([*batch_ids]) == 0

    finish(engine.batch_transfer_async_write(*blocks(pair)))
    pair.far.sees(addressed(SIZE))
    pair.near.memory[:] = UNTOUCHED
    finish(engine.batch_transfer_async_read(*blocks(pair)))
    pair.near.sees(addressed(SIZE))
    pair.near.memory[:] = addressed(SIZE)[::-1]
    finish(engine.batch_transfer_async(*blocks(pair), TransferOpcode.Write))
    pair.far.sees(addressed(SIZE)[::-1])
    pair.near.memory[:] = addressed(SIZE)
    name, local, remote, sizes = blocks(pair)
    rows = zip(local, remote, sizes, strict=True)
    finish(*[engine.transfer_submit_write(name, *row) for row in rows])
    pair.far.sees(addressed(SIZE))
    pair.near.memory[:] = UNTOUCHED
    finish(engine.batch_transfer_async(*blocks(pair), TransferOpcode.Read))
    pair.near.sees(addressed(SIZE))


def test_many_concurrent_batches_have_distinct_ids(pair):
    engine = pair.near.engine
    ids = []
    for name, local, remote, size in [
        (pair.name, pair.near.address + i * 64, pair.far.address + i * 64, 64) for i in range(500)
    ]:
        ids.append(engine.batch_transfer_async_write(name, [local], [remote], [size]))
    assert len(set(ids)) == 500
    assert engine.get_batch_transfer_status(ids) == 0
    expected = untouched(SIZE)
    expected[: 500 * 64] = addressed(SIZE)[: 500 * 64]
    pair.far.sees(expected)


def test_empty_batches_complete(pair):
    engine = pair.near.engine
    assert engine.get_batch_transfer_status([]) == 0
    assert engine.get_batch_transfer_status(np.array([], np.int64)) == 0
    batch_id = engine.batch_transfer_async_write(pair.name, [], [], [])
    assert engine.transfer_check_status(batch_id) == 1
    batch_id = engine.transfer_submit_write(pair.name, 0, 0, 0)
    assert engine.get_batch_transfer_status((batch_id,)) == 0


def test_transfers_that_cannot_begin(pair, caplog):
    engine, (name, local, remote, sizes) = pair.near.engine, blocks(pair)
    for call in (engine.batch_transfer_async_write, engine.batch_transfer_async_read):
        refused(caplog, 0, "equally long", call, name, local, remote, sizes[1:])
        refused(caplog, 0, "local range", call, name, [8], remote[:1], [8])
        refused(caplog, 0, "connection refused", call, "127.0.0.1:1", local, remote, sizes)
    call = engine.batch_transfer_async
    refused(caplog, 0, "opcode must be", call, name, local, remote, sizes, 0)
    call = engine.transfer_submit_write
    refused(caplog, 0, "connection refused", call, "127.0.0.1:1", local[0], remote[0], 8)
    refused(caplog, 0, "local range", call, name, 8, remote[0], 8)


@pytest.mark.parametrize("opcode", [TransferOpcode.Read, TransferOpcode.Write])
def test_transfers_that_fail_midway(pair, caplog, opcode):
    engine, outside = pair.near.engine, ([pair.near.address], [pair.far.address + SIZE], [8])
    begin = engine.batch_transfer_async
    for _ in range(2):  # the second over a new connection
        batch_id = begin(pair.name, *outside, opcode)
        assert batch_id > 0
        assert checked(engine, batch_id) == -1
        assert "transfer_check_status: transfer with" in caplog.text
        assert "not inside a registered region" in caplog.text
    good, bad = begin(*blocks(pair), opcode), begin(pair.name, *outside, opcode)
    refused(caplog, -1, "not inside a registered", engine.get_batch_transfer_status, [bad, good])
    refused(caplog, -1, "under way, got", engine.transfer_check_status, good)  # used up
    assert engine.get_batch_transfer_status([begin(*blocks(pair), opcode)]) == 0
    pair.far.sees(addressed(SIZE) if opcode == TransferOpcode.Write else untouched(SIZE))


def test_unknown_ids(pair, caplog):
    engine = pair.near.engine
    batch_id = engine.batch_transfer_async_write(*blocks(pair))
    assert checked(engine, batch_id) == 1
    for wrong in (batch_id, 0, 10**6, -1, "x", None, 1.5, [1]):
        refused(caplog, -1, "batch_id must be", engine.transfer_check_status, wrong)
        refused(caplog, -1, "batch_id must be", engine.get_batch_transfer_status, [wrong])
    refused(caplog, -1, "batch_ids must be a list", engine.get_batch_transfer_status, batch_id)
    batch_id = engine.batch_transfer_async_write(*blocks(pair))
    refused(caplog, -1, "got 0", engine.get_batch_transfer_status, [0, batch_id])
    pair.far.sees(addressed(SIZE))  # it has waited for the other one


def test_only_one_thread_collects_a_batch_result(pair, caplog):
    engine = pair.near.engine
    results = []
    for _ in range(20):
        batch_id = engine.batch_transfer_async_write(*blocks(pair))
        results += in_threads(4, lambda _, i=batch_id: checked(engine, i))
    assert results.count(1) == 20 and results.count(-1) == 60


def test_close_with_batches_in_flight(pair, caplog):
    engine = pair.near.engine
    batch_ids = [engine.batch_transfer_async_write(*blocks(pair)) for _ in range(50)]
    engine.close()
    # Transfers that had ended stay ended; no one waits for the others.
    assert engine.get_batch_transfer_status(batch_ids) in (0, -1)
    refused(caplog, -1, "under way", engine.get_batch_transfer_status, batch_ids[:1])
