"""Connections: several at once, shared, failed, dead peers, peers that come back."""

import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from mooncake_serving.compat.mooncake import TransferNotify, TransferOpcode, names
from mooncake_serving.compat.mooncake.peers import MAX_LANES

from ..metadata.support import eventually, free_port
from .support import (
    SIZE,
    UNTOUCHED,
    WAIT_S,
    addressed,
    checked,
    in_threads,
    other_process,
    refused,
    side,
    untouched,
)

WRITE = TransferOpcode.Write


@pytest.fixture
def near(monkeypatch):
    monkeypatch.setenv("MC_TRANSFER_TIMEOUT", str(int(WAIT_S)))
    with side(addressed(SIZE)) as near:
        yield near


def lanes(engine, name: str):
    return engine._running().peers._lanes.get(name, [])


@pytest.mark.parametrize("count", [4, 32])
def test_threads_with_memory_of_their_own(near, count):
    part = SIZE // 32
    with other_process() as far:

        def run(index: int) -> None:
            local, remote = near.address + index * part, far.address + index * part
            mine = near.memory[index * part :][:part]
            for turn in range(20):
                mine[:] = (index * 7 + turn) % 251
                notify = TransferNotify(str(index), str(turn))
                assert near.engine.transfer_sync(far.name, local, remote, part, WRITE, notify) == 0
                mine[:] = UNTOUCHED
                half = part // 2
                columns = ([local, local + half], [remote, remote + half], [half, half])
                if turn % 2:
                    assert near.engine.batch_transfer_sync_read(far.name, *columns) == 0
                else:
                    batch_id = near.engine.batch_transfer_async_read(far.name, *columns)
                    assert near.engine.get_batch_transfer_status([batch_id]) == 0
                assert (mine == (index * 7 + turn) % 251).all()

        in_threads(count, run)
        assert 1 <= len(lanes(near.engine, far.name)) <= MAX_LANES
        assert all(lane.num_users == 0 for lane in lanes(near.engine, far.name))
        told = far.call("get_notifies")
        assert len(told) == 20 * count
        for index in range(count):
            mine = [notify.msg for notify in told if notify.name == str(index)]
            assert mine == [str(turn) for turn in range(20)]


def test_sequential_calls_share_one_connection(near):
    with other_process() as far:
        for _ in range(5):
            assert near.engine.transfer_sync_write(far.name, near.address, far.address, 8) == 0
        assert len(lanes(near.engine, far.name)) == 1
        batch_ids = [
            near.engine.transfer_submit_write(far.name, near.address, far.address, SIZE)
            for _ in range(3 * MAX_LANES)
        ]
        assert len(lanes(near.engine, far.name)) == MAX_LANES
        assert near.engine.get_batch_transfer_status(batch_ids) == 0
        assert all(lane.num_users == 0 for lane in lanes(near.engine, far.name))


def test_an_absent_peer(near, caplog):
    name = f"127.0.0.1:{free_port()}"
    write = near.engine.transfer_sync_write
    for _ in range(3):
        refused(caplog, -1, "connection refused", write, name, near.address, 1, 8)
    assert lanes(near.engine, name) == []
    assert in_threads(32, lambda _: write(name, near.address, 1, 8)) == [-1] * 32
    assert lanes(near.engine, name) == []


def test_peer_started_later_is_reached(near, caplog):
    name = f"127.0.0.1:{free_port()}"
    write = near.engine.transfer_sync_write
    refused(caplog, -1, "connection refused", write, name, near.address, 1, 8)
    with other_process(name) as far:
        assert far.name == name
        assert write(name, near.address, far.address, SIZE) == 0
        far.sees(addressed(SIZE))


def test_peer_is_killed_and_restarted(near, caplog):
    write = near.engine.transfer_sync_write
    with other_process(f"127.0.0.1:{free_port()}") as far:
        name, first_address = far.name, far.address
        # Several connections, so that the next call must not find another that is as stale.
        batch_ids = [
            near.engine.transfer_submit_write(name, near.address, far.address, SIZE)
            for _ in range(4)
        ]
        assert near.engine.get_batch_transfer_status(batch_ids) == 0
        assert len(lanes(near.engine, name)) > 1
        far.kill()
    with other_process(name) as far:
        assert far.name == name
        refused(
            caplog, -1, "the peer was restarted", write, name, near.address, first_address, SIZE
        )
        far.sees(untouched(SIZE))
        assert write(name, near.address, far.address, SIZE) == 0
        far.sees(addressed(SIZE))


@pytest.mark.parametrize("opcode", list(TransferOpcode))
def test_peer_killed_during_transfers_fails_all_calls(near, opcode):
    with other_process() as far:
        offsets = np.arange(4096)[::-1] * (SIZE // 4096)
        columns = (near.address + offsets, far.address + offsets, [SIZE // 4096] * 4096)

        def run(_: int) -> int:
            while (code := near.engine.batch_transfer_sync(far.name, *columns, opcode)) == 0:
                pass
            return code

        killer = threading.Timer(0.2, far.kill)
        killer.start()
        assert in_threads(4, run) == [-1] * 4
        killer.join()
        assert lanes(near.engine, far.name) == []
        assert near.engine.send_probe(far.name) == -102


@pytest.fixture
def over_tcp(monkeypatch):
    """By shared memory a transfer goes on although the peer is stopped."""
    monkeypatch.setitem(names._TRANSPORTS, "tcp", ("local", "tcp"))


def test_stopped_peer_times_out_every_call(over_tcp, caplog, monkeypatch):
    """Every kind of call ends at its time, and says so."""
    monkeypatch.setenv("MC_TRANSFER_TIMEOUT", "5")  # the shortest there is
    with side(addressed(SIZE)) as near, other_process() as far:
        block = (far.name, near.address, far.address, SIZE)
        assert near.engine.transfer_sync_write(*block) == 0
        far.stop()
        batch_id = near.engine.transfer_submit_write(*block)  # by the connection that is there
        assert near.engine.transfer_check_status(batch_id) == 0
        calls = (
            lambda: near.engine.transfer_sync_read(*block),
            lambda: near.engine.send_probe(far.name),
            lambda: checked(near.engine, batch_id),
        )
        assert in_threads(3, lambda index: calls[index]()) == [-1, -102, -2]
        assert caplog.text.count("s passed") == 3
        far.go_on()
        eventually(lambda: near.engine.transfer_sync_write(*block) == 0, "it does not go on")


def test_a_failed_call_does_not_end_concurrent_ones(caplog, monkeypatch):
    """The other's connections are closed when its own calls are over, not before."""
    monkeypatch.setenv("MC_TRANSFER_TIMEOUT", str(int(WAIT_S)))
    size = 128 * SIZE  # takes longer than the call that fails
    with side(addressed(size)) as near, other_process(num_bytes=size) as far:
        block = (far.name, [near.address], [far.address], [size])
        batch_ids = [near.engine.batch_transfer_async_write(*block) for _ in range(3)]
        before = list(lanes(near.engine, far.name))
        refused(
            caplog,
            -1,
            "not inside a registered region",
            near.engine.transfer_sync_write,
            *(far.name, near.address, far.address + size, 8),
        )
        assert lanes(near.engine, far.name) == []
        assert len(before) == 3 and not any(lane.peer.closed for lane in before)
        assert near.engine.get_batch_transfer_status(batch_ids) == 0
        assert all(lane.peer.closed for lane in before)
        far.sees(addressed(SIZE))  # its beginning
        assert near.engine.transfer_sync_write(far.name, near.address, far.address, SIZE) == 0
        assert len(lanes(near.engine, far.name)) == 1


def test_locally_rejected_call_keeps_the_connection(near, caplog):
    with other_process() as far:
        block = (far.name, near.address, far.address, 8)
        for _ in range(3):
            assert near.engine.transfer_sync_write(*block) == 0
            write = near.engine.transfer_sync_write
            refused(caplog, -1, "local range", write, far.name, 8, far.address, 8)
        [lane] = lanes(near.engine, far.name)
        assert lane.num_users == 0 and not lane.peer.closed


def test_ctrl_c_ends_the_transfer_but_not_a_concurrent_one(over_tcp, near, monkeypatch):
    """Both go by one connection: to give up one is not to close it."""
    monkeypatch.setattr(near.engine._state.peers, "_max_lanes", 1)
    half = SIZE // 2
    with other_process() as far:
        assert near.engine.transfer_sync_write(far.name, near.address, far.address, half) == 0
        near.memory[:] = UNTOUCHED
        far.stop()
        first = near.engine.batch_transfer_async_read(
            far.name, [near.address], [far.address], [half]
        )

        def interrupt_when_both_are_under_way():
            stats = near.engine.get_engine().stats
            eventually(lambda: stats()["peers"][far.name]["num_in_flight"] == 2, "not two")
            time.sleep(0.2)  # it waits, too
            signal.raise_signal(signal.SIGINT)

        interrupt = threading.Thread(target=interrupt_when_both_are_under_way)
        with pytest.raises(KeyboardInterrupt):
            interrupt.start()
            near.engine.transfer_sync_read(far.name, near.address + half, far.address + half, half)
        interrupt.join()
        near.memory[half:] = 0
        far.go_on()
        assert near.engine.get_batch_transfer_status([first]) == 0
        near.sees(np.concatenate([addressed(half), np.zeros(half, np.uint8)]))
        assert lanes(near.engine, far.name) == []


def test_slow_peer_does_not_delay_others(near):
    """While calls to a peer that does not answer wait, those to another go through."""
    with socket.create_server(("127.0.0.1", 0)) as silent, other_process() as far:
        silent_name = f"127.0.0.1:{silent.getsockname()[1]}"
        waiting = [
            threading.Thread(
                target=near.engine.transfer_sync_write, args=(silent_name, near.address, 1, 8)
            )
            for _ in range(2 * MAX_LANES)  # some share the opening of others
        ]
        for thread in waiting:
            thread.start()
        for _ in range(20):
            assert near.engine.transfer_sync_write(far.name, near.address, far.address, SIZE) == 0
        assert all(thread.is_alive() for thread in waiting)
        silent.close()  # resets the connections that it has not taken
        for thread in waiting:
            thread.join(WAIT_S)
        assert not any(thread.is_alive() for thread in waiting)
        assert lanes(near.engine, silent_name) == []


def test_close_wakes_waiting_threads(near):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent_name = f"127.0.0.1:{silent.getsockname()[1]}"
        codes = []
        waiting = [
            threading.Thread(
                target=lambda: codes.append(
                    near.engine.transfer_sync_write(silent_name, near.address, 1, 8)
                )
            )
            for _ in range(3)
        ]
        for thread in waiting:
            thread.start()
        while len(lanes(near.engine, silent_name)) < 3:
            time.sleep(0.001)
        near.engine.close()
        for thread in waiting:
            thread.join(WAIT_S)
        assert codes == [-1] * 3


def test_engine_recreated_under_one_name_is_not_confused(near):
    """An engine that comes and goes under one name, in this process."""
    for turn in range(5):
        memory = np.full(SIZE, turn, np.uint8)
        with side(memory) as far:
            name = f"127.0.0.1:{far.port}"
            assert near.engine.transfer_sync_read(name, near.address, far.address, SIZE) == 0
            near.sees(memory)
        assert near.engine.transfer_sync_read(name, near.address, far.address, SIZE) == -1


def test_a_forked_child_is_refused():
    program = (
        "import os, numpy as np\n"
        "from mooncake_serving.compat.mooncake import TransferEngine\n"
        "memory = np.zeros(4096, np.uint8)\n"
        "near, far = TransferEngine(), TransferEngine()\n"
        "def start(engine):\n"
        "    assert engine.initialize('127.0.0.1', 'P2PHANDSHAKE', 'tcp', '') == 0\n"
        "    assert engine.register_memory(memory.ctypes.data, 4096) == 0\n"
        "start(near), start(far)\n"
        "block = (f'localhost:{far.get_rpc_port()}', *[memory.ctypes.data] * 2, 8)\n"
        "assert near.transfer_sync_write(*block) == 0\n"
        "if os.fork() == 0:\n"
        "    code = near.transfer_sync_write(*block)\n"
        "    own = TransferEngine()\n"
        "    start(own)\n"
        "    os._exit(0 if (code, own.transfer_sync_write(*block)) == (-1, 0) else 1)\n"
        "assert os.waitstatus_to_exitcode(os.wait()[1]) == 0\n"
        "assert near.transfer_sync_write(*block) == 0\n"
    )
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert "a forked child must make its own" in ran.stderr
