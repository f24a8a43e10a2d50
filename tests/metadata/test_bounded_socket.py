"""A socket that bounds the peer's answers in time and bytes."""

import contextlib
import socket
import threading
import time

import pytest

from mooncake_kernels.metadata import bounded_socket
from mooncake_kernels.metadata.bounded_socket import BoundedSocket


@pytest.fixture
def sides():
    """Ours and theirs."""
    ours, theirs = socket.socketpair()
    yield BoundedSocket(ours), theirs
    ours.close()
    theirs.close()


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
