"""TLS: peers in the middle, peers that send garbage or stall."""

import contextlib
import socket
import ssl
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_kernels.errors import TransferError
from mooncake_kernels.transfer import Tls, TransferEngine

from .proxy import Proxy
from .support import (
    UNTOUCHED,
    WAIT_S,
    addressed,
    connect,
    ended,
    raw_server,
    send_last,
    untouched,
)
from .tls import SECRET, client_context, engines, tls_server

SIZE = 1 << 20


class Relaying:
    """Ends TLS with a certificate of its own on one side, and begins it anew on the other."""

    def __init__(self, target: str, files: dict):
        self.target, self.files, self.seen = target, files, bytearray()

    def __call__(self, connection: socket.socket) -> None:
        upstream = client_context().wrap_socket(connect(self.target))
        down = threading.Thread(target=self.hand_on, args=(upstream, connection), daemon=True)
        down.start()
        self.hand_on(connection, upstream)
        down.join(WAIT_S)

    def hand_on(self, source: ssl.SSLSocket, sink: ssl.SSLSocket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def test_secret_is_bound_to_the_tls_session(ca, other_ca):
    """Without a CA somebody in the middle is not noticed, unless there is a secret."""
    tls, theirs = Tls(**ca.issue("bare")), other_ca.issue("middle")
    with engines(tls, tls) as (near, far):
        with tls_server(theirs, relaying := Relaying(far.name, theirs)) as middle:
            near.open(middle).close()
        assert b"MKTRNSFR" in relaying.seen  # and reads along
    with engines(tls, tls, secret=SECRET) as (near, far):
        near.open(far.name).close()
        with tls_server(theirs, relaying := Relaying(far.name, theirs)) as middle:
            with pytest.raises(TransferError, match="the peer's secret is another"):
                near.open(middle)
        assert b"MKTRNSFR" in relaying.seen
        assert far.rejections() == {"the peer's secret is another": 1}


def client_hello() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        client_context().wrap_bio(incoming, outgoing).do_handshake()
    return outgoing.read()


@pytest.mark.parametrize("num_bytes", [0, 1, 5, 100])
def test_an_engine_closes_next_to_a_stalled_one(node, num_bytes):
    with TransferEngine(tls=node) as engine, connect(engine.name) as connection:
        connection.sendall(client_hello()[:num_bytes])
        with TransferEngine(transports=["tcp"], tls=node) as other:
            other.open(engine.name).close()  # others are served
        engine.close()
        assert ended(connection)


@given(data=st.binary(max_size=300))
@settings(max_examples=15, deadline=None)
def test_garbage_to_the_server(node, data):
    with TransferEngine(tls=node) as engine, connect(engine.name) as connection:
        send_last(connection, b"\x16" + data)
        with contextlib.suppress(OSError):
            while connection.recv(1 << 10):  # an alert
                pass
        with TransferEngine(transports=["tcp"], tls=node) as other:
            other.open(engine.name).close()


@given(data=st.binary(max_size=300))
@settings(max_examples=15, deadline=None)
def test_garbage_to_the_client(node, data):
    def behave(connection):
        connection.recv(1)
        send_last(connection, data)

    with raw_server(behave) as name, TransferEngine(transports=["tcp"], tls=node) as engine:
        with pytest.raises(TransferError):
            engine.open(name, deadline_s=WAIT_S)


def test_garbage_after_handshake_ends_the_connection(node):
    """What comes behind the handshake and is no record of TLS ends the connection."""
    with engines(node, node) as (near, far):
        theirs, mine = far.register(untouched(SIZE)), near.register(addressed(SIZE))
        spoiled = threading.Event()

        def spoil(data: bytes) -> bytes:
            return bytes(byte ^ 1 for byte in data) if spoiled.is_set() else data

        with Proxy(far.name, alter_up=spoil) as proxy:
            peer = near.open(proxy.name)
            spoiled.set()
            with pytest.raises(TransferError):
                near.write(peer, [(mine.address, theirs.address, SIZE)]).wait()
        assert (theirs._buffer.owner == UNTOUCHED).all()


def test_cut_connection_is_retried_over_another(node):
    """Without TLS's own goodbye, in the middle of a batch: what it carried goes over another."""
    with engines(node, node) as (near, far):
        theirs, mine = far.register(untouched(SIZE)), near.register(addressed(SIZE))
        with Proxy(far.name) as proxy:
            peer = near.open(proxy.name)
            flow = proxy.relays[0].up
            flow.hold(SIZE // 2)
            ticket = near.write(peer, [(mine.address, theirs.address, SIZE)])
            flow.wait(lambda flow: len(flow.passed) == flow.limit)
            proxy.cut()
            ticket.wait()
            assert (theirs._buffer.owner == addressed(SIZE)).all()
