"""A peer that does not know the secret gets nowhere, whatever it tries."""

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from mooncake_kernels.transfer import TransferEngine

from .handshake import (
    HELLO,
    MAGIC,
    NO_SECRET,
    NOTHING,
    OTHER_SECRET,
    SECRET,
    TAIL,
    UNWANTED_SECRET,
    VERSION,
    WELCOME,
    WELCOMED,
    Frames,
    Hello,
    address_of,
    answer,
    begin_both,
    hear_hello,
    hear_welcome,
    prove,
    receive_exactly,
)
from .proxy import Proxy
from .secret import (
    ANOTHER,
    NO_TLS,
    NONE,
    NOT_ITS_ADDRESS,
    OURS,
    TLS_ONLY,
    UNWANTED,
    cause_of_opening,
    initiator,
)
from .support import (
    ACK,
    HEADER,
    RANGE,
    UNTOUCHED,
    WRITE,
    ZEROS,
    addressed,
    connect,
    ended,
    eventually,
    raw_server,
    send_last,
    untouched,
)

ITSELF = "this engine itself answers, at an address that is not its own"
ROOT = Path(__file__).parents[2]
SIZE = 4096


def still_serves(guarded) -> bool:
    """And no one has been here: the memory is as it was."""
    engine, region = guarded
    assert (region._buffer.owner == UNTOUCHED).all()
    with initiator(OURS) as other:
        mine = other.register(addressed(SIZE))
        peer = other.open(engine.name)
        other.write(peer, [(mine.address, region.address, SIZE)]).wait()
        assert (region._buffer.owner == addressed(SIZE)).all()
        region._buffer.owner[:] = UNTOUCHED
    return True


def test_documented_proof_example():
    """The example of docs/internals/wire.md."""
    dialled = (b"kv-2.example:4711", b"10.0.0.2/4711")
    nonce = bytes(range(32))
    initiators = Hello(b"10.0.0.1:4711", VERSION, 1, SECRET, 3, 1, nonce, *dialled).packed()
    targets = Hello(b"10.0.0.2:4711", VERSION, 2, SECRET, 0, 0, bytes(range(32, 64))).packed()
    secret = b"0123456789abcdef"
    sides = ("initiator", "target")
    proofs = [prove(secret, side, initiators, targets).hex() for side in sides]
    text = (ROOT / "docs/internals/wire.md").read_text()
    assert all(proof in text for proof in proofs)
    frames = Frames(secret, initiators, targets)
    ack = frames.mac("target", ACK.pack(0, 0, 1, 4)[:32])
    header = HEADER.pack(WRITE, 1, 1, 0, 4)
    signed = frames.signed(header, RANGE.pack(0x7F0000001000, 4))
    assert signed[32:64].hex() in text and ack.hex() in text


def test_handshake_wire_format(guarded):
    engine, region = guarded
    with connect(engine.name) as connection:
        mine, theirs = begin_both(connection, OURS)
        assert theirs.name.decode() == engine.name
        frames = Frames(OURS, mine.packed(), theirs.packed())
        header, table = HEADER.pack(WRITE, 1, 1, 0, 1), RANGE.pack(region.address, 1)
        connection.sendall(frames.signed(header, table) + ZEROS + b"\xee")
        ack = receive_exactly(connection, ACK.size)
        assert ACK.unpack(ack) == (0, 0, 1, 1) and frames.acknowledged(ack)
    heard = []
    with raw_server(lambda it: heard.append(answer(it, OURS))) as name, initiator(OURS) as engine:
        engine.open(name).close()
        eventually(lambda: heard)
        assert heard[0].flags == SECRET and heard[0].epoch == 1 and heard[0].link != 0


def verdict_of(connection: socket.socket, hello: Hello, proof: bytes) -> tuple[int, bytes]:
    connection.sendall(hello.packed())
    hear_hello(connection)
    connection.sendall(proof)
    return hear_welcome(connection)


@pytest.mark.parametrize(
    ("hello", "proof", "verdict"),
    [
        (Hello(), b"", NO_SECRET),
        (Hello(), NOTHING, NO_SECRET),
        (Hello(flags=SECRET), NOTHING, OTHER_SECRET),
        (Hello(flags=SECRET), b"\xff" * 32, OTHER_SECRET),
    ],
)
def test_strangers_learn_nothing(guarded, hello, proof, verdict):
    with connect(guarded[0].name) as connection:
        assert verdict_of(connection, hello, proof) == (verdict, NOTHING)
        assert ended(connection)
    assert still_serves(guarded)


def test_proof_with_one_flipped_bit_is_rejected(guarded):
    for bit in range(3, 256, 9):  # each byte, and each place in one
        with connect(guarded[0].name) as connection:
            mine = Hello(flags=SECRET, reached=address_of(connection))
            connection.sendall(mine.packed())
            theirs = hear_hello(connection)
            right = prove(OURS, "initiator", mine.packed(), theirs.packed())
            wrong = int.from_bytes(right, "little") ^ 1 << bit
            connection.sendall(wrong.to_bytes(32, "little"))
            assert hear_welcome(connection) == (OTHER_SECRET, NOTHING)


@pytest.fixture
def proxied():
    """An engine that is reached through a proxy, its region, and the proxy."""
    with Proxy("") as proxy:
        with TransferEngine(secret=OURS, secret_only=True, reached_at=[proxy.name]) as engine:
            proxy.target = engine.name
            yield engine, engine.register(untouched(SIZE)), proxy


def test_replayed_connection_is_rejected(proxied):
    engine, region, proxy = proxied
    guarded = engine, region
    with initiator(OURS) as other:
        mine = other.register(addressed(SIZE))
        other.write(other.open(proxy.name), [(mine.address, region.address, SIZE)]).wait()
        relay = proxy.relays[0]
    region._buffer.owner[:] = UNTOUCHED
    with connect(engine.name) as connection:  # to the target, as its initiator
        send_last(connection, bytes(relay.up.passed))
        hear_hello(connection)
        assert hear_welcome(connection) == (OTHER_SECRET, NOTHING)
    assert still_serves(guarded)

    def replay(connection):  # to an initiator, as its target
        connection.sendall(relay.down.passed)
        hear_hello(connection)
        receive_exactly(connection, 32)

    with raw_server(replay) as name, initiator(OURS) as other:
        assert cause_of_opening(other, name) == ANOTHER


@pytest.mark.parametrize("own_hello", [False, True])
def test_reflected_proof_is_rejected(own_hello):
    """A target that does not know the secret, and says what it is told."""

    def reflect(connection):
        theirs = hear_hello(connection)
        mine = Hello(flags=SECRET, link=0, epoch=0) if own_hello else theirs
        connection.sendall(mine.packed())
        connection.sendall(WELCOME.pack(WELCOMED, 0, receive_exactly(connection, 32)))

    with raw_server(reflect) as name, initiator(OURS) as engine:
        assert cause_of_opening(engine, name) == (ANOTHER if own_hello else ITSELF)


@pytest.mark.parametrize("flags", [0, SECRET])
def test_target_that_skips_the_proof_is_rejected(flags):
    def welcome(connection):
        hear_hello(connection)
        connection.sendall(Hello(flags=flags).packed() + WELCOME.pack(WELCOMED, 0, NOTHING))
        connection.recv(1)

    with raw_server(welcome) as name:
        with initiator(OURS) as engine:
            assert cause_of_opening(engine, name) == (ANOTHER if flags else NONE)
        if flags:
            with initiator(None) as engine:
                assert cause_of_opening(engine, name) == UNWANTED


ALTERED = {
    "name": lambda hello: replace(hello, name=b"x" + hello.name[1:]),
    "instance": lambda hello: replace(hello, instance=hello.instance ^ 1 << 63),
    "secret": lambda hello: replace(hello, flags=hello.flags & ~SECRET),
    "tls": lambda hello: replace(hello, flags=hello.flags ^ 2),
    "link": lambda hello: replace(hello, link=hello.link ^ 1),
    "epoch": lambda hello: replace(hello, epoch=hello.epoch + 1),
    "nonce": lambda hello: replace(hello, nonce=hello.nonce[::-1]),
    "dialled": lambda hello: replace(hello, dialled=b"10.0.0.1:1"),
    "reached": lambda hello: replace(hello, reached=b"10.0.0.1/1"),
    "version": lambda hello: replace(hello, version=1),
}


@pytest.mark.parametrize("side", ["initiator", "target"])
@pytest.mark.parametrize("what", ALTERED)
def test_tampered_hello_is_rejected(guarded, side, what):
    once = []

    def alter(data: bytes) -> bytes:
        if once:
            return data
        name_bytes = HELLO.unpack_from(data)[2]
        once.append(data)
        tail = TAIL.unpack_from(data, HELLO.size + name_bytes)
        size = HELLO.size + name_bytes + TAIL.size + tail[1] + tail[2]
        ends = socket.socketpair()
        with ends[0], ends[1]:
            ends[0].sendall(data[:size])
            return ALTERED[what](hear_hello(ends[1])).packed() + data[size:]

    alters = {"alter_up" if side == "initiator" else "alter_down": alter}
    with Proxy(guarded[0].name, **alters) as proxy, initiator(OURS) as engine:
        cause = cause_of_opening(engine, proxy.name)
    assert once and cause in (
        ANOTHER,
        NONE,
        UNWANTED,
        TLS_ONLY,
        NO_TLS,
        "the peer speaks wire version 1, this engine speaks 6",
        NOT_ITS_ADDRESS,  # of another try, which is not altered: it comes by the proxy
        "connection closed by peer",
    )
    assert still_serves(guarded)


@pytest.mark.parametrize("num_bytes", [0, 1, 23, 24, 28, 29, 60, 84, 85, 86, 100, 116])
def test_truncated_handshake_ends_the_connection(guarded, num_bytes):
    with connect(guarded[0].name) as connection:
        send_last(connection, (Hello(flags=SECRET).packed() + bytes(31))[:num_bytes])
        while connection.recv(1 << 10):
            pass
    assert still_serves(guarded)


def test_data_sent_along_with_the_handshake(guarded):
    """Requests sent along with a wrong proof are not looked at; behind a right one they count."""
    engine, region = guarded
    write = HEADER.pack(WRITE, 1, 1, 0, 4) + RANGE.pack(region.address, 4) + ZEROS + b"\xee" * 4
    with connect(engine.name) as connection:
        assert verdict_of(connection, Hello(flags=SECRET), bytes(32) + write * 1000)[0] == 3
        assert ended(connection)
    with connect(engine.name) as connection:
        mine = Hello(flags=SECRET, reached=address_of(connection))
        connection.sendall(mine.packed())
        theirs = hear_hello(connection)
        proof = prove(OURS, "initiator", mine.packed(), theirs.packed())
        connection.sendall(proof + b"\0" + write)  # a byte too many: the batch is none
        assert hear_welcome(connection)[0] == WELCOMED
        assert ended(connection)
    assert still_serves(guarded)


@pytest.mark.parametrize("cut", ["hello", "welcome"])
def test_truncated_handshake_response_fails_open(cut):
    def behave(connection):
        hear_hello(connection)
        hello = Hello(flags=SECRET).packed()
        if cut == "hello":
            return send_last(connection, hello[:-1])
        connection.sendall(hello)
        receive_exactly(connection, 32)
        send_last(connection, WELCOME.pack(0, 0, NOTHING)[:-1])

    with raw_server(behave) as name, initiator(OURS) as engine:
        assert cause_of_opening(engine, name) == "connection closed by peer"


@pytest.mark.parametrize("version", [1, 2, 3, 4, 5, 2**32 - 1])
@pytest.mark.parametrize("secret", [OURS, None])
def test_other_wire_version_is_answered_and_disconnected(secret, version):
    with TransferEngine(secret=secret) as engine, connect(engine.name) as connection:
        connection.sendall(HELLO.pack(MAGIC, version, 5, 7) + b"raw:1")
        assert hear_hello(connection).version == VERSION
        assert ended(connection)
        cause = f"the peer speaks wire version {version}, this engine speaks 6"
        assert engine.rejections() == {cause: 1}


def test_target_without_secret_rejects_a_secret():
    with TransferEngine() as engine, connect(engine.name) as connection:
        connection.sendall(Hello(flags=SECRET).packed() + bytes(32))
        assert hear_hello(connection).flags == 0
        assert hear_welcome(connection) == (UNWANTED_SECRET, NOTHING)
        assert ended(connection)
