"""Malformed answers about objects, over raw sockets."""

import contextlib
import itertools
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_kernels.errors import TransferError, Unavailable
from mooncake_kernels.pool import checksum_of
from mooncake_kernels.transfer import ObjectStatus, TransferEngine

from .handshake import answer, receive_exactly
from .objects import ANSWER, BIG, MOST
from .support import ACK, HEADER, WAIT_S, raw_server, send_last, untouched


@contextlib.contextmanager
def answering(data: bytes):
    """An engine, and a peer of it that answers like this, whatever it is asked."""
    connections = []

    def behave(connection):
        answer(connection)
        connections.append(connection)
        if len(connections) > 1:  # the first is not for RPC
            _, _, _, _, num_bytes = HEADER.unpack(receive_exactly(connection, HEADER.size))
            receive_exactly(connection, num_bytes)
            send_last(connection, data)

    with raw_server(behave) as name, TransferEngine(transports=["tcp"]) as engine:
        yield engine, engine.open(name, deadline_s=WAIT_S)


def row(object_bytes=5, num_bytes=5, checksum=0, status=ObjectStatus.DONE, zero=0) -> bytes:
    return ANSWER.pack(object_bytes, num_bytes, checksum, status, zero)


def done(answer: bytes, num_bytes: int | None = None) -> bytes:
    return ACK.pack(0, 0, 1, len(answer) if num_bytes is None else num_bytes) + answer


NOT_SOUND = "protocol error: a malformed answer"
BAD_ANSWERS = [
    (b"", "connection closed by peer"),
    (done(row())[:10], "connection closed by peer"),
    (done(row())[:30], "connection closed by peer"),
    (ACK.pack(0, 0, 2, 32), "protocol error: ack of request 2 instead of 1"),
    (ACK.pack(0, 1, 1, 32), "protocol error: ack of 32 bytes instead of 32"),
    (ACK.pack(2, 0, 1, 32), "protocol error: ack with status 2"),
    (ACK.pack(0, 0, 1, MOST + (64 << 10) + 1), "protocol error: answer of 67174401 bytes"),
    (ACK.pack(0, 0, 1, BIG), f"protocol error: answer of {BIG} bytes"),
    (ACK.pack(1, 0, 1, 0), "protocol error: malformed refusal"),
    (ACK.pack(1, 1025, 1, 0), "protocol error: malformed refusal"),
    (ACK.pack(1, 3, 1, 9), "protocol error: malformed refusal"),
    (done(b""), NOT_SOUND),
    (done(row()[:31]), NOT_SOUND),
    (done(row()), NOT_SOUND),  # and its bytes?
    (done(row() + b"hell"), NOT_SOUND),
    (done(row() + b"hello!"), NOT_SOUND),
    (done(row(num_bytes=4) + b"hell"), NOT_SOUND),
    (done(row(object_bytes=11, num_bytes=11) + b"hello world"), NOT_SOUND),  # it has asked for 10
    (done(row(num_bytes=BIG)), NOT_SOUND),
    (done(row(status=0) + b"hello"), NOT_SOUND),
    (done(row(status=10, num_bytes=0)), NOT_SOUND),
    (done(row(status=2**32 - 1, num_bytes=0)), NOT_SOUND),
]


@pytest.mark.parametrize(("data", "cause"), BAD_ANSWERS)
def test_malformed_read_responses_are_rejected(data, cause):
    with answering(data) as (engine, peer):
        with pytest.raises(TransferError) as caught:
            engine.read_objects(peer, [(1, 7)], sizes=[10], deadline_s=WAIT_S)
        assert caught.value.cause.startswith(cause) and caught.value.peer == peer.name
        assert engine.stats()["peers"][peer.name]["num_in_flight"] == 0


@pytest.mark.parametrize(
    ("answer", "offset", "size"),
    [
        (row(num_bytes=4) + b"hell", 1, 5),
        (row(num_bytes=6) + b"hello!", 1, 5),
        (row(object_bytes=2) + b"hello", 1, 5),  # a range that the object does not have
    ],
)
def test_malformed_range_responses_are_rejected(answer, offset, size):
    with answering(done(answer)) as (engine, peer):
        if answer[:8] == bytes([2, 0, 0, 0, 0, 0, 0, 0]):
            with engine.read_objects(peer, [(1, 7)], offsets=[offset], sizes=[size]) as reply:
                assert reply.object_bytes.tolist() == [2]  # who asks has room: it is harmless
        else:
            with pytest.raises(TransferError, match=NOT_SOUND):
                engine.read_objects(peer, [(1, 7)], offsets=[offset], sizes=[size])


def test_refusal_text_is_sanitized():
    with answering(ACK.pack(1, 5, 1, 0) + b"n\xff\x00o\n") as (engine, peer):
        with pytest.raises(Unavailable, match=r"n\?\?o\?$"):
            engine.read_objects(peer, [(1, 7)])


@pytest.mark.parametrize("checksum", [0, 5, checksum_of(b"hello")])
def test_checksum_from_the_peer_is_verified(checksum):
    with answering(done(row(checksum=checksum) + b"hello")) as (engine, peer):
        got = untouched(5)
        with engine.read_objects(peer, [(1, 7)]) as reply:
            is_right = reply.receive([[(got.ctypes.data, 5)]], verify=True)
        assert is_right.tolist() == [checksum != 5] and got.tobytes() == b"hello"


def test_truncated_read_response_fails():
    with answering(done(row() + b"hell", 37)) as (engine, peer):
        got = untouched(5)
        with engine.read_objects(peer, [(1, 7)]) as reply:
            with pytest.raises(TransferError, match="connection closed by peer") as caught:
                reply.receive([[(got.ctypes.data, 5)]], verify=True)
        assert caught.value.num_bytes_done == 32
        assert engine.stats()["peers"][peer.name]["num_errors"] == 1


@pytest.mark.parametrize("call", ["write_objects", "remove_objects"])
@pytest.mark.parametrize(
    ("answer", "num_keys", "message"),
    [
        *((bytes(num_bytes), 2, NOT_SOUND) for num_bytes in (0, 3, 4, 9, 12)),
        *((struct.pack("<I", status), 1, "protocol error") for status in (10, 256, 257, 2**32 - 1)),
    ],
)
def test_malformed_write_responses_are_rejected(call, answer, num_keys, message):
    arguments = [[[]] * num_keys] if call == "write_objects" else []
    with answering(done(answer)) as (engine, peer):
        with pytest.raises(TransferError, match=message):
            getattr(engine, call)(peer, [(1, 7), (2, 7)][:num_keys], *arguments)


@given(garbage=st.binary(max_size=200), is_answer=st.booleans())
@settings(max_examples=25, deadline=None)
def test_garbage_responses_are_rejected(garbage, is_answer):
    with answering(done(garbage) if is_answer else garbage) as (engine, peer):
        got = untouched(200)
        with contextlib.suppress(TransferError, Unavailable):
            with engine.read_objects(peer, [(1, 7), (2, 7)], sizes=[100, 100]) as reply:
                ends = np.cumsum([0, *reply.object_bytes * (reply.statuses == ObjectStatus.DONE)])
                assert ends[-1] <= 200
                base = got.ctypes.data
                places = [
                    [(base + int(start), int(end - start))]
                    for start, end in itertools.pairwise(ends)
                ]
                reply.receive(places, verify=True)
