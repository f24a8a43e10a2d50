"""Peers that violate the wire format: nothing crashes, hangs or allocates without bound."""

import resource
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mooncake_kernels.errors import FailureKind, TransferError
from mooncake_kernels.transfer import TransferEngine

from .handshake import (
    HELLO,
    MAGIC,
    NOTHING,
    TAIL,
    VERSION,
    WELCOME,
    Hello,
    answer,
    begin,
    hear_hello,
    receive_exactly,
)
from .support import (
    ACK,
    CHECK_READ,
    CHECK_WRITE,
    HEADER,
    NOTIFY,
    RANGE,
    READ,
    UNTOUCHED,
    WAIT_S,
    WRITE,
    ZEROS,
    addressed,
    connect,
    ended,
    raw_server,
    refusal,
    send_last,
    untouched,
)

SIZE = 1 << 16
BIG = 2**64 - 1


@pytest.fixture(scope="module")
def target():
    """An engine with a region; its region."""
    with TransferEngine() as engine:
        yield engine, engine.register(untouched(SIZE))


@pytest.fixture
def connection(target):
    """A raw connection to the target that has said hello."""
    with connect(target[0].name) as connection:
        assert begin(connection).name.decode() == target[0].name
        yield connection


def still_serves(target) -> bool:
    engine, region = target
    with TransferEngine(transports=["tcp"]) as other:
        mine = other.register(addressed(64))
        row = (mine.address, region.address, 64)
        other.write(other.open(engine.name), [row]).wait()
        assert (region._buffer.owner[:64] == addressed(64)).all()
        region._buffer.owner[:] = UNTOUCHED
    return True


def test_request_wire_format(target, connection):
    engine, region = target
    data = bytes(range(100))
    table = RANGE.pack(region.address + 7, 60) + RANGE.pack(region.address + 1000, 40)
    connection.sendall(HEADER.pack(WRITE, 2, 1, 0, 100) + table + bytes(32) + data)
    assert receive_exactly(connection, ACK.size) == ACK.pack(0, 0, 1, 100)
    connection.sendall(HEADER.pack(READ, 2, 2, 0, 100) + table)
    assert receive_exactly(connection, ACK.size + 100) == ACK.pack(0, 0, 2, 100) + data
    for op in (CHECK_WRITE, CHECK_READ):
        connection.sendall(HEADER.pack(op, 2, 3, 0, 0) + table)
        assert receive_exactly(connection, ACK.size) == ACK.pack(0, 0, 3, 0)
    connection.sendall(HEADER.pack(NOTIFY, 0, 4, 0, 5) + b"hello")
    assert receive_exactly(connection, ACK.size) == ACK.pack(0, 0, 4, 5)
    assert engine.receive_notifications() == [("raw:1", b"hello")]
    region._buffer.owner[:] = UNTOUCHED


def test_remaining_batches_of_a_refused_request_are_refused(target, connection):
    engine, region = target
    good, bad = RANGE.pack(region.address, 4), RANGE.pack(region.address + SIZE, 4)
    connection.sendall(HEADER.pack(WRITE, 1, 5, 9, 4) + bad + ZEROS + b"none")
    connection.sendall(HEADER.pack(WRITE, 1, 5, 10, 4) + good + ZEROS + b"none")
    connection.sendall(HEADER.pack(NOTIFY, 0, 5, 0, 4) + b"none")
    assert refusal(connection).startswith("descriptors[9] remote range")
    assert (
        refusal(connection) == refusal(connection) == "an earlier batch of the request was refused"
    )
    connection.sendall(HEADER.pack(CHECK_WRITE, 1, 6, 0, 0) + good)
    assert receive_exactly(connection, ACK.size) == ACK.pack(0, 0, 6, 0)
    assert engine.receive_notifications() == []
    assert (region._buffer.owner == UNTOUCHED).all()


@pytest.mark.parametrize(
    "header",
    [
        (0, 1, 1, 0, 1),  # no such op
        (6, 1, 1, 0, 1),
        (WRITE, 0, 1, 0, 0),  # counts and sizes out of bounds
        (WRITE, 0, 1, 0, 1),
        (WRITE, 1, 1, 0, 0),
        (WRITE, 8193, 1, 0, 8193),
        (WRITE, 2**32 - 1, 1, 0, BIG),
        (WRITE, 1, 1, 0, (16 << 20) + 1),
        (READ, 1, 1, 0, (256 << 20) + 1),
        (READ, 1, 1, 0, BIG),
        (CHECK_READ, 8193, 1, 0, 0),
        (CHECK_WRITE, 1, 1, 0, 1),
        (NOTIFY, 1, 1, 0, 1),
        (NOTIFY, 0, 1, 0, 65537),
        (NOTIFY, 0, 1, 0, BIG),
        (7, 0, 1, 0, 1),  # about NICs
        (8, 0, 1, 0, 0),
        (9, 1, 1, 0, 0),
        (10, 0, 1, 0, 9),
        (10, 0, 1, 0, 8 * 8193),
        (11, 0, 1, 0, 3),
        (12, 0, 1, 0, 17),  # links
        (12, 0, 1, 0, 16 * 4097),
        (15, 2, 1, 0, 8),  # checksums
        (16, 1, 1, 0, 16),
        (18, 0, 1, 0, 0),
    ],
)
def test_invalid_headers_end_the_connection(target, connection, header):
    connection.sendall(HEADER.pack(*header))
    assert ended(connection)
    assert still_serves(target)


@pytest.mark.parametrize(
    ("op", "ranges", "num_bytes"),
    [
        (WRITE, [(0, 4), (0, 5)], 8),  # the sum is not the payload
        (WRITE, [(0, 4), (0, 3)], 8),
        (READ, [(0, BIG), (0, 9)], 8),  # the sum wraps around to it
        (READ, [(0, 8), (0, 0)], 8),
        (CHECK_READ, [(0, 0)], 0),
    ],
)
def test_invalid_tables_end_the_connection(target, connection, op, ranges, num_bytes):
    table = b"".join(RANGE.pack(target[1].address + at, size) for at, size in ranges)
    zeros = bytes(-(HEADER.size + len(table)) % 64) if op == WRITE else b""
    connection.sendall(HEADER.pack(op, len(ranges), 1, 0, num_bytes) + table + zeros)
    assert ended(connection)
    assert (target[1]._buffer.owner == UNTOUCHED).all()
    assert still_serves(target)


@pytest.mark.parametrize("address", [0, BIG, BIG - 3, 1 << 63])
@pytest.mark.parametrize("size", [1, BIG])
def test_addresses_at_the_edges_are_refused(connection, address, size):
    connection.sendall(HEADER.pack(CHECK_WRITE, 1, 1, 0, 0) + RANGE.pack(address, size))
    assert refusal(connection).endswith("is not inside a registered region")


@pytest.mark.parametrize("num_bytes", [1, 31, 32, 40, 48, 49, 100])
def test_connection_closed_within_a_batch(target, connection, num_bytes):
    batch = (
        HEADER.pack(WRITE, 1, 1, 0, 64)
        + RANGE.pack(target[1].address + 512, 64)
        + ZEROS
        + bytes(64)
    )
    send_last(connection, batch[:num_bytes])
    assert ended(connection)
    assert (target[1]._buffer.owner[576:] == UNTOUCHED).all()
    assert still_serves(target)


@pytest.mark.parametrize(
    "greeting",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        HELLO.pack(b"MKTRNSFX", VERSION, 1, 7) + b"x",
        HELLO.pack(MAGIC, VERSION, 0, 7),
        HELLO.pack(MAGIC, VERSION, 2**32 - 1, 7),
        HELLO.pack(MAGIC, VERSION, 3, 7) + b"a\nb",
        HELLO.pack(MAGIC, VERSION, 3, 7) + b"a\xffb",
        Hello(flags=4).packed(),
        Hello(flags=2**32 - 1).packed(),
        HELLO.pack(MAGIC, VERSION, 1, 7) + b"x" + TAIL.pack(0, 256, 0, 7, 1, NOTHING),
        Hello().packed()[:-1],
    ],
)
def test_invalid_hellos_end_the_connection(target, greeting):
    with connect(target[0].name) as connection:
        send_last(connection, greeting)
        assert ended(connection)
    assert still_serves(target)


@given(garbage=st.binary(max_size=300), greet=st.booleans(), op=st.integers(0, 18))
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_garbage_to_the_server(target, garbage, greet, op):
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with connect(target[0].name) as connection:
        if greet:
            begin(connection)
            garbage = struct.pack("<I", op) + garbage
        send_last(connection, garbage)
        while not ended(connection):
            pass
    assert (target[1]._buffer.owner == UNTOUCHED).all()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < memory + (64 << 10)
    target[0].receive_notifications()


def ask_bad_server(behave, direction: str) -> str:
    """The cause with which a request to a server fails that answers like this."""
    return error_of_bad_server(behave, direction).cause


def error_of_bad_server(behave, direction: str) -> TransferError:
    with raw_server(behave) as name, TransferEngine() as engine:
        region = engine.register(untouched(SIZE))
        with pytest.raises(TransferError) as caught:
            peer = engine.open(name, deadline_s=WAIT_S)
            row = (region.address, 4096, 100)
            getattr(engine, direction)(peer, [row], deadline_s=WAIT_S).wait()
        return caught.value


def kind_of(cause: str) -> FailureKind:
    """Of what a bad server answers."""
    if cause == "connection closed by peer":
        return FailureKind.DISCONNECTED
    is_refusal = cause == "n??o?"
    return FailureKind.REFUSED if is_refusal else FailureKind.INCOMPATIBLE


def answers_with(data: bytes):
    def behave(connection):
        answer(connection)
        receive_exactly(connection, HEADER.size)
        send_last(connection, data)

    return behave


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (ACK.pack(0, 0, 2, 100), "protocol error: ack of request 2 instead of 1"),
        (ACK.pack(0, 0, 1, 99), "protocol error: ack of 99 bytes instead of 100"),
        (ACK.pack(0, 1, 1, 100), "protocol error: ack of 100 bytes"),
        (ACK.pack(7, 0, 1, 100), "protocol error: ack with status 7"),
        (ACK.pack(1, 0, 1, 0), "protocol error: malformed refusal"),
        (ACK.pack(1, 2**32 - 1, 1, 0), "protocol error: malformed refusal"),
        (ACK.pack(1, 3, 1, 9), "protocol error: malformed refusal"),
        (ACK.pack(1, 5, 1, 0) + b"n\xff\x00o\n", "n??o?"),
        (ACK.pack(0, 0, 1, 100)[:10], "connection closed by peer"),
        (b"", "connection closed by peer"),
    ],
)
@pytest.mark.parametrize("direction", ["write", "read"])
def test_malformed_responses_are_rejected(direction, data, cause):
    error = error_of_bad_server(answers_with(data), direction)
    assert error.cause.startswith(cause) and error.kind is kind_of(cause)


@pytest.mark.parametrize(
    "text", [f"deadline of {WAIT_S:g} s passed", "checksum: ", "cancelled", "connection refused"]
)
@pytest.mark.parametrize("direction", ["write", "read"])
def test_refusal_text_does_not_affect_the_failure_kind(direction, text):
    """They may be those of a failure of our own."""
    error = error_of_bad_server(
        answers_with(ACK.pack(1, len(text), 1, 0) + text.encode()), direction
    )
    assert (error.cause, error.kind) == (text, FailureKind.REFUSED)
    assert not error.timed_out


def test_truncated_read_response_fails():
    cause = ask_bad_server(answers_with(ACK.pack(0, 0, 1, 100) + bytes(99)), "read")
    assert cause == "connection closed by peer"


@pytest.mark.parametrize(
    ("greeting", "cause"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "the peer is not a mooncake_kernels engine"),
        (HELLO.pack(MAGIC, 9, 1, 7) + b"x", "the peer speaks wire version 9, this engine speaks 6"),
        (HELLO.pack(MAGIC, 1, 1, 7) + b"x", "the peer speaks wire version 1, this engine speaks 6"),
        (HELLO.pack(MAGIC, VERSION, 256, 7), "protocol error: name of 256 bytes"),
        (HELLO.pack(MAGIC, VERSION, 1, 7), "connection closed by peer"),
        (Hello(flags=8).packed(), "protocol error: hello with flags 8"),
        (Hello().packed(), "connection closed by peer"),
        (
            Hello().packed() + WELCOME.pack(10, 0, NOTHING),
            "protocol error: welcome with reject reason 10",
        ),
        (
            Hello().packed() + WELCOME.pack(0, 1, NOTHING),
            "protocol error: welcome with reject reason 0",
        ),
        (Hello().packed() + WELCOME.pack(0, 0, NOTHING)[:39], "connection closed by peer"),
        (b"", "connection closed by peer"),
    ],
)
def test_invalid_server_hellos_are_rejected(greeting, cause):
    def behave(connection):
        hear_hello(connection)
        send_last(connection, greeting)

    error = error_of_bad_server(behave, "write")
    assert (error.cause, error.kind) == (cause, kind_of(cause))


@given(garbage=st.binary(max_size=200), greet=st.booleans())
@settings(max_examples=20, deadline=None)
def test_garbage_to_the_client(garbage, greet):
    def behave(connection):
        hear_hello(connection)
        if greet:
            connection.sendall(Hello().packed() + WELCOME.pack(0, 0, NOTHING))
            receive_exactly(connection, HEADER.size)
        send_last(connection, garbage)

    assert ask_bad_server(behave, "read")
