"""Request and replay of missed batches; the frames are vLLM's.

A request is ``(first number)``. Each answer is ``(topic, number, payload)``, or ``(number,
payload)`` with a publisher of the form ``array``, as earlier versions of vLLM and SGLang; the last
one has an empty payload and the number -1.
"""

import heapq
import itertools
import time
from collections import deque
from collections.abc import Iterator

import zmq

from .sockets import connected

NUMBER_BYTES = 8
END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
WAIT_S = 2.0  # for the next answer
MAX_EMPTY = 100_000  # empty batches of an answer: a day without changes

Numbered = tuple[int, bytes]  # a batch's number and payload


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
