"""Tickets and notifications: what a caller learns, and when."""

import asyncio
import contextlib
import errno
import gc
import os
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from mooncake_kernels import _host, config
from mooncake_kernels.errors import FailureKind, InvalidArgument, TransferError
from mooncake_kernels.transfer import TransferEngine

from .support import (
    WAIT_S,
    addressed,
    engine_pair,
    error_of,
    eventually,
    raw_server,
    stall,
    untouched,
)

SIZE = 1 << 20


@contextlib.contextmanager
def stalled_peer():
    """An engine with a region, and a peer that never answers."""
    with raw_server(stall) as name, TransferEngine() as engine:
        region = engine.register(addressed(SIZE))
        yield engine, engine.open(name), region


@pytest.mark.parametrize("size", [SIZE, (6 << 20) + 1], ids=["one piece", "several"])
@pytest.mark.parametrize("direction", ["write", "read"])
def test_notification_arrives_after_the_data(pair, direction, size):
    source, target = addressed(size), untouched(size)
    near, far = pair.regions(*((source, target) if direction == "write" else (target, source)))
    for i in range(20):
        target[:] = 0
        row = (near.address, far.address, size)
        ticket = getattr(pair.near, direction)(pair.peer, [row], notify=b"%d" % i)
        assert pair.far.receive_notifications(WAIT_S) == [(pair.near.name, b"%d" % i)]
        assert (target == source).all()
        ticket.wait()


def test_bare_notifications_keep_their_order(pair):
    messages = [b"", b"\0\xff", bytes(65536), *(b"%d" % i for i in range(100))]
    for message in messages:
        last = pair.near.write(pair.peer, [], notify=message)
    last.wait()
    assert last.num_bytes == 0
    assert pair.far.receive_notifications() == [(pair.near.name, message) for message in messages]
    assert pair.far.receive_notifications() == []


def test_full_notification_queue_rejects_the_sender(pair):
    with pytest.raises(TransferError, match="notification queue is full") as caught:
        for _ in range(1100):
            pair.near.write(pair.peer, [], notify=bytes(65536)).wait()
    assert caught.value.kind is FailureKind.BUSY
    assert len(pair.far.receive_notifications()) > 1000
    pair.near.write(pair.peer, [], notify=b"room again").wait()
    assert pair.far.receive_notifications() == [(pair.near.name, b"room again")]


def test_data_whose_notification_is_refused_has_arrived(pair):
    source, target = addressed(SIZE), untouched(SIZE)
    near, far = pair.regions(source, target)
    with pytest.raises(TransferError, match="notification queue is full"):
        for _ in range(1100):
            pair.near.write(pair.peer, [], notify=bytes(65536)).wait()
    row = (near.address, far.address, SIZE)
    error = error_of(pair.near.write(pair.peer, [row], notify=bytes(65536)))
    assert error.cause == "the peer's notification queue is full"
    assert error.num_bytes_done == SIZE
    assert (target == source).all()


def test_close_ends_wait_for_notifications():
    engine = TransferEngine()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(engine.receive_notifications, 2 * WAIT_S)
        time.sleep(0.05)
        engine.close()
        with pytest.raises(InvalidArgument, match="receive_notifications: the engine .*is closed"):
            waiting.result(WAIT_S)
    with pytest.raises(InvalidArgument, match="receive_notifications: the engine .*is closed"):
        engine.receive_notifications()


def test_wait_timeout_leaves_transfer_running():
    with stalled_peer() as (engine, peer, region):
        ticket = engine.write(peer, [(region.address, 1, SIZE)])
        with pytest.raises(TimeoutError, match=r"still under way after 0.01 s"):
            ticket.wait(0.01)
        for wrong in (-1, True, "1"):
            message = "timeout_s must be a finite number of seconds"
            with pytest.raises(InvalidArgument, match=message):
                ticket.wait(wrong)
        assert not ticket.done
        assert ticket.cancel()


@pytest.mark.parametrize("direction", ["write", "read"])
def test_deadline_fails_running_and_queued_transfers(direction):
    with stalled_peer() as (engine, peer, region):
        call = getattr(engine, direction)
        running = call(peer, [(region.address, 1, SIZE)], deadline_s=0.1)
        queued = call(peer, [(region.address, 1, SIZE)], deadline_s=0.05)
        assert error_of(queued).cause == "deadline of 0.05 s passed"
        error = error_of(running)
        assert error.cause == "deadline of 0.1 s passed"
        assert (error.num_bytes_done, error.num_bytes_total) == (0, SIZE)


def test_deadline_defaults_to_the_settings():
    with stalled_peer() as (engine, peer, region), config.override(deadline_s=0.125):
        ticket = engine.write(peer, [(region.address, 1, SIZE)])
        assert error_of(ticket).cause == "deadline of 0.125 s passed"


def test_done_notices_a_deadline_without_waiters():
    with stalled_peer() as (engine, peer, region):
        engine.write(peer, [(region.address, 1, SIZE)])
        queued = engine.write(peer, [(region.address, 1, SIZE)], deadline_s=0.01)
        eventually(lambda: queued.done)
        assert error_of(queued).cause == "deadline of 0.01 s passed"


def test_open_times_out_for_a_silent_peer():
    silent = raw_server(lambda connection: None)
    message = "deadline of 0[.]1 s passed"
    with silent as name, TransferEngine() as engine, pytest.raises(TransferError, match=message):
        engine.open(name, deadline_s=0.1)


@pytest.mark.parametrize("what", ["open", "wait", "receive_notifications"])
def test_ctrl_c_ends_a_wait(what):
    main = threading.main_thread().ident
    behave = stall if what == "wait" else lambda connection: None
    with raw_server(behave) as name, TransferEngine() as engine:
        if what == "wait":
            region = engine.register(addressed(SIZE))
            ticket = engine.write(engine.open(name), [(region.address, 1, SIZE)])
        wait = {
            "open": lambda: engine.open(name, deadline_s=2 * WAIT_S),
            "wait": lambda: ticket.wait(2 * WAIT_S),
            "receive_notifications": lambda: engine.receive_notifications(2 * WAIT_S),
        }[what]
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.1, signal.pthread_kill, [main, signal.SIGINT]).start()
            wait()
            pytest.fail("it was not interrupted")


@pytest.mark.parametrize("direction", ["write", "read"])
def test_cancel(direction):
    with stalled_peer() as (engine, peer, region):
        call = getattr(engine, direction)
        running = call(peer, [(region.address, 1, SIZE)])
        queued = call(peer, [(region.address, 1, SIZE)])
        assert queued.cancel()
        assert not running.done
        assert running.cancel()
        assert running.cancel(), "cancelling is idempotent"
        for ticket in running, queued:
            error = error_of(ticket)
            assert (error.cause, error.kind) == ("cancelled", FailureKind.CANCELLED)


def test_cancel_after_completion_has_no_effect(pair):
    near, far = pair.regions(addressed(SIZE), untouched(SIZE))
    ticket = pair.near.write(pair.peer, [(near.address, far.address, SIZE)])
    ticket.wait()
    assert not ticket.cancel()
    ticket.wait()


@pytest.mark.parametrize("transport", ["local", "shm", "tcp"])
@pytest.mark.usefixtures("one_lane")
def test_peer_is_usable_after_cancellation(transport):
    size = 16 << 20
    with engine_pair(transport) as pair:
        near, far = pair.regions(addressed(size), untouched(size))
        row = (near.address, far.address, size)
        for i in range(8):
            tickets = [pair.near.write(pair.peer, [row]) for _ in range(400)]
            if i % 2:
                eventually(lambda: tickets[i].done)  # noqa: B023
            cancelled = [ticket.cancel() for ticket in reversed(tickets)]  # the running one last
            assert cancelled == sorted(cancelled, reverse=True) and cancelled[0]
            for ticket in tickets[len(tickets) - sum(cancelled) :]:
                error = error_of(ticket)
                assert error.cause == "cancelled" and error.num_bytes_done <= error.num_bytes_total
            pair.near.write(pair.peer, [row]).wait()


def test_await(one_lane, pair):
    near, far = pair.regions(addressed(SIZE), untouched(SIZE))
    row = (near.address, far.address, SIZE)

    async def main():
        ticket = pair.near.write(pair.peer, [row])
        await ticket
        await ticket
        assert ticket.done and (far._buffer.owner == near._buffer.owner).all()
        far._buffer.owner[:] = 0
        await asyncio.gather(*(pair.near.write(pair.peer, [row]) for _ in range(50)))
        assert (far._buffer.owner == near._buffer.owner).all()
        with pytest.raises(TransferError, match="is not inside a registered region"):
            await pair.near.write(pair.peer, [(near.address, far.address + 1, SIZE)])

    asyncio.run(main())


@pytest.mark.parametrize("transport", ["local", "shm"])
def test_transfer_completed_on_return_is_awaitable(transport):
    """It has no state in the host code, and its ticket is like any other."""
    with engine_pair(transport) as pair:
        near, far = pair.regions(addressed(8), untouched(8))
        row = [(near.address, far.address, 8)]
        pair.near.write(pair.peer, row).wait()  # the peer's regions are known from now on
        others = []

        async def wait(ticket):
            asyncio.get_running_loop().call_soon(others.append, None)
            await ticket

        for verb in ("write", "read"):
            far._buffer.owner[:] = 0 if verb == "write" else near._buffer.owner
            ticket = getattr(pair.near, verb)(pair.peer, row)
            assert (far._buffer.owner == near._buffer.owner).all()
            assert (repr(ticket), ticket.num_bytes) == ("Ticket(8 bytes, over)", 8)
            assert ticket.done and not ticket.cancel()
            ticket.wait(0)
            with pytest.raises(InvalidArgument, match="timeout_s"):
                ticket.wait(-1)
            asyncio.run(wait(ticket))
        assert len(others) == 2, "an await of it did not let others run"
        counters = pair.near.stats()["peers"][pair.far.name]
        assert (counters["num_bytes_written"], counters["num_bytes_read"]) == (16, 8)


def test_awaiting_many_tickets_takes_one_descriptor():
    def num_descriptors():
        return len(os.listdir("/proc/self/fd"))

    with stalled_peer() as (engine, peer, region):

        async def main():
            tickets = [engine.write(peer, [(region.address, 1, SIZE)]) for _ in range(200)]
            before = num_descriptors()
            waiting = [asyncio.ensure_future(wait(ticket)) for ticket in tickets]
            await asyncio.sleep(0.01)
            assert num_descriptors() < before + 20  # other tests' may come and go
            waiting[7].cancel()
            await asyncio.wait(waiting[7:8])
            assert tickets[7].done and not tickets[8].done
            peer.close()
            ended = await asyncio.gather(*waiting, return_exceptions=True)
            assert isinstance(ended.pop(7), asyncio.CancelledError)
            assert {error.cause for error in ended} == {"the peer was closed"}

        async def wait(ticket):
            await ticket

        asyncio.run(main())


def test_await_without_free_descriptor_cancels_the_transfer(monkeypatch):
    def fail():
        raise OSError(errno.EMFILE, "eventfd")

    monkeypatch.setattr(_host, "TransferCompletionQueue", fail)
    with stalled_peer() as (engine, peer, region):

        async def main():
            ticket = engine.write(peer, [(region.address, 1, SIZE)])
            with pytest.raises(OSError, match="eventfd"):
                await ticket
            assert error_of(ticket).cause == "cancelled"

        asyncio.run(main())


def test_await_in_two_event_loops_at_once(pair):
    near, far = pair.regions(addressed(SIZE), untouched(SIZE))

    async def main(first):
        row = (near.address + first, far.address + first, SIZE // 2)
        for _ in range(20):
            ticket = pair.near.write(pair.peer, [row])
            await asyncio.gather(*[wait(ticket) for _ in range(3)])

    async def wait(ticket):
        await ticket

    with ThreadPoolExecutor(2) as threads:
        for loop in [threads.submit(asyncio.run, main(i * SIZE // 2)) for i in range(2)]:
            loop.result(WAIT_S)
    assert (far._buffer.owner == near._buffer.owner).all()


def test_event_loop_closed_during_await_is_freed():
    with stalled_peer() as (engine, peer, region):
        ticket = engine.write(peer, [(region.address, 1, SIZE)])

        async def wait():
            await ticket

        loop = asyncio.new_event_loop()
        task = loop.create_task(wait())
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        left = weakref.ref(loop)
        del loop, task
        gc.collect()
        assert left() is None
        assert error_of(ticket).cause == "cancelled"


def test_await_ends_at_deadline_or_task_cancellation():
    with stalled_peer() as (engine, peer, region):

        async def main():
            running = engine.write(peer, [(region.address, 1, SIZE)])
            with pytest.raises(TransferError, match=r"deadline of 0.05 s passed"):
                await engine.write(peer, [(region.address, 1, SIZE)], deadline_s=0.05)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(running, 0.05)
            assert error_of(running).cause == "cancelled"

        asyncio.run(main())


def test_a_ticket_knows_when_it_ended(pair):
    near, far = pair.regions(addressed(SIZE), untouched(SIZE))
    begin = time.monotonic()
    ticket = pair.near.write(pair.peer, [(near.address, far.address, SIZE)])
    ticket.wait()
    end = time.monotonic()
    time.sleep(0.05)
    assert ticket.ended_s is None or begin <= ticket.ended_s <= end


def test_a_ticket_under_way_has_no_end():
    with stalled_peer() as (engine, peer, region):
        ticket = engine.write(peer, [(region.address, 1 << 20, 8)])
        assert not ticket.done and ticket.ended_s is None
        before = time.monotonic()
        assert ticket.cancel()
        assert before <= ticket.ended_s <= time.monotonic()
