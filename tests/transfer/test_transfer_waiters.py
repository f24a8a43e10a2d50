"""Requests that the waiting thread carries out, with lanes if they are of several pieces; and what
if no thread waits.
"""

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from mooncake_kernels.errors import TransferError
from mooncake_kernels.transfer import TransferEngine

from ..threads import in_threads
from .support import WAIT_S, addressed, engine_pair, eventually, peer_process, untouched

SIZE = 1 << 20  # more than is moved at once when it is asked for, and one piece
ENDED = re.compile("cancelled|closed")
SEVERAL = (6 << 20) + 1  # of several pieces
SMALL = 4096  # over tcp the caller's thread sends it
SIZES = [SMALL, SIZE, SEVERAL]


def in_flight(pair):
    return pair.near.stats()["peers"][pair.far.name]["num_in_flight"]


def cause_of(outcome):
    """Why it failed; None if it did not."""
    try:
        outcome()
    except TransferError as error:
        return str(error)
    return None


def moved_by(pair, verb, num_bytes=SIZE):
    """Both memories, and a function that asks for all to be moved."""
    near, far = addressed(num_bytes), untouched(num_bytes)
    source, target = pair.regions(*((near, far) if verb == "write" else (far, near)))
    row = [(source.address, target.address, num_bytes)]
    return near, far, lambda **named: getattr(pair.near, verb)(pair.peer, row, **named)


@pytest.mark.parametrize("num_bytes", SIZES)
@pytest.mark.parametrize("verb", ["write", "read"])
def test_data_has_arrived_when_wait_returns(pair, verb, num_bytes):
    near, far, move = moved_by(pair, verb, num_bytes)
    for i in range(8):
        far[:] = i
        move().wait()
        assert np.array_equal(near, far)


@pytest.mark.parametrize("is_dropped", [False, True])
@pytest.mark.parametrize("num_bytes", SIZES)
def test_an_unwatched_request_is_moved(pair, num_bytes, is_dropped):
    near, far, move = moved_by(pair, "write", num_bytes)
    # Once, if dropped: stats() orders nothing, so a second pass would overwrite what a lane has
    # written with nothing between them.
    for _ in range(1 if is_dropped else 5):
        far[:] = 0xEE
        ticket = move()
        if is_dropped:
            del ticket
        eventually(lambda: in_flight(pair) == 0)
        assert np.array_equal(near, far) and (is_dropped or ticket.done)


@pytest.mark.parametrize("num_bytes", [SMALL, SIZE])
def test_polling_done_makes_progress(pair, num_bytes):
    near, far, move = moved_by(pair, "write", num_bytes)
    ticket = move()
    eventually(lambda: ticket.done)
    assert np.array_equal(near, far)


@pytest.mark.parametrize("verb", ["write", "read"])
def test_a_request_that_is_polled_only_once_is_moved(pair, verb):
    near, far, move = moved_by(pair, verb, SMALL)
    for i in range(5):
        far[:] = i
        ticket = move()
        _ = ticket.done
        eventually(lambda: in_flight(pair) == 0)
        assert ticket.done and np.array_equal(near, far)


@pytest.mark.parametrize("verb", ["write", "read"])
def test_threads_that_poll_and_threads_that_wait(pair, verb):
    near, far, move = moved_by(pair, verb, SMALL)
    with ThreadPoolExecutor(4) as threads:
        for i in range(50):
            far[:] = i
            ticket = move()
            polls = [threads.submit(eventually, lambda t=ticket: t.done) for _ in range(2)]
            for other in [*polls, *(threads.submit(ticket.wait) for _ in range(2))]:
                other.result(WAIT_S)
            assert np.array_equal(near, far)


def test_polling_finds_a_failure(pair):
    _, far, move = moved_by(pair, "read", SMALL)
    move().wait()
    with pytest.raises(TransferError, match="region"):
        ticket = pair.near.read(pair.peer, [(far.ctypes.data, 1 << 20, 8)])
        eventually(lambda: ticket.done)
        ticket.wait()


@pytest.mark.parametrize("num_bytes", [SIZE, SEVERAL])
@pytest.mark.parametrize("timeout_s", [0, 1e-4])
def test_short_wait_timeout_leaves_transfer_running(pair, num_bytes, timeout_s):
    near, far, move = moved_by(pair, "write", num_bytes)
    for i in range(8):
        far[:] = i
        ticket = move()
        try:
            ticket.wait(timeout_s)
        except TimeoutError:
            ticket.wait(WAIT_S)
        assert np.array_equal(near, far)


@pytest.mark.parametrize("num_bytes", SIZES)
def test_several_threads_wait_for_one_ticket(pair, num_bytes):
    near, far, move = moved_by(pair, "write", num_bytes)
    with ThreadPoolExecutor(4) as threads:
        for _ in range(8 if num_bytes > SMALL else 50):
            far[:] = 0xEE
            ticket = move()
            for wait in [threads.submit(ticket.wait) for _ in range(4)]:
                wait.result(WAIT_S)
            assert np.array_equal(near, far)


def test_waiting_in_reverse_order(pair):
    """It is not the first of the queue, and those before it go on."""
    near, far = addressed(6 * SIZE), untouched(6 * SIZE)
    source, target = pair.regions(near, far)
    for _ in range(10):
        far[:] = 0xEE
        tickets = [
            pair.near.write(pair.peer, [(source.address + at, target.address + at, SIZE)])
            for at in range(0, 6 * SIZE, SIZE)
        ]
        for ticket in reversed(tickets):
            ticket.wait()
        assert np.array_equal(near, far)


def test_own_notification_follows_the_data(pair):
    near, far, move = moved_by(pair, "write", SEVERAL)
    for i in range(8):
        near[:] = i
        ticket = move(notify=b"all")
        with ThreadPoolExecutor(1) as threads:
            wait = threads.submit(ticket.wait)
            assert pair.far.receive_notifications(WAIT_S) == [(pair.near.name, b"all")]
            assert (far == i).all()
            wait.result(WAIT_S)


@pytest.mark.parametrize("num_bytes", [SIZE, SEVERAL])
def test_later_notification_follows_the_data(pair, num_bytes):
    near, far, move = moved_by(pair, "write", num_bytes)
    for i in range(8):
        near[:] = i
        first = move()
        with ThreadPoolExecutor(1) as threads:
            wait = threads.submit(first.wait)
            last = pair.near.write(pair.peer, [], notify=b"all")
            assert pair.far.receive_notifications(WAIT_S) == [(pair.near.name, b"all")]
            assert (far == i).all()
            wait.result(WAIT_S)
            last.wait()


@pytest.mark.parametrize("num_bytes", [SIZE, SEVERAL])
@pytest.mark.parametrize("waits", [False, True])
def test_a_refusal_is_reported(pair, waits, num_bytes):
    near, far = addressed(num_bytes), untouched(num_bytes)
    source, target = pair.regions(near, far)
    ticket = pair.near.write(pair.peer, [(source.address, target.address + 1, num_bytes)])
    if not waits:
        eventually(lambda: in_flight(pair) == 0)
    with pytest.raises(TransferError, match=r"descriptors\[0\]|remote"):
        ticket.wait()
    assert (far == untouched(1)[0]).all()


def test_deadline_expired_before_wait_is_reported(pair):
    _, _, move = moved_by(pair, "write")
    ticket = move(deadline_s=1e-6)
    with pytest.raises(TransferError, match="deadline of 1e-06 s passed"):
        ticket.wait()


@pytest.mark.parametrize("num_bytes", [SIZE, SEVERAL])
@pytest.mark.parametrize("what", ["ticket", "peer", "region", "engine"])
@pytest.mark.parametrize("waits", [False, True])
def test_transfer_ends_when_its_region_peer_or_engine_closes(pair, what, waits, num_bytes):
    """Moved whole, or an error that says why; never neither."""
    for _ in range(4):
        near, far = addressed(num_bytes), untouched(num_bytes)
        with TransferEngine(transports=[pair.peer.transport]) as engine:
            source, target = engine.register(near), pair.far.register(far)
            peer = engine.open(pair.far.name)
            ticket = engine.write(peer, [(source.address, target.address, num_bytes)])
            ends = {"ticket": ticket.cancel, "peer": peer.close, "region": source.close}
            with ThreadPoolExecutor(1) as threads:
                wait = threads.submit(ticket.wait) if waits else None
                ends.get(what, engine.close)()
                for outcome in [wait.result, ticket.wait] if wait else [ticket.wait]:
                    cause = cause_of(outcome)
                    assert np.array_equal(near, far) if cause is None else ENDED.search(cause)
            target.close()


@pytest.mark.parametrize("num_bytes", [SIZE, SEVERAL])
def test_peer_killed_before_wait_fails_the_transfer(num_bytes):
    with (
        peer_process(num_bytes, shared=True) as process,
        TransferEngine(transports=["shm"]) as near,
    ):
        source = near.register(addressed(num_bytes))
        peer = near.open(process.name)
        row = [(source.address, process.address, num_bytes)]
        near.write(peer, row).wait()
        os.kill(process.process.pid, 9)
        process.process.join(WAIT_S)
        with pytest.raises(TransferError):
            near.write(peer, row, deadline_s=5).wait()


@pytest.mark.parametrize("num_bytes", SIZES)
def test_many_threads_wait_for_their_own_transfers(pair, num_bytes):
    num_threads = 8
    near, far = addressed(num_threads * num_bytes), untouched(num_threads * num_bytes)
    source, target = pair.regions(near, far)

    def move(i):
        part = slice(i * num_bytes, (i + 1) * num_bytes)
        row = [(source.address + part.start, target.address + part.start, num_bytes)]
        for k in range(10):
            far[part] = 0xEE
            ticket = pair.near.write(pair.peer, row)
            if k % 2:
                time.sleep(0)
            ticket.wait()
            assert np.array_equal(near[part], far[part])

    in_threads(*(partial(move, i) for i in range(num_threads)))


def test_descriptors_within_a_process_are_copied_in_order():
    """More of them than one piece has: each reads what the one before it has written."""
    count, size = 20_000, 16
    with engine_pair("local") as pair:
        memory = np.zeros((count + 1, 4 * size), np.uint8)
        source, target = pair.near.register(memory), pair.far.register(memory)
        steps = np.arange(count) * memory.shape[1]
        for i in range(1, 6):
            memory[0, :size] = i
            ticket = pair.near.write_blocks(
                pair.peer,
                source.address + steps,
                target.address + steps + memory.shape[1],
                size,
            )
            ticket.wait()
            assert (memory[:, :size] == i).all()
