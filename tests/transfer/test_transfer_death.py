"""Peers that die or stop, in separate processes."""

import signal

import numpy as np
import pytest

from mooncake_kernels import config
from mooncake_kernels.errors import TransferError
from mooncake_kernels.transfer import TransferEngine

from .support import (
    addressed,
    eventually,
    hang_up_after_hello,
    peer_process,
    raw_server,
    untouched,
)

PIECE = 4 << 20  # what is confirmed at once, or more
SIZE = 32 << 20


def error_of(ticket) -> TransferError | None:
    try:
        ticket.wait()
    except TransferError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("transport", "direction", "num_done"),
    [("shm", "write", 0), ("shm", "read", 4), ("tcp", "write", 4), ("tcp", "read", 0)],
)
def test_peer_killed_mid_transfer_fails_requests(transport, direction, num_done):
    with (
        config.override(transfer_lanes=1 if direction == "read" else 2),  # see one_lane
        TransferEngine(transports=[transport]) as engine,
        peer_process(SIZE) as other,
    ):
        region = engine.register(addressed(SIZE))
        with engine.open(other.name) as peer:
            assert peer.transport == transport
            row = (region.address, other.address, SIZE)
            tickets = [getattr(engine, direction)(peer, [row]) for _ in range(100)]
            eventually(lambda: all(ticket.done for ticket in tickets[:num_done]))
            other.signal(signal.SIGKILL)
            errors = [error for ticket in tickets if (error := error_of(ticket))]
            assert errors, "all were over before it was killed"
            for error in errors:
                assert error.peer == other.name
                assert error.cause in ("connection closed by peer", "connection refused")
                assert 0 <= error.num_bytes_done < error.num_bytes_total == SIZE
                assert error.num_bytes_done % PIECE == 0
            other.process.join()
            with pytest.raises(TransferError, match="connection refused"):
                engine.write(peer, [row]).wait()


@pytest.mark.parametrize("direction", ["write", "read"])
def test_stopped_peer_times_out_and_recovers(direction):
    with TransferEngine(transports=["tcp"]) as engine, peer_process(SIZE) as other:
        region = engine.register(addressed(SIZE))
        peer = engine.open(other.name)
        row = (region.address, other.address, SIZE)
        other.stop()
        with pytest.raises(TransferError) as caught:
            getattr(engine, direction)(peer, [row], deadline_s=0.2).wait()
        assert caught.value.cause == "deadline of 0.2 s passed"
        assert caught.value.num_bytes_done == 0
        with pytest.raises(TransferError, match=r"deadline of 0.1 s passed"):
            engine.open(other.name, deadline_s=0.1)
        other.signal(signal.SIGCONT)
        back = engine.register(untouched(SIZE))
        region._buffer.owner[:] = addressed(SIZE)  # whatever the read had brought
        engine.write(peer, [row]).wait()
        engine.read(peer, [(back.address, other.address, SIZE)]).wait()
        np.testing.assert_array_equal(back._buffer.owner, addressed(SIZE))


def test_shm_transfer_works_while_peer_is_stopped():
    with TransferEngine(transports=["shm"]) as engine, peer_process(SIZE) as other:
        region, back = engine.register(addressed(SIZE)), engine.register(untouched(SIZE))
        peer = engine.open(other.name)
        other.stop()
        engine.write(peer, [(region.address, other.address, SIZE)], deadline_s=20).wait()
        engine.read(peer, [(back.address, other.address, SIZE)], deadline_s=20).wait()
        np.testing.assert_array_equal(back._buffer.owner, addressed(SIZE))
        with pytest.raises(TransferError, match=r"deadline of 0.1 s passed"):
            engine.write(peer, [], notify=b"are you there?", deadline_s=0.1).wait()


def test_closing_does_not_wait_for_a_stopped_peer():
    with TransferEngine(transports=["tcp"]) as engine, peer_process(SIZE) as other:
        region = engine.register(addressed(SIZE))
        peer = engine.open(other.name)
        other.stop()
        ticket = engine.write(peer, [(region.address, other.address, SIZE)])
        region.close()
        engine.close()
        # Which of the two came first depends on whether the worker had taken the request up.
        with pytest.raises(
            TransferError, match=r"a region in use was closed|the engine was closed"
        ):
            ticket.wait()


def test_open_fails_with_connection_refused():
    with TransferEngine() as engine, pytest.raises(TransferError, match="connection refused"):
        engine.open("127.0.0.1:1")


def test_peer_closing_connection_fails_requests():
    with raw_server(hang_up_after_hello) as name, TransferEngine() as engine:
        region = engine.register(addressed(4096))
        peer = engine.open(name)
        for call in (engine.write, engine.read):
            with pytest.raises(TransferError, match="connection closed by peer"):
                call(peer, [(region.address, 1, 4096)]).wait()
