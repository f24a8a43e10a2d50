"""The handshake of docs/internals/wire.md over a raw socket, written from the document alone."""

import hmac
import secrets
import socket
import struct
from dataclasses import dataclass, field, replace

VERSION = 6
MAGIC = b"MKTRNSFR"
HELLO = struct.Struct("<8sIIQ")  # magic, version, name_bytes, instance
TAIL = struct.Struct("<IHHQQ32s")  # flags, dialled_bytes, reached_bytes, link, epoch, nonce
WELCOME = struct.Struct("<II32s")  # verdict, zero, proof
SECRET, TLS = 1, 2  # flags
WELCOMED, NO_SECRET, UNWANTED_SECRET, OTHER_SECRET, NO_TLS, OLD_EPOCH, STILL_BUSY, FULL = range(8)
UNWANTED_TLS, OTHER_ADDRESS = 8, 9
NOTHING = bytes(32)


def receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = connection.recv(num_bytes - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def address_of(connection: socket.socket) -> bytes:
    """The address that a connection leads to, as a Hello has it."""
    name = connection.getpeername()
    if isinstance(name, bytes):  # within the machine
        return name.removeprefix(b"\0mooncake_kernels/")
    return f"{name[0]}/{name[1]}".encode()


@dataclass(frozen=True)
class Hello:
    """One side's; by default that of an initiator that connects for the first time."""

    name: bytes = b"raw:1"
    version: int = VERSION
    instance: int = 7
    flags: int = 0
    link: int = field(default_factory=lambda: secrets.randbits(64))
    epoch: int = 1
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    dialled: bytes = b""
    reached: bytes = b""

    def packed(self) -> bytes:
        prefix = HELLO.pack(MAGIC, self.version, len(self.name), self.instance)
        sizes = len(self.dialled), len(self.reached)
        tail = TAIL.pack(self.flags, *sizes, self.link, self.epoch, self.nonce)
        return prefix + self.name + tail + self.dialled + self.reached


def hear_hello(connection: socket.socket) -> Hello:
    magic, version, name_bytes, instance = HELLO.unpack(receive_exactly(connection, HELLO.size))
    assert magic == MAGIC
    name = receive_exactly(connection, name_bytes)
    flags, *sizes, link, epoch, nonce = TAIL.unpack(receive_exactly(connection, TAIL.size))
    addresses = [receive_exactly(connection, size) for size in sizes]
    return Hello(name, version, instance, flags, link, epoch, nonce, *addresses)


def prove(secret: bytes, side: str, initiators: bytes, targets: bytes, binding: bytes = NOTHING):
    key = hmac.digest(b"mooncake-kernels secret", secret, "sha256")
    label = f"mooncake-kernels {side}".encode().ljust(32, b"\0")
    return hmac.digest(key, label + binding + initiators + targets, "sha256")


class Frames:
    """The frames of a connection with a secret and without TLS, at the initiator's end."""

    def __init__(self, secret: bytes, initiators: bytes, targets: bytes):
        key = hmac.digest(b"mooncake-kernels secret", secret, "sha256")

        def key_of(side: str) -> bytes:
            label = f"mooncake-kernels {side} keys".encode().ljust(32, b"\0")
            return hmac.digest(key, label + initiators + targets, "sha256")

        self.keys = {side: key_of(side) for side in ("initiator", "target")}
        self.counts = dict.fromkeys(self.keys, 0)

    def mac(self, side: str, beginning: bytes, covered: bytes = b"") -> bytes:
        """Of that side's next frame."""
        self.counts[side] += 1
        number = struct.pack("<Q", self.counts[side])
        return hmac.digest(self.keys[side], number + beginning + covered, "sha256")

    def signed(self, header: bytes, covered: bytes = b"") -> bytes:
        """An initiator's header, with the MAC, and what that covers."""
        return header[:32] + self.mac("initiator", header[:32], covered) + covered

    def acknowledged(self, ack: bytes, covered: bytes = b"") -> bool:
        return ack[32:] == self.mac("target", ack[:32], covered)


def hear_welcome(connection: socket.socket) -> tuple[int, bytes]:
    verdict, zero, proof = WELCOME.unpack(receive_exactly(connection, WELCOME.size))
    assert zero == 0
    return verdict, proof


def begin(
    connection: socket.socket, secret: bytes | None = None, hello: Hello | None = None
) -> Hello:
    """An initiator's part; returns the target's Hello once it has accepted us."""
    return begin_both(connection, secret, hello)[1]


def begin_both(
    connection: socket.socket, secret: bytes | None = None, hello: Hello | None = None
) -> tuple[Hello, Hello]:
    """The same; returns both Hellos."""
    mine = hello or Hello()
    mine = replace(mine, reached=mine.reached or address_of(connection))
    if secret:
        mine = replace(mine, flags=mine.flags | SECRET)
    connection.sendall(mine.packed())
    theirs = hear_hello(connection)
    expected = NOTHING
    if secret:
        connection.sendall(prove(secret, "initiator", mine.packed(), theirs.packed()))
        expected = prove(secret, "target", mine.packed(), theirs.packed())
    assert hear_welcome(connection) == (WELCOMED, expected)
    return mine, theirs


def answer(
    connection: socket.socket, secret: bytes | None = None, verdict: int = WELCOMED
) -> Hello:
    """A target's part; returns the initiator's Hello."""
    theirs = hear_hello(connection)
    mine = Hello(flags=SECRET if secret else 0, link=0, epoch=0)
    connection.sendall(mine.packed())
    proof = NOTHING
    if secret:
        assert receive_exactly(connection, 32) == prove(
            secret, "initiator", theirs.packed(), mine.packed()
        )
        proof = prove(secret, "target", theirs.packed(), mine.packed())
    connection.sendall(WELCOME.pack(verdict, 0, proof))
    return theirs
