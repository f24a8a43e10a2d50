"""Connections that do not identify themselves: they end, and do not take the place of others."""

import contextlib
import socket
import threading
from functools import partial

import pytest

from mooncake_kernels.errors import TransferError
from mooncake_kernels.transfer import TransferEngine

from ..threads import in_threads
from .handshake import Hello, hear_hello
from .secret import OURS, initiator, rejections
from .support import WAIT_S, addressed, ended, untouched

OF_ONE_HOST = 128


def connect_from(host: str, name: str) -> socket.socket:
    """Linux takes all of 127.0.0.0/8 for its own, so one machine can be many hosts."""
    target, port = name.rsplit(":", 1)
    return socket.create_connection((target, int(port)), WAIT_S, source_address=(host, 0))


@contextlib.contextmanager
def strangers(host: str, name: str, count: int):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(connect_from(host, name)) for _ in range(count)]


def test_strangers_of_one_host_leave_room_for_others():
    with initiator(OURS) as far, initiator(OURS) as near:
        mine, theirs = near.register(addressed(64)), far.register(untouched(64))
        row = (mine.address, theirs.address, 64)
        peer = near.open(far.name)
        with strangers("127.0.0.2", far.name, OF_ONE_HOST) as first:
            for connection in first[40:]:  # these may stay longer than those that say nothing
                connection.sendall(Hello(flags=1).packed())
                hear_hello(connection)
            with strangers("127.0.0.2", far.name, 5):
                assert all(ended(connection) for connection in first[:5])
                assert set(rejections(far, 5)) <= {"too many strangers", "deadline of 2 s passed"}
                for connection in first[40:]:
                    connection.setblocking(False)
                    with pytest.raises(BlockingIOError):  # still waited for
                        connection.recv(1)
                with strangers("127.0.0.3", far.name, OF_ONE_HOST // 2):
                    near.write(peer, [row]).wait()
                    for _ in range(20):  # they come and go, and are counted only while here
                        near.open(far.name).close()


def test_stalled_handshakes_time_out():
    """After 2 s: silent; after 10 s: in the middle of a Hello, before the proof, slowly fed."""
    in_threads(*(partial(stall_with, secret) for secret in (OURS, None)))  # which wait together


def stall_with(secret: bytes | None) -> None:
    options = {"secret": secret, "secret_only": True} if secret else {}
    with TransferEngine(**options) as engine, contextlib.ExitStack() as stack:
        hello = Hello(flags=1 if secret else 0).packed()
        beginnings = [b"", hello[:1], hello[:24], hello[:-1]] + ([hello] if secret else [])
        connections = []
        for beginning in beginnings:
            connection = stack.enter_context(connect_from("127.0.0.2", engine.name))
            connection.sendall(beginning)
            connections.append(connection)
        if secret:
            hear_hello(connections[-1])
        dripping = stack.enter_context(connect_from("127.0.0.2", engine.name))
        stop = threading.Event()

        def drip():
            with contextlib.suppress(OSError):
                for byte in hello * 10:
                    dripping.sendall(bytes([byte]))
                    if stop.wait(0.2):
                        return

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        assert all(ended(connection) for connection in connections)
        with contextlib.suppress(OSError):
            while dripping.recv(1 << 10):
                pass
        stop.set()
        thread.join(WAIT_S)
        assert engine.rejections()["deadline of 2 s passed"] == 1
        assert engine.rejections()["deadline of 10 s passed"] >= len(connections) - 1


def test_an_engine_closes_among_strangers():
    engine = TransferEngine(secret=OURS)
    with engine, strangers("127.0.0.2", engine.name, 50) as connections:
        for number, connection in enumerate(connections):
            connection.sendall(Hello(flags=1).packed()[:number])
        engine.close()
        assert all(ended(connection) for connection in connections)


def test_rejected_stranger_does_not_block_the_engine():
    """He may read why; but neither staying nor sending on keeps the engine busy."""
    with TransferEngine(secret=OURS) as engine, connect_from("127.0.0.2", engine.name) as stranger:
        stranger.sendall(Hello().packed())
        with contextlib.suppress(OSError):
            while True:
                stranger.sendall(bytes(1 << 16))
        with TransferEngine(transports=["tcp"]) as other, pytest.raises(TransferError):
            other.open(engine.name)
        assert rejections(engine, 2) == {"the peer has no secret": 2}
