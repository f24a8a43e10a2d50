"""Shared by the tests of objects: an engine that serves a pool, and one that asks it."""

import contextlib
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from mooncake_kernels.pool import ObjectPool, ObjectPut, checksum_of
from mooncake_kernels.transfer import (
    WHOLE,
    ObjectsResponse,
    ObjectStatus,
    Peer,
    ServedPool,
    TransferEngine,
)

from .handshake import begin, receive_exactly
from .proxy import Proxy
from .support import ACK, HEADER, addressed, connect, eventually, untouched

ABSENT, DONE, DAMAGED, BUSY, DOES_NOT_FIT, TOO_LARGE, EXISTS, BEING_WRITTEN, FULL, *_ = ObjectStatus
ELSEWHERE, UNLISTED, UNSURE, LATE = tuple(ObjectStatus)[-4:]
MOST = 64 << 20  # that one answer brings, or one question
LARGE = 32 << 20  # more than sockets hold

ASK = 17
READ, WRITE, REMOVE = 1, 2, 3
SUMS, COMPARE = 1, 2
QUESTION = struct.Struct("<IIII16x")  # kind, flags, num_keys, zero
ENTRY = struct.Struct("<QQQQ")  # key, offset or num_bytes, num_bytes or checksum
KEY = struct.Struct("<QQ")
ANSWER = struct.Struct("<QQQII")  # object_bytes, num_bytes, checksum, status, zero
BIG = 2**64 - 1
SIZE = 5000


def key(number: int) -> tuple[int, int]:
    return number, 7


def keys(*numbers: int) -> list[tuple[int, int]]:
    return [key(number) for number in numbers]


def content(number: int, num_bytes: int) -> np.ndarray:
    return addressed(num_bytes) ^ np.uint8(number & 0xFF)


def place(array: np.ndarray) -> list[tuple[int, int]]:
    return [(array.ctypes.data, array.nbytes)]


@dataclass
class Serving:
    """An engine that serves a pool, and another one that asks it."""

    near: TransferEngine
    far: TransferEngine
    peer: Peer
    pool: ObjectPool
    served: ServedPool

    def put(self, number: int, num_bytes: int, checksum: bool = True) -> np.ndarray:
        data = content(number, num_bytes)
        self.pool.put_from(key(number), data, checksum=checksum)
        return data

    def begin(self, number: int, num_bytes: int) -> ObjectPut:
        put = self.pool.begin(key(number), num_bytes)
        assert isinstance(put, ObjectPut)
        return put

    def ask(self, *numbers: int, **options) -> ObjectsResponse:
        return self.near.read_objects(self.peer, keys(*numbers), **options)

    def read(self, *numbers: int, verify: bool = True, **options) -> list:
        """The result of each: its bytes, False if these are wrong, or a status."""
        return read(self.near, self.peer, keys(*numbers), verify, **options)

    def write(self, objects: dict[int, np.ndarray], **options) -> list[int]:
        places = [place(data) for data in objects.values()]
        return self.near.write_objects(self.peer, keys(*objects), places, **options).tolist()

    def remove(self, *numbers: int) -> list[int]:
        return self.near.remove_objects(self.peer, keys(*numbers)).tolist()

    def stored(self, number: int) -> bytes | None:
        with contextlib.ExitStack() as stack:
            pin = self.pool.pin(key(number))
            return pin and bytes(stack.enter_context(pin).view)

    def damage(self, number: int, at: int = 0) -> None:
        with self.pool.pin(key(number), touch=False) as pin:
            start = pin.tensor().data_ptr() - self.pool.memory().data_ptr()
            self.pool.memory()[start + at] ^= 1

    def is_at_rest(self) -> bool:
        stats = self.pool.stats()
        return (stats.num_pins, stats.num_writing) == (0, 0)


def read(engine: TransferEngine, peer: Peer, wanted: list, verify: bool = True, **options) -> list:
    with engine.read_objects(peer, wanted, **options) as reply:
        sizes = reply.object_bytes.tolist()
        for i, offset in enumerate(options.get("offsets") or ()):
            sizes[i] = sizes[i] if offset == WHOLE else options["sizes"][i]
        done = [status == DONE for status in reply.statuses]
        arrays = [untouched(size * is_done) for size, is_done in zip(sizes, done, strict=True)]
        is_right = reply.receive([place(array) for array in arrays], verify=verify)
        return [
            (array.tobytes() if right else False) if is_done else ObjectStatus(status)
            for array, right, is_done, status in zip(
                arrays, is_right, done, reply.statuses, strict=True
            )
        ]


@contextlib.contextmanager
def serving(
    capacity: int = 8 << 20,
    transport: str = "tcp",
    *,
    pool: dict | None = None,
    near: dict | None = None,
    far: dict | None = None,
    **options,
) -> Iterator[Serving]:
    options = {"may_write": True, **options}
    objects = ObjectPool.create(capacity, **(pool or {}))
    with TransferEngine(transports=[transport], **(near or {})) as one:
        with TransferEngine(**(far or {})) as other, one.open(other.name) as peer:
            assert peer.transport == transport
            yield Serving(one, other, peer, objects, other.serve(objects, **options))
    stats = objects.stats()
    assert (stats.num_pins, stats.num_writing, stats.num_doomed) == (0, 0, 0)


@pytest.fixture(name="here")
def here_fixture():
    with serving() as both:
        yield both


@pytest.fixture(name="kept", scope="module")
def kept_fixture():
    """A pair that serves throughout: object 1, of which the tests read ranges."""
    with serving() as both:
        both.put(1, 100_000)
        yield both


@contextlib.contextmanager
def through(proxy_of: Serving):
    """The same, with a proxy in between; yields the proxy as well."""
    both = proxy_of
    with Proxy(both.far.name) as proxy, both.near.open(proxy.name) as peer:
        yield Serving(both.near, both.far, peer, both.pool, both.served), proxy


# By hand, over raw sockets.


class Target:
    """An engine that serves a pool with object 1."""

    def __init__(self, engine: TransferEngine):
        self.engine = engine
        self.pool = ObjectPool.create(256 << 20, num_objects=2048)
        self.data = addressed(SIZE).tobytes()
        self.pool.put_from((1, 7), self.data)
        self.served: ServedPool = engine.serve(self.pool, may_write=True)

    def connect(self) -> socket.socket:
        connection = connect(self.engine.name)
        begin(connection)
        return connection

    def is_at_rest(self) -> bool:
        stats = self.pool.stats()
        return (stats.num_pins, stats.num_writing, stats.num_doomed) == (0, 0, 0)


def question(kind: int, *entries: tuple, flags: int = 0, zero: int = 0, count=None) -> bytes:
    layout = KEY if kind == REMOVE else ENTRY
    count = len(entries) if count is None else count
    return QUESTION.pack(kind, flags, count, zero) + b"".join(layout.pack(*e) for e in entries)


def frame(asked: bytes, payload: bytes = b"", request: int = 1) -> bytes:
    return HEADER.pack(ASK, 0, request, len(asked), len(asked) + len(payload)) + asked + payload


def answer_to(connection: socket.socket, asked: bytes, payload: bytes = b"") -> bytes:
    connection.sendall(frame(asked, payload))
    return hear_answer(connection)


def hear_answer(connection: socket.socket, request: int = 1) -> bytes:
    status, refusal_bytes, answered, num_bytes = ACK.unpack(receive_exactly(connection, ACK.size))
    assert (status, refusal_bytes, answered) == (0, 0, request)
    return receive_exactly(connection, num_bytes)


def statuses(answer: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(answer) // 4}I", answer))


def is_good(connection: socket.socket, target: Target) -> bool:
    answer = answer_to(connection, question(READ, (1, 7, WHOLE, BIG)))
    row = ANSWER.pack(SIZE, SIZE, checksum_of(target.data), ObjectStatus.DONE, 0)
    return answer == row + target.data


def still_serves(target: Target) -> bool:
    with target.connect() as connection:
        return is_good(connection, target) and eventually(target.is_at_rest)
