"""Questions about objects over raw sockets, malformed ones included."""

import contextlib
import resource
import socket

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mooncake_kernels.pool import checksum_of
from mooncake_kernels.transfer import WHOLE, ObjectStatus, TransferEngine

from .handshake import receive_exactly
from .objects import (
    ANSWER,
    ASK,
    BIG,
    COMPARE,
    MOST,
    READ,
    REMOVE,
    SIZE,
    SUMS,
    WRITE,
    Target,
    answer_to,
    frame,
    hear_answer,
    is_good,
    question,
    statuses,
    still_serves,
)
from .support import (
    ACK,
    CHECK_READ,
    HEADER,
    RANGE,
    ended,
    eventually,
    refusal,
    send_last,
    untouched,
)


@pytest.fixture(scope="module")
def target():
    with TransferEngine() as engine:
        yield Target(engine)


@pytest.fixture
def connection(target):
    with target.connect() as connection:
        yield connection


def test_read_request_wire_format(target, connection):
    data, whole_sum = target.data, checksum_of(target.data)
    target.pool.put_from((2, 7), b"without", checksum=False)
    entries = [(1, 7, WHOLE, BIG), (9, 7, WHOLE, BIG), (1, 7, 10, 20), (1, 7, SIZE, 1)]
    entries += [(2, 7, WHOLE, 7), (2, 7, WHOLE, 6), (2, 7, 7, 0)]
    for flags in (0, SUMS, SUMS | COMPARE):
        sums = [checksum_of(part) if flags else 0 for part in (data[10:30], b"without", b"")]
        rows = [
            (SIZE, SIZE, whole_sum, ObjectStatus.DONE),
            (0, 0, 0, ObjectStatus.ABSENT),
            (SIZE, 20, sums[0], ObjectStatus.DONE),
            (SIZE, 0, 0, ObjectStatus.DOES_NOT_FIT),
            (7, 7, sums[1], ObjectStatus.DONE),
            (7, 0, 0, ObjectStatus.DOES_NOT_FIT),
            (7, 0, sums[2], ObjectStatus.DONE),
        ]
        expected = b"".join(ANSWER.pack(*row, 0) for row in rows) + data + data[10:30] + b"without"
        assert answer_to(connection, question(READ, *entries, flags=flags)) == expected
    assert target.pool.remove((2, 7))


def test_write_and_remove_request_wire_format(target, connection):
    first, last = b"first", b"the last"
    entries = [
        (11, 7, len(first), checksum_of(first)),
        (12, 7, 300, 5),  # not its checksum
        (1, 7, 4, 0),
        (13, 7, 0, 0),
        (14, 7, 0, checksum_of(b"")),
        (15, 7, len(last), 0),
    ]
    payload = first + bytes(300) + b"----" + last
    done, damaged, exists = ObjectStatus.DONE, ObjectStatus.DAMAGED, ObjectStatus.EXISTS
    expected = [done, damaged, exists, done, done, done]
    assert statuses(answer_to(connection, question(WRITE, *entries), payload)) == expected
    for number, data in ((11, first), (12, None), (13, b""), (14, b""), (15, last)):
        pin = target.pool.pin((number, 7))
        assert (pin and bytes(pin.view)) == data
        if pin:
            assert pin.checksum == checksum_of(data)
            pin.close()
    eventually(target.is_at_rest)
    answer = answer_to(connection, question(REMOVE, *((number, 7) for number in range(11, 16))))
    assert statuses(answer) == [done, ObjectStatus.ABSENT, done, done, done]
    assert is_good(connection, target)


def test_pipelined_requests(target, connection):
    """And other batches between them."""
    region = target.engine.register(untouched(64))
    check = HEADER.pack(CHECK_READ, 1, 3, 0, 0) + RANGE.pack(region.address, 64)
    connection.sendall(
        frame(question(READ, (9, 7, WHOLE, BIG)), request=1)
        + frame(question(WRITE, (20, 7, 5, 0)), b"hello", request=2)
        + check
        + frame(question(7), request=4)
        + frame(question(READ, (20, 7, WHOLE, BIG)), request=4)
        + frame(question(REMOVE, (20, 7)), request=BIG)
    )
    assert hear_answer(connection, 1) == ANSWER.pack(0, 0, 0, ObjectStatus.ABSENT, 0)
    assert statuses(hear_answer(connection, 2)) == [ObjectStatus.DONE]
    assert receive_exactly(connection, ACK.size) == ACK.pack(0, 0, 3, 0)
    assert refusal(connection).startswith("malformed question")
    assert hear_answer(connection, 4).endswith(b"hello")
    assert statuses(hear_answer(connection, BIG)) == [ObjectStatus.DONE]
    region.close()


def test_request_arriving_byte_by_byte(target, connection):
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    asked = frame(question(WRITE, (21, 7, 3, 0), (22, 7, 0, 0)), b"abc")
    for byte in asked:
        connection.sendall(bytes([byte]))
    assert statuses(hear_answer(connection)) == [ObjectStatus.DONE] * 2
    assert target.pool.remove((21, 7)) and target.pool.remove((22, 7))


ONE = (1, 7, WHOLE, BIG)
REFUSED = [
    (b"x", b"", "1 bytes"),
    (question(READ, ONE)[:15], b"", "15 bytes"),
    (question(READ), b"", "0 keys"),
    (question(READ, *[ONE] * 1025), b"", "1025 keys"),
    (question(READ, ONE, count=2**32 - 1), b"", "4294967295 keys"),
    (question(READ, ONE, count=1024), b"", "64 bytes for 1024 keys"),
    (question(READ, ONE, ONE, count=1), b"", "96 bytes for 1 keys"),
    (question(READ, ONE)[:-1], b"", "63 bytes for 1 keys"),
    (question(READ, ONE) + b"x", b"", "65 bytes for 1 keys"),
    (question(READ, ONE, flags=4), b"", "flags 4"),
    (question(READ, ONE, flags=2**32 - 1), b"", "flags 4294967295"),
    (question(READ, ONE, zero=1), b"", "flags 0"),
    (question(READ, ONE), b"payload", "7 bytes of payload"),
    (question(READ, ONE), bytes(100_000), "100000 bytes of payload"),
    (question(0, ONE), b"", "kind 0"),
    (question(4, ONE), b"", "kind 4"),
    (question(2**32 - 1, ONE), b"", "kind 4294967295"),
    (question(4, ONE, flags=SUMS), b"", "flags 1"),
    (question(WRITE, (30, 7, 5, 0), flags=SUMS), b"hello", "flags 1"),
    (question(WRITE, (30, 7, 5, 0), count=2), b"hello", "64 bytes for 2 keys"),
    (question(WRITE, (30, 7, 5, 0)), b"hell", "the objects exceed the payload"),
    (question(WRITE, (30, 7, 5, 0)), b"hello!", "the objects fall 1 bytes short"),
    (question(WRITE, (30, 7, BIG, 0), (31, 7, 6, 0)), b"hello", "the objects exceed the payload"),
    (question(WRITE, (30, 7, 5, 0), (31, 7, BIG, 0)), b"hello", "the objects exceed the payload"),
    (question(WRITE, (30, 7, 5, 0)), bytes(MOST), "the objects fall 67108859 bytes short"),
    (question(REMOVE, (1, 7), count=2), b"", "48 bytes for 2 keys"),
    (question(REMOVE, (1, 7), flags=COMPARE), b"", "flags 2"),
    (question(REMOVE, (1, 7)), b"x", "1 bytes of payload"),
    (bytes(64 << 10), b"", "0 keys"),
]


@pytest.mark.parametrize(("asked", "payload", "why"), REFUSED, ids=[why for _, _, why in REFUSED])
def test_malformed_requests_are_refused(target, connection, asked, payload, why):
    for _ in range(2):
        connection.sendall(frame(asked, payload))
        assert refusal(connection) == f"malformed question: {why}"
    assert is_good(connection, target)
    stats = target.pool.stats()
    assert (stats.num_ready, stats.num_writing) == (1, 0)


@pytest.mark.parametrize(
    "header",
    [
        (ASK, 1, 1, 48, 48),  # ranges
        (ASK, 8192, 1, 48, 48),
        (ASK, 0, 1, 0, 0),  # no question
        (ASK, 0, 1, 0, 48),
        (ASK, 0, 1, (64 << 10) + 1, (64 << 10) + 1),
        (ASK, 0, 1, BIG, BIG),
        (ASK, 0, 1, 48, 47),  # that ends behind its bytes
        (ASK, 0, 1, 48, 0),
        (ASK, 0, 1, 48, 48 + MOST + 1),
        (ASK, 0, 1, 48, BIG),
        (18, 0, 1, 48, 48),  # no such op
    ],
)
def test_invalid_headers_end_the_connection(target, connection, header):
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert is_good(connection, target)
    connection.sendall(HEADER.pack(*header))
    assert ended(connection)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < memory + (32 << 10)
    assert still_serves(target)


def test_refused_object_request_does_not_fail_the_transfer_request(target, connection):
    region = target.engine.register(untouched(64))
    connection.sendall(frame(question(READ)))
    assert refusal(connection) == "malformed question: 0 keys"
    connection.sendall(HEADER.pack(CHECK_READ, 1, 1, 0, 0) + RANGE.pack(region.address, 64))
    assert receive_exactly(connection, ACK.size) == ACK.pack(0, 0, 1, 0)
    region.close()


# What is cut short.

WRITTEN = frame(question(WRITE, (40, 7, 1000, 0), (41, 7, 0, 0)), bytes(1000))


@pytest.mark.parametrize("num_bytes", [1, 63, 64, 65, 96, 159, 160, 161, 1159])
def test_truncated_write_stores_nothing(target, connection, num_bytes):
    assert len(WRITTEN) == 1160
    send_last(connection, WRITTEN[:num_bytes])
    assert ended(connection)
    assert still_serves(target)
    assert not target.pool.contains((40, 7)) and not target.pool.contains((41, 7))


def test_written_objects_appear_once_complete(target, connection):
    connection.sendall(WRITTEN[:-1])
    eventually(lambda: target.pool.stats().num_writing == 2)
    with target.connect() as other:
        absent = ANSWER.pack(0, 0, 0, ObjectStatus.ABSENT, 0)
        asked = question(READ, (40, 7, WHOLE, BIG), (41, 7, WHOLE, BIG))
        assert answer_to(other, asked) == 2 * absent
        being_written = [ObjectStatus.BEING_WRITTEN]
        assert statuses(answer_to(other, question(WRITE, (40, 7, 3, 0)), b"abc")) == being_written
        assert statuses(answer_to(other, question(REMOVE, (40, 7)))) == [ObjectStatus.ABSENT]
        connection.sendall(WRITTEN[-1:])
        assert statuses(hear_answer(connection)) == [ObjectStatus.DONE] * 2
        assert statuses(answer_to(other, question(WRITE, (40, 7, 3, 0)), b"abc")) == [
            ObjectStatus.EXISTS
        ]
        with target.pool.pin((40, 7)) as pin:
            assert bytes(pin.view) == bytes(1000)
        done = [ObjectStatus.DONE] * 2
        assert statuses(answer_to(other, question(REMOVE, (40, 7), (41, 7)))) == done


def test_aborted_write_does_not_block_the_next_writer(target, connection):
    connection.sendall(WRITTEN[:500])
    eventually(lambda: target.pool.stats().num_writing == 2)
    connection.close()
    eventually(target.is_at_rest)
    with target.connect() as other:
        other.sendall(WRITTEN)
        assert statuses(hear_answer(other)) == [ObjectStatus.DONE] * 2
        answer_to(other, question(REMOVE, (40, 7), (41, 7)))


def test_payload_without_room_is_skipped(target, connection):
    pool = target.pool
    pool.put_from((50, 7), np.zeros(pool.capacity_bytes - (8 << 20), np.uint8))
    try:
        half = MOST // 2
        entries = [(51, 7, half, 0), (52, 7, 5, 0), (53, 7, half - 5, 0)]
        payload = bytes(half) + b"hello" + bytes(half - 5)
        full, done = ObjectStatus.FULL, ObjectStatus.DONE
        result = statuses(answer_to(connection, question(WRITE, *entries), payload))
        assert result == [full, done, full]
        with pool.pin((52, 7)) as pin:
            assert bytes(pin.view) == b"hello"
        answer_to(connection, question(REMOVE, (52, 7)))
    finally:
        pool.remove((50, 7))
    assert is_good(connection, target)


def test_client_that_does_not_read_leaves_no_pins(target):
    """Many a time, and leaves in the end: nothing stays pinned."""
    target.pool.put_from((60, 7), np.zeros(32 << 20, np.uint8))
    for how_often in (1, 3):
        with target.connect() as connection:
            connection.sendall(how_often * frame(question(READ, (60, 7, WHOLE, BIG))))
            eventually(lambda: target.pool.stats().num_pins == 1)
            assert still_serves_others(target)
        eventually(target.is_at_rest)
    assert target.pool.remove((60, 7))


def still_serves_others(target: Target) -> bool:
    with target.connect() as connection:
        return is_good(connection, target)


# Anything.


def swallow(connection: socket.socket) -> None:
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(1 << 16):
            pass


@given(garbage=st.binary(max_size=300), num_bytes=st.integers(0, 400))
@settings(max_examples=30, deadline=None)
def test_garbage_requests_are_rejected(target, garbage, num_bytes):
    with target.connect() as connection:
        send_last(connection, HEADER.pack(ASK, 0, 1, num_bytes, num_bytes) + garbage)
        swallow(connection)
    assert target.pool.contains((1, 7))


numbers = st.one_of(
    st.integers(0, 3), st.integers(0, 40), st.integers(BIG - 3, BIG), st.integers(0, BIG)
)
words = st.one_of(st.integers(0, 5), st.integers(0, 2**32 - 1))


@given(
    kind=st.one_of(st.integers(0, 4), words),
    flags=st.one_of(st.just(0), words),
    zero=st.one_of(st.just(0), words),
    count=st.one_of(st.none(), words),
    entries=st.lists(st.tuples(numbers, st.integers(0, 1), numbers, numbers), max_size=5),
    payload=st.binary(max_size=100),
    spare=st.binary(max_size=3),
)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_requests_with_arbitrary_fields(
    target, connection, kind, flags, zero, count, entries, payload, spare
):
    if kind == REMOVE:
        entries = [entry[:2] for entry in entries]
    asked = question(kind, *entries, flags=flags, zero=zero, count=count) + spare
    connection.sendall(frame(asked, payload))
    status, refusal_bytes, request, num_bytes = ACK.unpack(receive_exactly(connection, ACK.size))
    assert status <= 1 and request == 1 and (refusal_bytes > 0) == (status == 1)
    receive_exactly(connection, refusal_bytes + num_bytes)
    assert is_good(connection, target)
    eventually(target.is_at_rest)


def test_server_survives_all_of_the_above(target):
    assert still_serves(target)
    for number in range(100):
        for scope in (0, 1):
            target.pool.remove((number, scope))
    for key in target.pool.objects().keys.tolist():
        if key != [1, 7]:
            target.pool.remove(tuple(key))
    assert target.pool.stats().num_ready == 1
    assert target.pool.stats().free_bytes == target.pool.capacity_bytes - 8192
    target.served.take()
