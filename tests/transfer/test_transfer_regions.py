"""regions: what a peer reveals of its memory, to whom, and which answers are valid."""

import struct

import pytest

from mooncake_kernels.errors import InvalidArgument, TransferError
from mooncake_kernels.transfer import RemoteRegion, TransferEngine

from .handshake import Frames, answer, begin, begin_both, receive_exactly
from .secret import OURS, initiator
from .support import (
    ACK,
    HEADER,
    WAIT_S,
    connect,
    ended,
    engine_pair,
    peer_process,
    raw_server,
    untouched,
)

LIST = 13
ENTRY = struct.Struct("<QQII")  # address, num_bytes, rights, reserved
MAX_LISTED = 65536


@pytest.mark.parametrize("transport", ["local", "shm"])
def test_regions_are_listed_in_registration_order(transport):
    with engine_pair(transport) as pair:
        assert pair.near.regions(pair.peer) == []
        memory = untouched(4 * 4096)
        parts = [memory[i * 4096 :][:4096] for i in (2, 0, 3)]
        accesses = ["read", "read_write", "write"]
        held = [
            pair.far.register(part, access) for part, access in zip(parts, accesses, strict=True)
        ]
        expected = [RemoteRegion(one.address, 4096, one.access) for one in held]
        assert pair.near.regions(pair.peer) == expected
        held[0].close()
        held.append(pair.far.register(memory[4096:8192]))
        expected = [*expected[1:], RemoteRegion(held[-1].address, 4096, "read_write")]
        assert pair.near.regions(pair.peer) == expected


def test_regions_of_another_process():
    with TransferEngine() as engine, peer_process(4096) as other:
        [region] = engine.regions(engine.open(other.name))
        assert region == RemoteRegion(other.address, 4096, "read_write")


def test_regions_are_hidden_from_strangers_over_tcp(tcp_pair):
    there = tcp_pair.far.register(untouched(64))
    with pytest.raises(TransferError, match="regions are listed only to peers with the"):
        tcp_pair.near.regions(tcp_pair.peer)
    here = tcp_pair.near.register(untouched(64))
    tcp_pair.near.write(tcp_pair.peer, [(here.address, there.address, 64)]).wait()


def test_regions_are_listed_over_tcp_with_the_secret():
    with (
        TransferEngine(secret=OURS) as far,
        TransferEngine(secret=OURS, transports=["tcp"]) as near,
        near.open(far.name) as peer,
    ):
        there = far.register(untouched(64), "write")
        assert near.regions(peer) == [RemoteRegion(there.address, 64, "write")]


def test_list_request_wire_format():
    """As docs/internals/wire.md says; refused, the connection stays good."""
    with TransferEngine() as engine, connect(engine.name) as connection:
        begin(connection)
        for request_id in (1, 2):
            connection.sendall(HEADER.pack(LIST, 0, request_id, 0, 0))
            status, refusal_bytes, answered, num_bytes = ACK.unpack(
                receive_exactly(connection, ACK.size)
            )
            assert (status, answered, num_bytes) == (1, request_id, 0)
            assert b"regions are listed only to" in receive_exactly(connection, refusal_bytes)
    with initiator(OURS) as engine, connect(engine.name) as connection:
        region = engine.register(untouched(100))
        frames = Frames(OURS, *(hello.packed() for hello in begin_both(connection, OURS)))
        connection.sendall(frames.signed(HEADER.pack(LIST, 0, 9, 0, 0)))
        ack = receive_exactly(connection, ACK.size)
        assert ACK.unpack(ack) == (0, 0, 9, ENTRY.size)
        entry = receive_exactly(connection, ENTRY.size)
        assert frames.acknowledged(ack, entry)
        assert ENTRY.unpack(entry) == (region.address, 100, 6, 0)


@pytest.mark.parametrize("header", [(LIST, 1, 1, 0, 0), (LIST, 0, 1, 0, 1)])
def test_malformed_list_request_ends_the_connection(header):
    with initiator(OURS) as engine, connect(engine.name) as connection:
        frames = Frames(OURS, *(hello.packed() for hello in begin_both(connection, OURS)))
        connection.sendall(frames.signed(HEADER.pack(*header)))
        assert ended(connection)


@pytest.mark.parametrize(
    "said, cause",
    [
        (ACK.pack(0, 0, 1, 25), "answer of 25 bytes"),
        (ACK.pack(0, 0, 1, (MAX_LISTED + 1) * ENTRY.size), "answer of 1572888 bytes"),
        (ACK.pack(0, 0, 1, 2**64 - 8), "answer of 18446744073709551608 bytes"),
        (ACK.pack(0, 0, 2, 0), "ack of request 2 instead of 1"),
        (ACK.pack(0, 5, 1, 0), "ack of 0 bytes"),
        (ACK.pack(7, 0, 1, 0), "ack with status 7"),
        (ACK.pack(1, 0, 1, 0), "malformed refusal"),
        (ACK.pack(1, 3, 1, 0) + b"n\0o", "n\\?o"),
        (ACK.pack(0, 0, 1, 24) + ENTRY.pack(4096, 0, 6, 0), "malformed region"),
        (ACK.pack(0, 0, 1, 24) + ENTRY.pack(2**64 - 8, 9, 6, 0), "malformed region"),
        (ACK.pack(0, 0, 1, 24) + ENTRY.pack(4096, 1, 0, 0), "malformed region"),
        (ACK.pack(0, 0, 1, 24) + ENTRY.pack(4096, 1, 7, 0), "malformed region"),
        (ACK.pack(0, 0, 1, 48) + ENTRY.pack(4096, 1, 6, 0), "connection closed by peer"),
        (b"", "connection closed by peer"),
    ],
)
def test_invalid_region_lists_are_rejected(said, cause):
    def behave(connection):
        answer(connection)
        connection.recv(HEADER.size)  # of the connection that asks; the other one just closes
        connection.sendall(said)
        connection.close()

    with raw_server(lambda connection: behave(connection)) as name, TransferEngine() as engine:
        with pytest.raises(TransferError, match=cause):
            ask_beside(engine, name)


def ask_beside(engine: TransferEngine, name: str) -> list[RemoteRegion]:
    """``raw_server`` serves one connection after the other: the peer's own has to be over."""
    peer = engine._engine.open(name, name, 0, WAIT_S)
    engine._engine.close_peer(peer)
    return [RemoteRegion(*row[:2], "read") for row in engine._engine.list_regions(peer, WAIT_S)]


def test_longest_accepted_list():
    entries = b"".join(ENTRY.pack(4096 * (i + 1), 1, 2, 77) for i in range(MAX_LISTED))

    def behave(connection):
        answer(connection)
        if connection.recv(HEADER.size):
            connection.sendall(ACK.pack(0, 0, 1, len(entries)) + entries)
            connection.recv(1)

    with raw_server(behave) as name, TransferEngine() as engine:
        assert len(ask_beside(engine, name)) == MAX_LISTED


def test_regions_beyond_the_list_limit_are_cut_off():
    """By their number: of the first that many, all are there."""
    count = 5000  # more than a control page has
    with TransferEngine() as far, TransferEngine(transports=["shm"]) as near:
        memory = untouched(count)
        for i in range(count):
            far.register(memory[i : i + 1])
        with near.open(far.name) as peer:
            listed = near.regions(peer)
        assert [one.address for one in listed] == [memory.ctypes.data + i for i in range(count)]


def test_invalid_arguments_are_rejected(pair):
    with pytest.raises(InvalidArgument, match="regions: peer must be a Peer"):
        pair.near.regions(pair.far.name)
    with pytest.raises(InvalidArgument, match="regions: deadline_s must be"):
        pair.near.regions(pair.peer, deadline_s=0)
    pair.peer.close()
    with pytest.raises(InvalidArgument, match="regions: peer must be open"):
        pair.near.regions(pair.peer)
