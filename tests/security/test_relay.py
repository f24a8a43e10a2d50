"""Somebody in between who does not know the secret: gets nothing, by either form of it.

An engine is led to his address, by a forged entry of a metadata server or a name. He hands its
handshake on to another engine that knows the secret, and tries to go on in its place.
"""

import contextlib
import socket
import struct
import threading

import pytest

from mooncake_kernels.errors import TransferError
from mooncake_kernels.transfer import TransferEngine

from ..transfer.handshake import HELLO, TAIL, address_of, receive_exactly
from ..transfer.proxy import Proxy
from ..transfer.secret import NOT_ITS_ADDRESS, OURS, rejections
from ..transfer.support import (
    HEADER,
    RANGE,
    UNTOUCHED,
    WAIT_S,
    addressed,
    connect,
    raw_server,
    untouched,
)

SIZE = 4096
OTHER_ADDRESS = "the peer has dialled an address that is not this engine's (reached_at)"
FORGED = "a frame that is not the peer's own"
LIST, READ, WRITE = 13, 2, 1

forms = pytest.mark.parametrize("secret_only", [False, True])


def engine(secret_only: bool, **options) -> TransferEngine:
    options = {"transports": ["tcp"], **options}
    return TransferEngine(secret=OURS, secret_only=secret_only, **options)


class Between:
    """Hands on all that is said, and in the end tries to ask for the target's regions."""

    def __init__(self, target: str):
        self.target = target
        self.heard = b""

    def __call__(self, near: socket.socket) -> None:
        far = connect(self.target)
        with far:
            pumps = [
                threading.Thread(target=self.pump, args=ends, daemon=True)
                for ends in ((near, far, False), (far, near, True))
            ]
            for pump in pumps:
                pump.start()
            pumps[0].join(WAIT_S)  # the initiator has given up
            with contextlib.suppress(OSError):
                far.sendall(HEADER.pack(LIST, 0, 1, 0, 0))
            pumps[1].join(WAIT_S)

    def pump(self, source: socket.socket, sink: socket.socket, is_target: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if is_target:
                    self.heard += data
                with contextlib.suppress(OSError):
                    sink.sendall(data)


@forms
def test_relayed_handshake_is_rejected(secret_only):
    with engine(secret_only) as near, engine(secret_only) as far:
        region = far.register(untouched(SIZE))
        with raw_server(between := Between(far.name)) as name:
            with pytest.raises(TransferError, match=NOT_ITS_ADDRESS):
                near.open(name, deadline_s=WAIT_S)
        assert rejections(far) == {OTHER_ADDRESS: 1}
        assert struct.pack("<Q", region.address) not in between.heard


@forms
def test_handshake_reflected_to_its_sender_is_rejected(secret_only):
    with engine(secret_only) as near:
        region = near.register(untouched(SIZE))
        with raw_server(between := Between(near.name)) as name:
            with pytest.raises(TransferError, match="this engine itself answers"):
                near.open(name, deadline_s=WAIT_S)
        assert struct.pack("<Q", region.address) not in between.heard
        with near.open(near.name) as itself:  # deliberately
            assert len(near.regions(itself)) == 1


@forms
def test_reached_at_admits_forwarded_addresses(secret_only):
    """An engine that is reached otherwise, as by NAT, says so; with any spelling."""
    with Proxy("") as proxy, engine(secret_only) as near:
        port = proxy.name.rpartition(":")[2]
        with engine(secret_only, reached_at=[f"LocalHost:{port}"]) as far:
            proxy.target = far.name
            with near.open(f"localhost:{port}") as peer:
                assert near.regions(peer) == []
            with pytest.raises(TransferError, match=NOT_ITS_ADDRESS):
                near.open(proxy.name)
            with near.open(f"localhost:{far.name.rpartition(':')[2]}") as peer:
                assert near.regions(peer) == []


def test_tampered_hello_address_is_rejected():
    with engine(True) as near, engine(True) as far, Proxy(far.name) as proxy:
        reached, own = (name.replace(":", "/").encode() for name in (proxy.name, far.name))
        own = own[: len(reached)].ljust(len(reached), b"0")  # the sizes go with it
        changed = []

        def alter(data: bytes) -> bytes:
            if reached in data:
                changed.append(data)
            return data.replace(reached, own)

        proxy.alters = (alter, bytes)
        with pytest.raises(TransferError, match="the peer's secret is another"):
            near.open(proxy.name)
        assert changed


@pytest.fixture
def session():
    """Two engines that reach each other through a proxy, authenticated, without TLS."""
    with Proxy("") as proxy:
        with engine(True, reached_at=[proxy.name]) as far, engine(True) as near:
            proxy.target = far.name
            region, mine = far.register(untouched(SIZE)), near.register(addressed(SIZE))
            yield near, far, proxy, region, mine


def attack(proxy: Proxy, frame: bytes) -> None:
    """Says something in the place of the initiator, over its connection."""
    far = proxy.sockets[1]
    far.sendall(frame)


@pytest.mark.parametrize(
    "frame",
    [
        lambda address: HEADER.pack(LIST, 0, 2, 0, 0),
        lambda address: HEADER.pack(READ, 1, 2, 0, 64) + RANGE.pack(address, 64),
        lambda address: (
            HEADER.pack(WRITE, 1, 2, 0, 64) + RANGE.pack(address, 64) + bytes(48) + bytes(64)
        ),
    ],
)
def test_hijacked_session_cannot_write(session, frame):
    near, far, proxy, region, mine = session
    peer = near.open(proxy.name)
    assert len(near.regions(peer)) == 1
    attack(proxy, frame(region.address))
    assert rejections(far) == {FORGED: 1}
    assert (region._buffer.owner == UNTOUCHED).all()
    near.write(peer, [(mine.address, region.address, SIZE)]).wait()  # by another connection
    assert (region._buffer.owner == addressed(SIZE)).all()


def test_replayed_frame_is_rejected(session):
    near, far, proxy, region, mine = session
    peer = near.open(proxy.name)
    before = len(proxy.relays[0].up.passed)
    near.write(peer, [(mine.address, region.address, SIZE)]).wait()
    frame = next(
        bytes(relay.up.passed[before if relay is proxy.relays[0] else 0 :])
        for relay in proxy.relays
        if addressed(SIZE).tobytes() in relay.up.passed
    )
    region._buffer.owner[:] = UNTOUCHED
    attack(proxy, frame[-(64 + 64 + SIZE) :])
    assert rejections(far) == {FORGED: 1}
    assert (region._buffer.owner == UNTOUCHED).all()


@pytest.mark.parametrize("where", [8, 24, 64, 72])  # id, size; the range's address and size
def test_tampered_request_is_rejected(session, where):
    near, _far, proxy, region, mine = session
    peer = near.open(proxy.name)

    def alter(data: bytes) -> bytes:
        at = data.find(RANGE.pack(region.address, 64))
        if at < 64:
            return data
        at += where - 64
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    proxy.alters = (alter, bytes)
    proxy.cut()  # the next connection is altered
    with pytest.raises(TransferError):
        near.write(peer, [(mine.address, region.address, 64)], deadline_s=WAIT_S).wait()
    assert (region._buffer.owner == UNTOUCHED).all()


def test_tampered_response_is_rejected(session):
    """A refusal that is made a success, and a list of other regions."""
    near, _far, proxy, region, mine = session
    address = struct.pack("<Q", region.address)

    def alter(data: bytes) -> bytes:
        return data.replace(address, struct.pack("<Q", region.address + 1))

    proxy.alters = (bytes, alter)
    peer = near.open(proxy.name)
    with pytest.raises(TransferError, match=FORGED):
        near.regions(peer)

    def agree(data: bytes) -> bytes:
        return struct.pack("<II", 0, 0) + data[8:16] + struct.pack("<Q", 64) + data[24:64]

    proxy.alters = (bytes, lambda data: agree(data) if data[:4] == b"\1\0\0\0" else data)
    other = near.open(proxy.name)
    with pytest.raises(TransferError):
        near.write(other, [(mine.address, region.address + SIZE, 64)], deadline_s=WAIT_S).wait()


def test_traffic_with_a_secret_is_encrypted_by_default():
    with Proxy("") as proxy:
        with engine(False, reached_at=[proxy.name]) as far, engine(False) as near:
            proxy.target = far.name
            region, mine = far.register(untouched(SIZE)), near.register(addressed(SIZE))
            near.write(near.open(proxy.name), [(mine.address, region.address, SIZE)]).wait()
            assert (region._buffer.owner == addressed(SIZE)).all()
        for flow in (proxy.relays[0].up, proxy.relays[0].down):
            assert addressed(SIZE).tobytes()[:64] not in flow.passed
            assert b"MKTRNSFR" not in flow.passed


def test_hello_carries_the_dialled_address():
    """By hand: the addresses that a target compares."""
    heard = []

    def listen(connection):
        size = HELLO.unpack(receive_exactly(connection, HELLO.size))[2]
        receive_exactly(connection, size)
        tail = TAIL.unpack(receive_exactly(connection, TAIL.size))
        heard.append([receive_exactly(connection, tail[1]), receive_exactly(connection, tail[2])])

    with raw_server(listen) as name, engine(True) as near:
        port = name.rpartition(":")[2]
        with pytest.raises(TransferError):
            near.open(f"localhost:{port}", deadline_s=WAIT_S)
        with connect(name) as end:
            reached = address_of(end)
    assert heard[0] == [f"localhost:{port}".encode(), reached]
