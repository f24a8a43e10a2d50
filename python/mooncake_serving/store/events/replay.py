"""Request and replay of missed batches; the frames are vLLM's.

A request is ``(first number)``. Each answer is ``(topic, number, payload)``, or ``(number,
payload)`` with a publisher of the form ``array``, as earlier versions of vLLM and SGLang; the last
one has an empty payload and the number -1.
"""

import errno
import heapq
import itertools
import re
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import zmq

from mooncake_kernels.errors import InvalidArgument

MAX_HWM = 2**31 - 1  # an int of C
MAX_PORT = 65_535  # ZeroMQ takes others modulo 65,536
NOT_AN_ENDPOINT = (errno.EINVAL, errno.EPROTONOSUPPORT, errno.ENODEV, errno.ENOENT)
NUMBER_BYTES = 8
END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
WAIT_S = 2.0  # for the next answer
MAX_EMPTY = 100_000  # empty batches of an answer: a day without changes
Numbered = tuple[int, bytes]  # a batch's number and payload


def listening(kind: int, op: str, argument: str, endpoint: Any, hwm: int) -> zmq.Socket[bytes]:
    """Make a socket that others connect to.

    Raises:
        InvalidArgument: it is not a ZeroMQ endpoint.
        OSError: the address is in use, ...
    """
    return _opened(kind, op, argument, endpoint, hwm, zmq.Socket.bind)


def connected(
    kind: int,
    op: str,
    argument: str,
    endpoint: Any,
    hwm: int,
    *,
    ping_s: float = 0,
    gone_s: float = 0,
) -> zmq.Socket[bytes]:
    """Make a socket that connects, and reconnects as often as needed.

    Every ``ping_s`` seconds, unless that is 0, the other side is asked for a sign of life; after
    ``gone_s`` without any the socket connects anew.

    Raises:
        InvalidArgument: it is not a ZeroMQ endpoint.
    """

    def connect(socket: zmq.Socket[bytes], endpoint: str) -> None:
        socket.heartbeat_ivl, socket.heartbeat_timeout = int(ping_s * 1000), int(gone_s * 1000)
        socket.connect(endpoint)

    return _opened(kind, op, argument, endpoint, hwm, connect)


def as_topic(op: str, topic: Any) -> bytes:
    """Encode a topic.

    Raises:
        InvalidArgument: it is no text.
    """
    try:
        return topic.encode()
    except (AttributeError, UnicodeEncodeError):
        raise InvalidArgument(f"{op}: topic must be a str, got {topic!r:.80}") from None


def endpoint_of(socket: zmq.Socket[bytes]) -> str:
    """Return where a socket listens, with its port."""
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _opened(
    kind: int, op: str, argument: str, endpoint: Any, hwm: int, open_at: Any
) -> zmq.Socket[bytes]:
    if not isinstance(endpoint, str):
        raise InvalidArgument(f"{op}: {argument} must be a str, got {endpoint!r}")
    port = re.search(r":([0-9]+)$", endpoint) if endpoint.startswith("tcp://") else None
    if port is not None and int(port[1][:9]) > MAX_PORT:
        raise InvalidArgument(
            f"{op}: {argument} must have a port from 0 to {MAX_PORT}, got {endpoint!r:.80}"
        )
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.set_hwm(hwm)
    socket.linger = 0
    socket.ipv6 = endpoint.startswith("tcp://[")
    try:
        open_at(socket, endpoint)
    except zmq.ZMQError as error:
        socket.close()
        if error.errno in NOT_AN_ENDPOINT:
            raise InvalidArgument(
                f"{op}: {argument} must be an endpoint like tcp://127.0.0.1:5557, "
                f"got {endpoint!r:.80} ({error.strerror})"
            ) from None
        raise OSError(error.errno, f"{op}: {argument} {endpoint}: {error.strerror}") from None
    return socket


class KeptBatches:
    """The last batches of a publisher. For one thread.

    Of empty ones, which are many while nothing changes, only the numbers are kept: they displace no
    others. There is no batch of a number that was skipped.

    Args:
        num_batches: how many are kept, not counting empty ones.
    """

    def __init__(self, num_batches: int):
        self._batches: deque[Numbered] = deque(maxlen=num_batches)
        self._empty: deque[range] = deque(maxlen=num_batches + 1)  # if more, of skipped numbers
        self._empty_payload = b""

    def add(self, number: int, payload: bytes, *, is_empty: bool) -> None:
        """Keep a batch; its number is above those of all others."""
        if not is_empty:
            self._batches.append((number, payload))
            if len(self._batches) == self._batches.maxlen:  # what is older has a gap after it
                while self._empty and self._empty[0].stop < self._batches[0][0]:
                    self._empty.popleft()
            return
        self._empty_payload = payload
        first = number
        if self._empty and self._empty[-1].stop == number:
            first = self._empty.pop().start
        self._empty.append(range(first, number + 1))

    def since(self, first: int) -> Iterator[Numbered]:
        """Return those from a number on, in their order; of empty ones the last ``MAX_EMPTY``."""
        runs = [range(max(run.start, first), run.stop) for run in self._empty]
        too_many = max(0, sum(map(len, runs)) - MAX_EMPTY)
        empty = itertools.islice(itertools.chain(*runs), too_many, None)
        batches = (batch for batch in self._batches if batch[0] >= first)
        return heapq.merge(batches, ((number, self._empty_payload) for number in empty))


def answer_replay(socket: zmq.Socket[bytes], topic: bytes | None, kept: KeptBatches) -> None:
    """Answer one request; malformed ones are ignored. ``topic``: None for answers without one."""
    frames = socket.recv_multipart()
    if len(frames) != 3 or frames[1] or len(frames[2]) != NUMBER_BYTES:
        return
    client, delimiter, start = frames
    first = int.from_bytes(start, "big")
    head = (client, delimiter) if topic is None else (client, delimiter, topic)
    for number, payload in kept.since(first):
        socket.send_multipart((*head, number.to_bytes(NUMBER_BYTES, "big"), payload))
    end = (client, delimiter) if topic is None else (client, delimiter, b"")
    socket.send_multipart((*end, END, b""))


def request_replay(endpoint: str, first: int, hwm: int) -> Iterator[Numbered]:
    """Ask for all batches from a number on; yields them until the end, or until none arrives."""
    socket = connected(zmq.DEALER, "subscribe", "replay_endpoint", endpoint, hwm)
    try:
        socket.send_multipart((b"", first.to_bytes(NUMBER_BYTES, "big")))
        until = time.monotonic() + WAIT_S
        while socket.poll(max(0, int((until - time.monotonic()) * 1000))):
            frames = socket.recv_multipart()
            if len(frames) < 3 or len(frames[-2]) != NUMBER_BYTES:
                continue
            if frames[-2] == END:
                return
            yield int.from_bytes(frames[-2], "big"), frames[-1]
            until = time.monotonic() + WAIT_S
    finally:
        socket.close(linger=0)
