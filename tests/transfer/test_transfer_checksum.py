"""checksum=True: the data is compared at both ends, and differences are reported."""

import struct
import threading

import numpy as np
import pytest

from mooncake_kernels.errors import FailureKind, InvalidArgument, TransferError
from mooncake_kernels.transfer import TransferEngine

from .handshake import answer, begin, receive_exactly
from .proxy import Proxy
from .support import (
    ACK,
    HEADER,
    RANGE,
    WRITE,
    ZEROS,
    addressed,
    connect,
    ended,
    eventually,
    raw_server,
    untouched,
)

VERIFY_WRITE, VERIFY_READ = 15, 16
MARK = bytes(range(200, 232))  # 32 bytes that occur once
FLIPPED = MARK[:7] + bytes([MARK[7] ^ 4]) + MARK[8:]


@pytest.mark.parametrize("verb", ["write", "read"])
@pytest.mark.parametrize("size", [1, 4096, 1 << 20, (40 << 20) + 3])
def test_checksummed_transfer_delivers_the_same_data(pair, verb, size):
    near, far = pair.regions(addressed(size), untouched(size))
    if verb == "read":
        near._buffer.owner[:], far._buffer.owner[:] = untouched(size), addressed(size)
    rows = [(near.address, far.address, size)]
    getattr(pair.near, verb)(pair.peer, rows, checksum=True, notify=b"done").wait()
    np.testing.assert_array_equal(near._buffer.owner, far._buffer.owner)
    assert pair.far.receive_notifications(20.0) == [(pair.near.name, b"done")]


@pytest.mark.parametrize("verb", ["write_blocks", "read_blocks"])
def test_blocks_of_several_parts(pair, verb):
    count, size = 9000, 40
    near, far = pair.regions(addressed(count * size), untouched(count * size))
    order = np.random.default_rng(3).permutation(count) * size
    local, remote = near.address + order, far.address + order[::-1]
    getattr(pair.near, verb)(pair.peer, local, remote, size, checksum=True).wait()
    here = near._buffer.owner.reshape(-1, size)[order // size]
    there = far._buffer.owner.reshape(-1, size)[order[::-1] // size]
    np.testing.assert_array_equal(here, there)


@pytest.mark.parametrize("access", ["write", "read"])
def test_access_for_transfer_suffices_for_checksum(pair, access):
    memory = addressed(4096)
    far = pair.far.register(addressed(4096), access)
    near = pair.near.register(memory)
    move = pair.near.write if access == "write" else pair.near.read
    move(pair.peer, [(near.address, far.address, 4096)], checksum=True).wait()


def flip(data: bytes) -> bytes:
    return data.replace(MARK, FLIPPED)


@pytest.mark.parametrize("verb", ["write", "read"])
def test_flipped_byte_in_transit_is_detected(verb):
    ours, theirs = untouched(4096), untouched(4096)
    source = ours if verb == "write" else theirs
    source[1000 : 1000 + len(MARK)] = np.frombuffer(MARK, np.uint8)
    alters = (flip, bytes) if verb == "write" else (bytes, flip)
    with (
        TransferEngine(transports=["tcp"]) as near,
        TransferEngine() as far,
        Proxy(far.name, *alters) as proxy,
    ):
        here, there = near.register(ours), far.register(theirs)
        peer = near.open(proxy.name)
        rows = [(here.address + at, there.address + at, 100) for at in range(0, 2000, 200)]
        getattr(near, verb)(peer, rows).wait()  # no one has noticed
        getattr(near, verb)(peer, rows[:5], checksum=True, notify=b"good").wait()
        ticket = getattr(near, verb)(peer, rows, checksum=True, notify=b"bad")
        with pytest.raises(TransferError) as failed:
            ticket.wait()
        assert failed.value.cause == (
            f"checksum: remote range {there.address + 1000:#x} + 100 bytes differs from local "
            f"range {here.address + 1000:#x} + 100 bytes"
        )
        assert failed.value.kind is FailureKind.CHECKSUM
        assert failed.value.num_bytes_done == 1000
        assert not failed.value.delivered.any(), "which of the others differ is not known"
        assert not failed.value.only_notification_missing
        near.write(peer, [], notify=b"the connection is good").wait()
        notes = [note for _, note in far.receive_notifications(20.0)]
        assert notes == [b"good", b"the connection is good"]


@pytest.mark.parametrize("transport", ["local", "shm"])
def test_memory_changed_after_copy_is_detected(transport):
    """Somebody writes into the target, again and again; no transport carries that."""
    size = 8 << 20
    with TransferEngine(transports=[transport]) as near, TransferEngine() as far:
        theirs = untouched(size)
        here, there = near.register(addressed(size)), far.register(theirs)
        peer, over = near.open(far.name), threading.Event()
        wrong = int(here._buffer.owner[5]) ^ 1

        def spoil():
            while not over.is_set():
                theirs[5] = wrong

        thread = threading.Thread(target=spoil, daemon=True)
        thread.start()

        causes = []

        def fails() -> bool:
            try:
                near.write(peer, [(here.address, there.address, size)], checksum=True).wait()
            except TransferError as error:
                causes.append(error.cause)
            return bool(causes)

        try:
            eventually(fails)
        finally:
            over.set()
            thread.join()
        assert causes[0].startswith("checksum: remote range")


def test_engine_checksum_default_applies_to_calls_without_one():
    ours, theirs = untouched(4096), untouched(4096)
    ours[1000 : 1000 + len(MARK)] = np.frombuffer(MARK, np.uint8)
    with (
        TransferEngine(transports=["tcp"], checksum=True) as careful,
        TransferEngine() as far,
        Proxy(far.name, flip, bytes) as proxy,
    ):
        here, there = careful.register(ours), far.register(theirs)
        peer, rows = careful.open(proxy.name), [(here.address, there.address, 4096)]
        with pytest.raises(TransferError, match="checksum: remote range"):
            careful.write(peer, rows).wait()
        careful.write(peer, rows, checksum=False).wait()  # no one compares
        assert theirs[1000 : 1000 + len(MARK)].tobytes() == FLIPPED


def test_engine_checksum_default_and_invalid_values(pair):
    size = 4096
    with TransferEngine(transports=[pair.peer.transport], checksum=True) as careful:
        here, there = careful.register(addressed(size)), pair.far.register(untouched(size))
        peer = careful.open(pair.far.name)
        careful.write(peer, [(here.address, there.address, size)]).wait()
        np.testing.assert_array_equal(there._buffer.owner, here._buffer.owner)
        for wrong in (1, "yes"):
            with pytest.raises(InvalidArgument, match="write: checksum must be True or False, got"):
                careful.write(peer, [(here.address, there.address, size)], checksum=wrong)


def test_a_file_has_no_peer_that_compares(tmp_path):
    with TransferEngine() as engine:
        here = engine.register(addressed(4096))
        (tmp_path / "disk").write_bytes(bytes(4096))
        peer = engine.open(f"file:{tmp_path / 'disk'}")
        for call in (engine.write, engine.read):
            with pytest.raises(InvalidArgument, match="checksum must be False for a file"):
                call(peer, [(here.address, 0, 4096)], checksum=True)


def checksums(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def test_verify_request_wire_format():
    """A target says how many ranges agree, and takes the question apart as it does any other."""
    with TransferEngine() as engine:
        region = engine.register(np.zeros(4096, np.uint8))
        connection = connect(engine.name)
        begin(connection)
        empty = 0x2D06800538D394C2  # XXH3-64 of nothing: of no range that is asked for
        good, bad = RANGE.pack(region.address, 8), RANGE.pack(region.address + 4096, 8)
        for op in (VERIFY_WRITE, VERIFY_READ):
            connection.sendall(HEADER.pack(op, 1, 1, 0, 8) + good + checksums(empty))
            assert receive_exactly(connection, ACK.size + 8) == ACK.pack(0, 0, 1, 8) + checksums(0)
            connection.sendall(HEADER.pack(op, 1, 2, 7, 8) + bad + checksums(empty))
            status, size, _, _ = ACK.unpack(receive_exactly(connection, ACK.size))
            assert status == 1
            assert receive_exactly(connection, size).startswith(b"descriptors[7] remote range")
        connection.close()
        for num_ranges, num_bytes in ((0, 0), (1, 0), (1, 16), (2, 8), (8193, 8 * 8193)):
            with connect(engine.name) as hostile:
                begin(hostile)
                hostile.sendall(HEADER.pack(VERIFY_READ, num_ranges, 1, 0, num_bytes))
                assert ended(hostile)


def test_target_confirming_too_many_ranges_is_protocol_error():
    def behave(connection):
        answer(connection)
        op, _, request, _, size = HEADER.unpack(receive_exactly(connection, HEADER.size))
        assert op == WRITE
        receive_exactly(connection, RANGE.size + len(ZEROS) + size)
        connection.sendall(ACK.pack(0, 0, request, size))
        receive_exactly(connection, HEADER.size + RANGE.size + 8)
        connection.sendall(ACK.pack(0, 0, request, 8) + checksums(2))
        receive_exactly(connection, 1)

    with raw_server(behave) as name, TransferEngine(transports=["tcp"]) as near:
        here = near.register(addressed(64))
        ticket = near.write(near.open(name), [(here.address, 4096, 64)], checksum=True)
        with pytest.raises(TransferError, match="protocol error: more ranges agree"):
            ticket.wait()
