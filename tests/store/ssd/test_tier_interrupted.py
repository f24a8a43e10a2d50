"""Ctrl-C during a wait for the disk: nothing is in flight any more when the call has ended.

Uses stand-ins for tickets: a disk is too fast to be interrupted reliably.
"""

import contextlib
from threading import Event, Thread

import numpy as np
import pytest

from mooncake_kernels.errors import InvalidArgument, TransferError
from mooncake_kernels.pool import PutResult
from mooncake_serving.store.ssd import log
from mooncake_serving.store.ssd.disk import Disk
from mooncake_serving.store.ssd.index import Bucket, Index
from mooncake_serving.store.ssd.log import Appender, Log

from .support import PAGE, keys_of, open_tier, put, read, size_of

SIZE = 3
NUM_PUTS = 24  # which is more than a lap


class Late:
    """A ticket of what is moved when it is waited for, or some time, unless it is cancelled."""

    def __init__(self, waits, begin):
        self._waits, self._begin = waits, begin
        self.is_over = False
        self.num_interrupts = 0  # of who ends it, to come

    def wait(self):
        error = self._waits(self)
        if isinstance(error, KeyboardInterrupt):
            raise error  # it goes on
        self.land()
        if error is not None:
            raise error

    def land(self):
        if not self.is_over:
            self.is_over = True
            self._begin().wait()

    def cancel(self):
        self.is_over = True
        if self.num_interrupts:
            self.num_interrupts -= 1
            raise KeyboardInterrupt
        return True


@pytest.fixture
def interrupted(monkeypatch):
    """Replaces reads or writes of disks; returns their tickets.

    What waits for one raises what ``waits(ticket)`` returns.
    """

    def patch(name, waits):
        tickets, real = [], getattr(Disk, name)

        def begin(*args):
            tickets.append(Late(waits, lambda: real(*args)))
            return tickets[-1]

        monkeypatch.setattr(Disk, name, begin)
        return tickets

    return patch


def put_all(tier) -> set:
    """Put keys one by one, each until it is not interrupted; return those that were."""
    keys = set()
    for i in range(NUM_PUTS):
        for _ in range(2):
            try:
                assert put(tier, (i, 0)) != [PutResult.FULL]
                break
            except KeyboardInterrupt:
                keys.add((i, 0))
    return keys


def check(path, tier, tickets) -> None:
    """All that is there is right, now and after a death, also if late writes land."""
    there = keys_of(tier)
    for ticket in tickets:
        ticket.land()
    assert (NUM_PUTS - 1, 0) in there and read(tier, *there, verify=False) == there
    image = path.read_bytes()
    tier.close()
    path.write_bytes(image)
    with open_tier(path, SIZE) as tier:
        assert read(tier, *there) == keys_of(tier) == there


@pytest.mark.parametrize("again", [0, 2])
@pytest.mark.parametrize("number", range(60))
def test_interrupted_write(path, interrupted, number, again):
    """Whichever it is: of records, of heads, of footers; also again while that is ended."""
    num_waits = 0
    open_tier(path, SIZE).close()

    def waits(ticket):
        nonlocal num_waits
        num_waits += 1
        if num_waits != number:
            return None
        ticket.num_interrupts = again
        return KeyboardInterrupt()

    tickets = interrupted("write", waits)
    tier = open_tier(path, SIZE)
    assert len(put_all(tier)) == (1 <= number <= num_waits)
    num_waits = number  # from now on none is
    check(path, tier, tickets)


@pytest.mark.parametrize("number", range(40))
def test_interrupt_before_the_flush(path, monkeypatch, number):
    num_flushes, real = 0, Appender.flush

    def flush(appender):
        nonlocal num_flushes
        num_flushes += 1
        if num_flushes == number:
            raise KeyboardInterrupt
        real(appender)

    tier = open_tier(path, SIZE)
    monkeypatch.setattr(Appender, "flush", flush)
    assert len(put_all(tier)) == (1 <= number <= num_flushes)
    num_flushes = number
    check(path, tier, [])


@pytest.mark.parametrize("is_bad", [False, True], ids=["all at once", "each alone"])
def test_interrupted_read(path, interrupted, is_bad):
    """Also of those that are tried again, each alone, after one of them cannot be read."""
    keys, error = [(i, 0) for i in range(5)], TransferError("file", "reading: Input/output error")
    with open_tier(path) as tier:
        put(tier, *keys)
        tickets = interrupted(
            "read", lambda ticket: error if is_bad and ticket is tickets[0] else KeyboardInterrupt()
        )
        buffers = [np.zeros(size_of(key), np.uint8) for key in keys]
        with pytest.raises(KeyboardInterrupt):
            tier.get_into_each(keys, buffers)
        assert len(tickets) > 1 and all(ticket.is_over for ticket in tickets)


@pytest.mark.parametrize("number", range(8, 24))
def test_appended_data_of_an_interrupted_put_is_discarded(path, monkeypatch, number):
    """As where the footer of its bucket is, or the head of the file, by what comes next."""
    real, sizes = log.checksum, []

    def checksum(data):
        sizes.append(len(data))
        if len(sizes) == 2:
            raise KeyboardInterrupt
        return real(data)

    tier = open_tier(path, SIZE, retry_s=0)
    for i in range(number):
        put(tier, (i, 0))
    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(log, "checksum", checksum)
        put(tier, (101, 0), (102, 0))
    there = keys_of(tier)
    tier.close()
    with open_tier(path, SIZE, retry_s=0) as tier:
        assert read(tier, *there, verify=False) == keys_of(tier) == there
        sizes.clear()
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(log, "checksum", checksum)
            put(tier, (101, 0), (102, 0))
        tier.remove_all()
        assert put(tier, (1, 0)) == [PutResult.STORED]
    with open_tier(path, SIZE) as tier:
        assert read(tier, (1, 0)) == keys_of(tier) == {(1, 0)}


@pytest.fixture
def before(monkeypatch):
    """Lets Ctrl-C interrupt a call as it calls a function the nth time, or when that has ended."""

    def interrupt(call, kind, name, number=1, after=False):
        real, num_calls = getattr(kind, name), 0

        def stop(*args):
            nonlocal num_calls
            num_calls += 1
            if num_calls == number:
                if after:
                    real(*args)
                raise KeyboardInterrupt
            return real(*args)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(kind, name, stop)
            call()

    return interrupt


def reopened(path, tier):
    """A tier after a death of the other one."""
    image = path.read_bytes()
    tier.close()
    path.write_bytes(image)
    return open_tier(path, SIZE)


def test_next_put_does_not_store_objects_of_an_interrupted_one(path, before):
    tier = open_tier(path, SIZE)
    put(tier, (1, 0))
    before(lambda: put(tier, (2, 0), (3, 0)), Log, "flush")
    assert not tier.remove((2, 0))
    assert put(tier, (4, 0)) == [PutResult.STORED]
    there = {(1, 0), (4, 0)}
    assert keys_of(tier) == there and not tier.remove((3, 0))
    with reopened(path, tier) as tier:
        assert read(tier, *there) == keys_of(tier) == there


def test_next_put_does_not_apply_an_interrupted_removal(path, before):
    tier = open_tier(path, SIZE)
    put(tier, (1, 0))
    before(lambda: tier.remove((1, 0)), Log, "flush")
    assert put(tier, (4, 0)) == [PutResult.STORED]
    there = {(1, 0), (4, 0)}
    assert read(tier, *there) == keys_of(tier) == there
    with reopened(path, tier) as tier:
        assert read(tier, *there) == keys_of(tier) == there


def test_large_object_of_interrupted_put_is_removed_on_disk(path, before):
    """Before it is flushed, since it is larger than what is written at once."""
    with open_tier(path, SIZE) as tier:
        key = (6, 0)
        assert size_of(key) > 2 * PAGE
        before(lambda: put(tier, key), Appender, "add", 2, True)
        written = tier.stats().written_bytes
        assert not tier.remove(key) and tier.stats().written_bytes > written


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_interrupt_after_the_flush_keeps_the_objects(path, before, number, after):
    """Then it is stored, and can be removed."""
    keys = [(1, 0), (2, 0), (3, 0)]
    tier = open_tier(path, SIZE)
    before(lambda: put(tier, *keys), Index, "add", number, after)
    assert read(tier, *keys) == keys_of(tier) == set(keys)
    assert put(tier, (4, 0)) == [PutResult.STORED] and tier.remove(keys[number - 1])
    there = {(4, 0), *keys} - {keys[number - 1]}
    assert tier.stats().live_bytes == sum(map(size_of, there))
    with reopened(path, tier) as tier:
        assert read(tier, *there) == keys_of(tier) == there


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize(
    "kind,name", [(Bucket, "clear"), (Index, "remove_bucket"), (Log, "_begin_run")]
)
def test_interrupt_between_two_steps_of_the_next_bucket(path, before, kind, name, number, after):
    """No bucket is lost, and none is written that is in use."""
    tier = open_tier(path, SIZE)
    before(lambda: [put(tier, (i, 0)) for i in range(100)], kind, name, number, after)
    assert put(tier, *((i, 1) for i in range(40))) == [PutResult.STORED] * 40
    buckets, free = tier._buckets, list(tier._log._free)
    assert len(free) == 1 and free == [bucket for bucket in buckets if not bucket.sequence]
    there = keys_of(tier)
    assert read(tier, *there, verify=False) == there
    with reopened(path, tier) as tier:
        assert read(tier, *there) == keys_of(tier) == there


@pytest.mark.parametrize(
    "kind,name,number,after",
    [
        (Appender, "flush", 1, False),
        (Appender, "flush", 1, True),
        (Log, "_write_head", 1, True),
        (Index, "clear", 1, False),
        (Index, "clear", 1, True),
        (Bucket, "clear", 1, False),
        (Bucket, "clear", 2, True),
        (Log, "_begin", 1, False),
        (Log, "_begin", 1, True),
        (Disk, "sync", 1, False),
    ],
)
def test_interrupted_remove_all(path, before, kind, name, number, after):
    """All is there, or nothing, and what is put then is."""
    keys = [(i, 0) for i in range(8)]
    tier = open_tier(path, SIZE)
    put(tier, *keys)
    before_it = keys_of(tier)
    before(tier.remove_all, kind, name, number, after)
    assert put(tier, (1, 1)) == [PutResult.STORED]
    there = keys_of(tier)
    assert there in ({(1, 1)}, {(1, 1), *before_it})
    with reopened(path, tier) as tier:
        assert read(tier, *there) == keys_of(tier) == there


@pytest.mark.parametrize("kind,name", [(Index, "wait_unread"), (Log, "close"), (Disk, "sync")])
def test_interrupted_close_releases_the_file(path, before, kind, name):
    tier = open_tier(path, SIZE)
    put(tier, (1, 0))
    before(tier.close, kind, name)
    with open_tier(path, SIZE) as other:
        assert read(other, (1, 0)) == keys_of(other) == {(1, 0)}
        tier.close()  # again, which has no effect
        assert put(other, (2, 0)) == [PutResult.STORED]
    with pytest.raises(InvalidArgument, match="tier must be open"):
        put(tier, (2, 0))


def test_interrupted_close_during_a_read_releases_the_file(path, before, monkeypatch):
    """Then that fails, and says so."""
    begun, goes_on, ended = Event(), Event(), []
    tier, real = open_tier(path, SIZE), Disk.read

    def late(disk, moves):
        begun.set()
        assert goes_on.wait(60)
        return real(disk, moves)

    def get():
        with pytest.raises(Exception, match="engine"):
            tier.get_into_each([(7, 0)], [np.zeros(size_of((7, 0)), np.uint8)])
        ended.append(True)

    put(tier, (7, 0))
    with monkeypatch.context() as patch:
        patch.setattr(Disk, "read", late)
        reader = Thread(target=get)
        reader.start()
        assert begun.wait(60)
        before(tier.close, Index, "wait_unread")
        goes_on.set()
        reader.join()
    assert ended
    with open_tier(path, SIZE) as other:
        assert read(other, (7, 0)) == {(7, 0)}
