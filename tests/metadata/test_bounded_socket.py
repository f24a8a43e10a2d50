"""A socket that bounds the peer's answers in time and bytes, and detects its silence."""

import contextlib
import select
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mooncake_kernels.metadata import bounded_socket
from mooncake_kernels.metadata.bounded_socket import BoundedSocket

from .support import WAIT_S, make_certificate


@pytest.fixture
def sides():
    """Ours and theirs."""
    ours, theirs = socket.socketpair()
    yield BoundedSocket(ours), theirs
    ours.close()
    theirs.close()


def test_pending_bytes_and_the_end_are_not_quiet(sides):
    ours, theirs = sides
    assert ours.is_quiet()
    theirs.sendall(b"ab")
    assert not ours.is_quiet()
    ours.sendall(b"a question")
    assert ours.recv(100)[-1:] == b"b" and ours.is_quiet()
    theirs.close()
    assert not ours.is_quiet()


def test_a_closed_socket_is_not_quiet(sides):
    ours, _ = sides
    ours.close()
    assert not ours.is_quiet()


def test_tickets_of_tls_are_quiet(tmp_path):
    certificate, key = make_certificate(tmp_path)
    ours, theirs = socket.socketpair()
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    server.load_cert_chain(certificate, key)
    client.load_verify_locations(certificate)
    with ThreadPoolExecutor(1) as pool:
        wrapping = pool.submit(server.wrap_socket, theirs, server_side=True)
        encrypted = client.wrap_socket(ours, server_hostname="localhost")
        theirs = wrapping.result()
    with theirs, BoundedSocket(encrypted) as bounded:
        assert select.select([encrypted], [], [], WAIT_S)[0], "no ticket has come"
        assert bounded.is_quiet() and bounded.is_quiet()
        bounded.sendall(b"a question")
        assert theirs.recv(100) == b"a question"
        theirs.sendall(b"abc")
        assert bounded.recv(1) == b"a"
        assert not bounded.is_quiet(), "TLS has read ahead"
        assert bounded.recv(2) == b"bc" and bounded.is_quiet()
        theirs.sendall(b"d")
        assert not bounded.is_quiet()


@pytest.mark.usefixtures("impatient")
def test_trickling_bytes_time_out(sides):
    ours, theirs = sides

    def dribble():
        with contextlib.suppress(OSError):
            while True:
                theirs.sendall(b"x")
                time.sleep(0.01)

    thread = threading.Thread(target=dribble, daemon=True)
    thread.start()
    for _ in range(2):  # each answer has its own time
        ours.sendall(b"a question")
        received = 0
        with pytest.raises(TimeoutError, match="no whole answer within 0.4 s"):
            while True:
                received += len(ours.recv(100))
        assert received > 1
    ours.close()
    thread.join()


@pytest.mark.usefixtures("impatient")
def test_silent_peer_times_out(sides):
    with pytest.raises(TimeoutError, match="no whole answer within 0.4 s"):
        sides[0].recv(1)


@pytest.mark.usefixtures("impatient")
def test_send_to_a_peer_that_does_not_read_times_out(sides):
    with pytest.raises(TimeoutError):
        sides[0].sendall(bytes(64 << 20))


def test_oversized_answer_is_rejected(sides, monkeypatch):
    monkeypatch.setattr(bounded_socket, "MAX_BYTES", 10)
    ours, theirs = sides
    for _ in range(2):
        ours.sendall(b"a question")
        theirs.sendall(b"x" * 10)
        assert ours.recv(100) == b"x" * 10
    theirs.sendall(b"x")
    with pytest.raises(OSError, match="more than 10 bytes"):
        ours.recv(100)


def test_zero_timeout_does_not_block(sides):
    ours, theirs = sides
    ours.settimeout(0)
    with pytest.raises(BlockingIOError):
        ours.recv(1)
    theirs.sendall(b"a")
    assert ours.recv(1) == b"a"
