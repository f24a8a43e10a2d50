"""What an engine lists objects with, against a server that a test plays."""

import contextlib
import os
import socket
import threading
import time

import numpy as np
import pytest

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.transfer import RedisPublisher

from .objects import DONE, UNLISTED, content, keys, serving
from .support import eventually

HEAD = b"*2\r\n$3\r\nRUN\r\n"


def keys_of(*numbers: int) -> np.ndarray:
    return np.array(keys(*numbers), np.uint64)


@contextlib.contextmanager
def publishing(answer, timeout_s: float = 20.0):
    """A publisher, and a server that sends some parts for each command; yields both sides."""
    ours, theirs = socket.socketpair()
    asked = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while command := theirs.recv(1 << 20):
                asked.append(command)
                parts = answer(command)
                for part in parts:
                    theirs.sendall(part)
                    time.sleep(0.001)
                if parts == []:
                    theirs.shutdown(socket.SHUT_RDWR)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield RedisPublisher(os.dup(ours.fileno()), HEAD, timeout_s), asked
    finally:
        for end in (ours, theirs):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        thread.join()


@pytest.mark.parametrize("split", [1, 2, 5, 100])
def test_what_is_asked_and_answered(split):
    reply = b"$3\r\n\0\1\0\r\n"
    parts = [reply[i : i + split] for i in range(0, len(reply), split)]
    with publishing(lambda _: parts) as (publisher, asked):
        for _ in range(2):
            listed = publisher.publish(keys_of(1, 2, 3))
            assert listed.tolist() == [True, False, True]
        assert publisher.reason == ""
    packed = keys_of(1, 2, 3).tobytes()
    assert asked == [HEAD + b"$48\r\n" + packed + b"\r\n"] * 2


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([b"-NOSCRIPT no such script\r\n"], "unexpected answer: -NOSCRIPT no such script"),
        ([b"-", b"ERR x\r\n"], "unexpected answer: -"),
        ([b"$2\r\n\0\0\r\n"], "unexpected answer: "),
        ([b"$3\r\n\0\0\0\r\n+more"], "unexpected answer: "),
        ([b":5\r\n"], "unexpected answer: :5"),
        ([b"$-1\r\n"], "unexpected answer: "),
        ([], "the server has closed the connection"),
        ([b"$3\r\n\0"], "it does not answer in time"),
    ],
)
def test_an_unexpected_answer_ends_it(parts, reason):
    with publishing(lambda _: parts, timeout_s=0.3) as (publisher, asked):
        assert publisher.publish(keys_of(1, 2, 3)) is None
        assert publisher.reason.startswith(reason)
        assert publisher.publish(keys_of(1, 2, 3)) is None and len(asked) == 1


def test_one_connection_serves_many_threads():
    """Each gets the answer to its own question."""

    def answer(command: bytes) -> list[bytes]:
        number = int.from_bytes(command.split(b"\r\n", 4)[4][:8], "little")
        return [b"$1\r\n%c\r\n" % (number % 2)]

    wrong = []

    def ask(publisher: RedisPublisher, number: int) -> None:
        for _ in range(20):
            if publisher.publish(keys_of(number)).tolist() != [number % 2 == 0]:
                wrong.append(number)

    with publishing(answer) as (publisher, _):
        threads = [threading.Thread(target=ask, args=(publisher, i)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_an_engine_stores_what_it_can_list():
    objects = {i: content(i, 1000 * i) for i in range(4)}
    with serving() as here:
        assert here.write(objects, publish=True) == [UNLISTED] * 4
        with publishing(lambda _: [b"$4\r\n\1\0\0\1\r\n"]) as (publisher, _):
            here.served.let_publish(publisher)
            assert here.write(objects, publish=True) == [UNLISTED, DONE, DONE, UNLISTED]
            assert [here.stored(i) is None for i in range(4)] == [True, False, False, True]
            assert here.stored(2) == objects[2].tobytes()
        assert here.write({9: content(9, 5)}, publish=True) == [UNLISTED]  # it has gone
        assert publisher.reason
        here.served.let_publish(None)
        assert here.write({9: content(9, 5)}, publish=True) == [UNLISTED]
        assert here.write({9: content(9, 5)}) == [DONE]
        assert eventually(here.is_at_rest)
        with pytest.raises(InvalidArgument, match="let_publish: publisher must be a RedisPubl"):
            here.served.let_publish("redis://")


def test_what_is_stored_already_is_not_listed_again():
    with serving() as here, publishing(lambda _: [b"$1\r\n\0\r\n"]) as (publisher, asked):
        here.served.let_publish(publisher)
        assert here.write({1: content(1, 50)}) == [DONE]
        assert asked == []
        assert here.write({1: content(1, 50), 2: content(2, 50)}, publish=True)[1] == DONE
        assert len(asked) == 1  # the first one exists: there is nothing to list
