"""Request and replay of missed batches; the frames are vLLM's.

A request is ``(first number)``. Each answer is ``(topic, number, payload)``, or ``(number,
payload)`` with a publisher of the form ``array``, as earlier versions of vLLM and SGLang; the last
one has an empty payload and the number -1.
"""

import time
from collections.abc import Iterable, Iterator

import zmq

from .sockets import connected

NUMBER_BYTES = 8
END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
WAIT_S = 2.0  # for the next answer

Numbered = tuple[int, bytes]  # a batch's number and payload


def answer_replay(socket: zmq.Socket[bytes], topic: bytes | None, kept: Iterable[Numbered]) -> None:
    """Answer one request; malformed ones are ignored. ``topic``: None for answers without one."""
    frames = socket.recv_multipart()
    if len(frames) != 3 or frames[1] or len(frames[2]) != NUMBER_BYTES:
        return
    client, delimiter, start = frames
    first = int.from_bytes(start, "big")
    head = (client, delimiter) if topic is None else (client, delimiter, topic)
    for number, payload in kept:
        if number >= first:
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
