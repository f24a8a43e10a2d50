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

from .objects import DONE, LATE, UNLISTED, UNSURE, content, keys, serving
from .support import eventually

HEAD = b"*3\r\n$3\r\nRUN\r\n"
CLOCK_MS = 10**12


def keys_of(*numbers: int) -> np.ndarray:
    return np.array(keys(*numbers), np.uint64).reshape(-1, 2)


def asked_keys(command: bytes) -> np.ndarray:
    """The keys of a command, which must be of the right form."""
    assert command.startswith(HEAD + b"$")
    size, until, begin, packed = command[len(HEAD) :].split(b"\r\n", 3)
    now_ms = CLOCK_MS + time.monotonic() * 1000
    assert int(size[1:]) == len(until) and now_ms < int(until) < now_ms + 60_000
    assert packed[-2:] == b"\r\n" and int(begin[1:]) == len(packed) - 2
    return np.frombuffer(packed[:-2], np.uint64).reshape(-1, 2)


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
        yield RedisPublisher(os.dup(ours.fileno()), HEAD, timeout_s, CLOCK_MS), asked
    finally:
        for end in (ours, theirs):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        thread.join()
        ours.close()
        theirs.close()


@pytest.mark.parametrize("split", [1, 2, 5, 100])
def test_publish_sends_keys_and_parses_reply(split):
    reply = b"$3\r\n\0\1\0\r\n"
    parts = [reply[i : i + split] for i in range(0, len(reply), split)]
    with publishing(lambda _: parts) as (publisher, asked):
        for _ in range(2):
            listed = publisher.publish(keys_of(1, 2, 3))
            assert listed.tolist() == [True, False, True]
        assert publisher.publish(keys_of()).tolist() == [] and publisher.reason == ""
    assert [asked_keys(command).tolist() for command in asked] == [keys_of(1, 2, 3).tolist()] * 2


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([b"-NOSCRIPT no such script\r\n"], "unexpected answer: -NOSCRIPT no such script"),
        ([b"-", b"ERR x\r\n"], "unexpected answer: -"),
        ([b"$2\r\n\0\0\r\n"], "unexpected answer: "),
        ([b"$3\r\n\0\0\0\r\n+more"], "unexpected answer: "),
        ([b":5\r\n"], "unexpected answer: :5"),
        ([b"$-1\r\n"], "unexpected answer: "),
        ([b"$3\r\n\2\2\2\r\n"], "unexpected answer: "),
        ([], "the server has closed the connection"),
        ([b"$3\r\n\0"], "it does not answer in time"),
    ],
)
def test_unexpected_reply_ends_the_publisher(parts, reason):
    with publishing(lambda _: parts, timeout_s=0.3) as (publisher, asked):
        assert publisher.publish(keys_of(1, 2, 3)) is None
        assert publisher.reason.startswith(reason)
        assert publisher.publish(keys_of(1, 2, 3)) is None and len(asked) == 1


def even(command: bytes) -> list[bytes]:
    """The answer of a server that lists even keys."""
    answers = bytes(asked_keys(command)[:, 0].astype(np.uint8) % 2)
    return [b"$%d\r\n%b\r\n" % (len(answers), answers)]


def test_concurrent_publishes_share_one_command():
    """Each gets the answer to its own keys."""
    go_on, wrong = threading.Event(), []

    def answer(command: bytes) -> list[bytes]:
        go_on.wait(60)
        return even(command)

    def ask(publisher: RedisPublisher, first: int) -> None:
        for i in range(20):
            numbers = range(first + i, first + i + first % 5 + 1)
            listed = publisher.publish(keys_of(*numbers)).tolist()
            if listed != [number % 2 == 0 for number in numbers]:
                wrong.append((numbers, listed))

    with publishing(answer) as (publisher, asked):
        threads = [threading.Thread(target=ask, args=(publisher, i)) for i in range(8)]
        threads[0].start()
        eventually(lambda: len(asked) == 1)
        for thread in threads[1:]:
            thread.start()
        time.sleep(0.2)  # the others wait by then, at least some of them
        assert publisher.reason == "", "it does not wait for the answer"
        go_on.set()
        for thread in threads:
            thread.join()
        assert wrong == [] and len(asked) < 8 * 20


def test_failure_of_shared_command_reaches_all_callers():
    go_on = threading.Event()
    results = []

    def answer(command: bytes) -> list[bytes]:
        go_on.wait(60)
        return [b"-ERR\r\n"]

    with publishing(answer) as (publisher, asked):
        threads = [
            threading.Thread(target=lambda i=i: results.append(publisher.publish(keys_of(i))))
            for i in range(4)
        ]
        for thread in threads:
            thread.start()
        eventually(lambda: len(asked) == 1)
        go_on.set()
        for thread in threads:
            thread.join()
        assert results == [None] * 4 and len(asked) == 1


def test_publish_rejects_more_than_1024_keys():
    with publishing(even) as (publisher, _):
        assert publisher.publish(keys_of(*range(1024))).tolist() == [True, False] * 512
        with pytest.raises(InvalidArgument, match="publish: keys must be at most 1024, got 1025"):
            publisher.publish(keys_of(*range(1025)))
        assert publisher.reason == ""


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), 1e300])
def test_invalid_timeout_is_rejected(timeout_s):
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(InvalidArgument, match="timeout_s must be above 0"):
        RedisPublisher(os.dup(ours.fileno()), HEAD, timeout_s, 0)


def test_engine_stores_only_what_it_could_list():
    objects = {i: content(i, 1000 * i) for i in range(4)}
    with serving() as here:
        assert here.write(objects, publish=True) == [UNLISTED] * 4
        with publishing(lambda _: [b"$4\r\n\1\0\0\1\r\n"]) as (publisher, _):
            here.served.let_publish(publisher)
            assert here.write(objects, publish=True) == [UNLISTED, DONE, DONE, UNLISTED]
            assert [here.stored(i) is None for i in range(4)] == [True, False, False, True]
            assert here.stored(2) == objects[2].tobytes()
        assert not here.served.take().is_listed_in_vain
        assert here.write({9: content(9, 5)}, publish=True) == [UNSURE]  # it has gone
        assert publisher.reason
        assert here.served.take().is_listed_in_vain and not here.served.take().is_listed_in_vain
        here.served.let_publish(None)
        assert here.write({9: content(9, 5)}, publish=True) == [UNLISTED]
        assert here.write({9: content(9, 5)}) == [DONE]
        eventually(here.is_at_rest)
        with pytest.raises(InvalidArgument, match="let_publish: publisher must be a RedisPubl"):
            here.served.let_publish("redis://")


def test_a_writer_learns_whether_its_own_put_waited_to_no_effect():
    with serving() as here, publishing(lambda _: [b""], timeout_s=0.1) as (publisher, asked):
        here.served.let_publish(publisher)
        assert here.write({1: content(1, 50), 2: content(2, 50)}, publish=True) == [LATE] * 2
        assert here.served.take().is_listed_in_vain
        assert here.write({1: content(1, 50)}, publish=True) == [UNSURE]  # at once
        assert len(asked) == 1 and here.stored(1) is None


def test_stored_keys_are_not_published_again():
    with serving() as here, publishing(lambda _: [b"$1\r\n\0\r\n"]) as (publisher, asked):
        here.served.let_publish(publisher)
        assert here.write({1: content(1, 50)}) == [DONE]
        assert asked == []
        assert here.write({1: content(1, 50), 2: content(2, 50)}, publish=True)[1] == DONE
        assert len(asked) == 1  # the first one exists: there is nothing to list
