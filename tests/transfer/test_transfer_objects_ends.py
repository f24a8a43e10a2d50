"""Questions end: by closing, deadlines, broken connections."""

import threading

import pytest

from mooncake_kernels.errors import TransferError
from mooncake_kernels.transfer import TransferEngine

from .objects import (
    ABSENT,
    DONE,
    EXISTS,
    LARGE,
    content,
    here_fixture,  # noqa: F401
    serving,
    through,
)
from .support import WAIT_S, eventually


@pytest.mark.parametrize("whose", ["engine", "peer"])
@pytest.mark.parametrize("held", ["question", "answer"])
def test_close_ends_pending_object_requests(here, whose, held):
    with serving(2 * LARGE) as here:
        here.put(1, LARGE)
        with through(here) as (here, proxy):
            with here.ask(99):
                pass
            flow = proxy.relays[1].down
            flow.hold(0 if held == "question" else 100_000)
            before = flow.num_taken + (0 if held == "question" else 100_000)
            caught = []

            def work():
                try:
                    with here.ask(1) as reply:
                        reply.receive([[]], verify=True)
                except TransferError as error:
                    caught.append(error)

            thread = threading.Thread(target=work, daemon=True)
            thread.start()
            flow.wait(lambda flow: flow.num_taken > before)
            (here.near if whose == "engine" else here.peer).close()
            thread.join(WAIT_S)
            assert [error.cause for error in caught] == [f"the {whose} was closed"]
            assert not caught[0].timed_out
            flow.release()
        eventually(here.is_at_rest)


def test_closed_engine_in_same_process_fails_read():
    with TransferEngine() as near:
        far = TransferEngine()
        peer = near.open(far.name)
        assert peer.transport == "local"
        far.close()
        with pytest.raises(TransferError, match="the peer's engine was closed"):
            near.read_objects(peer, [(1, 7)])


def test_a_reply_outlives_its_engine():
    with serving(2 * LARGE) as here:
        here.put(1, LARGE)
        with here.ask(1) as reply:
            here.near.close()
            with pytest.raises(TransferError, match="the engine was closed"):
                reply.receive([[]], verify=True)
        eventually(here.is_at_rest)


@pytest.mark.parametrize("held", ["question", "answer"])
def test_deadlines(held):
    with serving(2 * LARGE) as here:
        data = here.put(1, LARGE).tobytes()
        with through(here) as (here, proxy):
            with here.ask(99):
                pass
            flow = proxy.relays[1].down
            flow.hold(0 if held == "question" else 100_000)
            with pytest.raises(TransferError) as caught:
                if held == "question":
                    here.ask(1, deadline_s=0.3)
                else:
                    with here.ask(1) as reply:
                        reply.receive([[]], verify=True, deadline_s=0.3)
            assert caught.value.timed_out and caught.value.cause == "deadline of 0.3 s passed"
            assert caught.value.peer == here.peer.name
            flow.release()
            assert here.read(1) == [data]  # by another connection
            assert len(proxy.relays) == 3
            eventually(here.is_at_rest)


def test_timed_out_write_stores_nothing(here):
    with through(here) as (here, proxy):
        with here.ask(99):
            pass
        up = proxy.relays[1].up
        up.hold(20_000)
        with pytest.raises(TransferError) as caught:
            here.write({1: content(1, 1 << 20)}, deadline_s=0.3)
        assert caught.value.timed_out
        eventually(lambda: here.pool.stats().num_writing == 1)
        assert here.read(1) == [ABSENT]
        proxy.cut()
        eventually(here.is_at_rest)
        assert here.stored(1) is None
        assert here.write({1: content(1, 1 << 20)}) == [DONE]


def test_idle_connection_lost_is_replaced(here):
    data = here.put(1, 1000).tobytes()
    with through(here) as (here, proxy):
        for ask, answer in (
            (lambda: here.read(1), [data]),
            (lambda: here.write({2: content(2, 10)}), [DONE]),
            (lambda: here.remove(2), [DONE]),
        ):
            assert here.read(1) == [data]
            proxy.cut()
            assert all(eventually(lambda r=relay: r.down.ended) for relay in proxy.relays)
            assert ask() == answer


def lost_on_the_way(here, proxy, direction: str, ask) -> list:
    """What comes of what is asked if the connection ends before it is heard, or answered."""
    with here.ask(99):
        pass
    flow = getattr(proxy.relays[-1], direction)
    flow.hold(0)
    before, results = flow.num_taken, []

    def work():
        try:
            results.append(ask())
        except TransferError as error:
            results.append(error.cause)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    flow.wait(lambda flow: flow.num_taken > before)
    proxy.cut()
    thread.join(WAIT_S)
    return results


@pytest.mark.parametrize("direction", ["up", "down"])
def test_lost_read_is_retried(here, direction):
    data = here.put(1, 1000).tobytes()
    with through(here) as (here, proxy):
        assert lost_on_the_way(here, proxy, direction, lambda: here.read(1)) == [[data]]


@pytest.mark.parametrize("direction", ["up", "down"])
def test_lost_write_is_not_retried(here, direction):
    with through(here) as (here, proxy):
        write = lambda: here.write({1: content(1, 1000)})  # noqa: E731
        assert lost_on_the_way(here, proxy, direction, write) == ["connection closed by peer"]
        assert write() == [DONE if direction == "up" else EXISTS]


def test_lost_removal_is_not_retried(here):
    """For who asks twice does not learn what the first time did."""
    here.put(1, 1000)
    with through(here) as (here, proxy):
        result = lost_on_the_way(here, proxy, "down", lambda: here.remove(1))
        assert result in ([[DONE]], ["connection closed by peer"])
