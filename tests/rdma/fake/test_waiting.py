"""Waiting for completions: what wakes it, and what does not."""

import errno
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from mooncake_kernels import InvalidArgument, TransferError

from ...waiting import eventually

FOR_EVER = 60.0


class Waiter:
    """A thread in a call; `result()` is what came of it."""

    def __init__(self, call):
        self._ended = []
        self._thread = threading.Thread(target=self._run, args=(call,))
        self._thread.start()

    def _run(self, call):
        try:
            self._ended.append(call())
        except Exception as error:  # noqa: BLE001
            self._ended.append(error)

    def result(self):
        self._thread.join()
        return self._ended[0]


def test_completion_wakes_a_waiter(world, connection):
    """Whatever was in the queue when it was armed, and whatever comes later."""
    near = connection.near
    for _ in range(50):
        waiter = Waiter(lambda: near.queue.poll(timeout_s=FOR_EVER))
        token = connection.write([(0, 0, 8)])
        assert [e.token for e in waiter.result()] == [token]


def test_software_completion_wakes_a_waiter(world, connection):
    near = connection.near
    with world.held():
        token = connection.write([(0, 0, 8)])
        waiter = Waiter(lambda: near.queue.poll(timeout_s=FOR_EVER))
        near.pair.close()
        [ended] = waiter.result()
    assert (ended.token, ended.status) == (token, "closed")


def test_empty_transfer_completes_at_once(connection):
    token = connection.write([])
    assert [(e.token, e.ok) for e in connection.near.queue.poll()] == [(token, True)]


def test_empty_transfer_completes_after_earlier_ones(world, connection):
    with world.held():
        tokens = [connection.write([(0, 0, 8)]), connection.write([]), connection.read([])]
        assert connection.near.queue.poll() == []
    assert [e.token for e in connection.near.drain()] == tokens


def test_completions_for_other_waiters_are_kept(world, connection):
    near = connection.near
    first, second, third = (connection.write([(0, 0, 8)]) for _ in range(3))
    assert near.queue.wait(second).token == second
    told = Waiter(lambda: near.queue.wait(third, timeout_s=FOR_EVER)).result()
    assert told.token == third
    assert [completion.token for completion in near.queue.poll()] == [first]
    for token in (first, 12345, -1, "x"):
        with pytest.raises(InvalidArgument, match="token must be of a transfer of this queue"):
            near.queue.wait(token)


def test_timed_out_or_failed_wait_loses_no_completions(world, connection):
    near = connection.near
    with world.held() as let:
        first, second = connection.write([(0, 0, 8)]), connection.write([(8, 8, 8)])
        let(1)
        with pytest.raises(TimeoutError):
            near.queue.wait(second, timeout_s=0)
        assert near.queue.wait(first, timeout_s=0).ok
    world.fail_work("remote access error")
    third, fourth = connection.write([(0, 0, 8)]), connection.write([(8, 8, 8)])
    with pytest.raises(TransferError):
        near.queue.wait(third)
    assert {completion.token for completion in near.drain()} == {second, fourth}


@pytest.mark.parametrize("num_threads", [1, 3])
def test_close_wakes_a_waiter(connection, num_threads):
    near = connection.near
    waiters = [Waiter(lambda: near.queue.poll(timeout_s=FOR_EVER)) for _ in range(num_threads)]
    near.queue.close()
    for waiter in waiters:
        error = waiter.result()
        assert isinstance(error, InvalidArgument), error
        assert "completion queue of fake0 must be open, but is closed" in str(error)


def test_wait_and_poll_time_out(world, connection):
    near = connection.near
    assert near.queue.poll(timeout_s=0.01) == []
    with world.held():
        token = connection.write([(0, 0, 8)])
        with pytest.raises(TimeoutError, match=f"transfer {token} is not over after 0.01 s"):
            near.queue.wait(token, timeout_s=0.01)
    assert near.queue.wait(token).ok  # it went on


def test_poll_fails_when_the_queue_cannot_be_armed(world, connection):
    world.fail("ibv_req_notify_cq", errno.EIO)
    with pytest.raises(OSError, match="ibv_req_notify_cq: fake0"):
        connection.near.queue.poll(timeout_s=FOR_EVER)


def test_nic_removed_during_a_wait(world, connection):
    """Its channel is readable for ever then, and has nothing to read."""
    near = connection.near
    near.queue._handle.wait(0.0, 0.0)  # arms
    connection.write([(0, 0, 8)])
    near.drain()
    world.fail("ibv_get_cq_event", errno.EIO, count=1000)
    with pytest.raises(OSError, match="ibv_get_cq_event: fake0") as caught:
        near.queue.poll(timeout_s=FOR_EVER)
    assert caught.value.errno == errno.EIO and world.calls("ibv_get_cq_event") == 1


def test_many_events_are_acknowledged(world, connection):
    near = connection.near
    for _ in range(1100):
        near.queue._handle.wait(0.0, 0.0)  # arms
        token = connection.write([(0, 0, 8)])
        while not near.queue._handle.wait(FOR_EVER, 0.0):
            pass
        assert [e.token for e in near.queue.poll()] == [token]


def test_concurrent_pollers_share_completions(world, connection):
    near = connection.near
    num_transfers, found, lock = 400, [], threading.Lock()

    def collect():
        while True:
            with lock:
                if len(found) >= num_transfers:
                    return
            new = near.queue.poll(timeout_s=0.02)
            with lock:
                found.extend(e.token for e in new)

    threads = [threading.Thread(target=collect) for _ in range(3)]
    for thread in threads:
        thread.start()
    tokens = [connection.write([(i, i, 1), (5 * i, 7 * i, 2)]) for i in range(num_transfers)]
    for thread in threads:
        thread.join()
    assert sorted(found) == tokens


def test_wait_raises_the_transfer_error(world, connection):
    world.fail_work("remote access error")
    with pytest.raises(TransferError, match="transfer with queue pair .*: remote access error"):
        connection.near.queue.wait(connection.write([(0, 0, 8)]))


DEADLINE = 20.0  # of what takes no time, unless nothing but the end of a wait wakes it


@pytest.fixture
def without_slices(monkeypatch):
    """Nothing wakes those who wait but what they wait for."""
    monkeypatch.setattr("mooncake_kernels.rdma.completion_queue.SIGNAL_CHECK_S", FOR_EVER)


class Handle:
    """A queue's, of which a test replaces calls."""

    def __init__(self, handle, **calls):
        self._handle = handle
        self.__dict__.update(calls)

    def __getattr__(self, name):
        return getattr(self._handle, name)


def until_one_sleeps(queue) -> None:
    eventually(lambda: queue._is_sleeping)


def test_one_poll_wakes_all_waiters(world, connection, without_slices):
    """One of them polls, and finds what the others wait for."""
    queue, results = connection.near.queue, []
    with world.held() as let:
        tokens = [connection.write([(64 * i, 64 * i, 64)]) for i in range(4)]

        def wait(token: int) -> None:
            results.append(queue.wait(token, timeout_s=FOR_EVER).token)

        threads = [threading.Thread(target=wait, args=(token,)) for token in tokens]
        for thread in threads:
            thread.start()
        until_one_sleeps(queue)
        let(4)
        deadline = time.monotonic() + DEADLINE
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0))
        in_time = sorted(results)
    for thread in threads:
        thread.join()
    assert in_time == tokens


@pytest.mark.parametrize("waits", [True, False])
def test_sleeping_waiter_gets_completion_polled_by_another(
    world, connection, without_slices, waits
):
    queue, results = connection.near.queue, []
    with world.held():
        mine, other = connection.write([(0, 0, 8)]), connection.write([(8, 8, 8)])

        def wait() -> None:
            if waits:
                results.append(queue.wait(mine, timeout_s=FOR_EVER).token)
            else:
                results.extend(e.token for e in queue.poll(timeout_s=FOR_EVER))

        sleeper = threading.Thread(target=wait)
        sleeper.start()
        until_one_sleeps(queue)
        found = [[(False, mine, 17, 0, 0, 0, 8)]]
        handle, queue._handle = (
            queue._handle,
            Handle(queue._handle, poll=lambda _: found.pop() if found else []),
        )
        with pytest.raises(TimeoutError):
            queue.wait(other, timeout_s=0)
        sleeper.join(DEADLINE)
        in_time = list(results)
        queue._handle = handle
    sleeper.join()
    assert in_time == [mine]


def test_timed_out_sleeper_hands_over_to_another_waiter(world, connection, without_slices):
    """The time of the one that sleeps is up; the others must not sleep on."""
    queue, results = connection.near.queue, []
    with world.held() as let:
        first, second = connection.write([(0, 0, 8)]), connection.write([(8, 8, 8)])
        sleeper = Waiter(lambda: queue.wait(second, timeout_s=2.0))
        until_one_sleeps(queue)
        other = threading.Thread(
            target=lambda: results.append(queue.wait(first, timeout_s=FOR_EVER).token)
        )
        other.start()
        eventually(lambda: queue._changed._waiters)
        assert isinstance(sleeper.result(), TimeoutError)
        let(1)
        other.join(DEADLINE)
        in_time = list(results)
    other.join()
    assert in_time == [first]


def test_close_wakes_all_waiters(world, connection, without_slices):
    queue = connection.near.queue
    with world.held():
        tokens = [connection.write([(8 * i, 8 * i, 8)]) for i in range(3)]
        waiters = [Waiter(lambda t=t: queue.wait(t, timeout_s=FOR_EVER)) for t in tokens]
        until_one_sleeps(queue)
        queue.close()
        for waiter in waiters:
            assert isinstance(waiter.result(), (InvalidArgument, TransferError))


class Interrupted(Exception):
    """What the handler of a signal raises, as that of Ctrl-C does."""


def interrupted(call, num_places: int) -> bool:
    """Interrupt a call at that place of those where Python runs handlers; False: it has fewer."""
    left = num_places

    def profile(frame, event, _arg) -> None:
        nonlocal left
        here = frame.f_code.co_filename.endswith(("completion_queue.py", "threading.py"))
        if here and event in ("call", "c_return"):
            left -= 1
            if left == 0:
                raise Interrupted

    sys.setprofile(profile)
    try:
        call()
    except Interrupted:
        return True
    finally:
        sys.setprofile(None)
    return False


def test_interrupted_poll_leaves_the_queue_usable(connection):
    """Otherwise all later calls would wait: for the lock, or for a thread that does not sleep."""
    queue, num_places, left = connection.near.queue, 1, []
    while interrupted(lambda: queue.poll(timeout_s=0.001), num_places):
        locked = queue._lock.locked()
        if locked or queue._is_sleeping:
            left.append((num_places, locked, queue._is_sleeping))
            queue._is_sleeping = False
            if locked:
                queue._lock.release()
        num_places += 1
    assert num_places > 10 and not left


def test_wait_spins_only_at_its_start(monkeypatch, connection):
    """And not that of each of the slices that it consists of."""
    monkeypatch.setattr("mooncake_kernels.rdma.completion_queue.SIGNAL_CHECK_S", 0.01)
    queue, spins, now = connection.near.queue, [], 0.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("mooncake_kernels.rdma.completion_queue.time", clock)
    handle = queue._handle

    def wait(timeout_s: float, spin_s: float) -> bool:
        nonlocal now
        spins.append(spin_s)
        now += timeout_s
        return False

    queue._handle = Handle(handle, wait=wait)
    assert queue.poll(timeout_s=0.2, spin_s=0.015) == []
    queue._handle = handle
    assert spins[:3] == pytest.approx([0.015, 0.005, 0]) and not any(spins[2:])
