"""A metadata server answers everyone while one client floods it with requests that never end."""

import contextlib
import dataclasses
import socket

import pytest

from mooncake_kernels.metadata import server
from mooncake_kernels.metadata.server import MetadataServer

from .http_support import WAIT_S, answer, connected, eventually, is_closed, silent, status

GET = b"GET /metadata?key=a HTTP/1.1\r\nHost: localhost\r\n\r\n"
PUT = b"PUT /metadata?key=a HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
FOREVER = dataclasses.replace(server.LIMITS, headers_s=3600, body_s=3600, answer_s=3600)


def serving(**limits):
    return MetadataServer("127.0.0.1", 0, limits=dataclasses.replace(FOREVER, **limits))


def port_of(running: MetadataServer) -> int:
    return int(running.url.rpartition(":")[2].partition("/")[0])


@pytest.mark.parametrize("start", [b"", b"G", GET[:-2], PUT % 9 + b"x"])
def test_flood_does_not_delay_other_requests(start):
    """Neither those of another address nor those of its own."""
    with serving() as running:
        port = port_of(running)
        with silent(port, 3 * FOREVER.per_address, start) as flood:
            for source in ("127.0.0.1", "127.0.0.2"):
                assert status(port, PUT % 1 + b"x", source) == 200
                assert status(port, GET, source) == 200
            assert is_closed(flood[0]), "the oldest one goes"


def test_one_address_cannot_evict_connections_of_others():
    with serving(connections=8, per_address=4) as running:
        port = port_of(running)
        with connected(port, "127.0.0.3") as slow:
            slow.sendall(GET[:-2])
            with silent(port, 20, b"G"), silent(port, 20, b"G", "127.0.0.2"):
                slow.sendall(GET[-2:])  # it came first, and was alone
                assert b" 404 " in slow.makefile("rb").readline()


@pytest.mark.parametrize("start", [b"", b"G", GET[:-2], PUT % 9 + b"x"])
def test_incomplete_requests_time_out(start):
    with serving(headers_s=0.1, body_s=0.1) as running, silent(port_of(running), 4, start) as held:
        assert all(map(is_closed, held))
        assert status(port_of(running), GET) == 404


def test_client_that_does_not_read_times_out():
    with serving(answer_s=0.1) as running:
        running.values.put("a", bytes(32 << 20), 60, None, False)
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.settimeout(WAIT_S)
            reader.connect(("127.0.0.1", port_of(running)))
            reader.sendall(GET)
            assert reader.recv(1) == b"H"
            is_empty = lambda: not running._server._admission._all  # noqa: E731
            eventually(is_empty, "it waits for who does not read")
            num_bytes = 0
            with contextlib.suppress(ConnectionResetError):
                while part := reader.recv(1 << 20):
                    num_bytes += len(part)
            assert num_bytes < 32 << 20


def test_memory_of_incomplete_bodies_is_bounded():
    limit, size = 1 << 20, 16 << 10
    with serving(held_bytes=2 * limit, held_per_address=limit + size // 2) as running:
        port, put = port_of(running), PUT % size + bytes(size)
        with silent(port, 1, PUT % (4 * limit) + bytes(limit)):
            eventually(lambda: status(port, put) == 503, "it holds more than it may")
            assert b"too much memory" in answer(port, put)
            assert status(port, put, "127.0.0.2") == 200
        eventually(lambda: status(port, put) == 200, "it does not forget a request that is gone")


def test_server_stops_despite_silent_clients():
    running = serving()
    with silent(port_of(running), 10, PUT % 9 + b"x") as held:
        running.close()
        assert len(held) == 10
