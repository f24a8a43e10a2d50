"""Waiting for completions: what wakes it, and what does not."""

import errno
import threading

import pytest

from mooncake_kernels import InvalidArgument, TransferError

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


def test_a_completion_wakes(world, connection):
    """Whatever was in the queue when it was armed, and whatever comes later."""
    near = connection.near
    for _ in range(50):
        waiter = Waiter(lambda: near.queue.poll(timeout_s=FOR_EVER))
        token = connection.write([(0, 0, 8)])
        assert [e.token for e in waiter.result()] == [token]


def test_what_no_nic_tells_wakes(world, connection):
    near = connection.near
    with world.held():
        token = connection.write([(0, 0, 8)])
        waiter = Waiter(lambda: near.queue.poll(timeout_s=FOR_EVER))
        near.pair.close()
        [ended] = waiter.result()
    assert (ended.token, ended.status) == (token, "closed")


def test_a_transfer_of_nothing_is_over_at_once(connection):
    token = connection.write([])
    assert [(e.token, e.ok) for e in connection.near.queue.poll()] == [(token, True)]


def test_a_transfer_of_nothing_is_over_after_those_before(world, connection):
    with world.held():
        tokens = [connection.write([(0, 0, 8)]), connection.write([]), connection.read([])]
        assert connection.near.queue.poll() == []
    assert [e.token for e in connection.near.drain()] == tokens


def test_what_others_wait_for_is_kept(world, connection):
    near = connection.near
    first, second, third = (connection.write([(0, 0, 8)]) for _ in range(3))
    assert near.queue.wait(second).token == second
    told = Waiter(lambda: near.queue.wait(third, timeout_s=FOR_EVER)).result()
    assert told.token == third
    assert [completion.token for completion in near.queue.poll()] == [first]
    for token in (first, 12345, -1, "x"):
        with pytest.raises(InvalidArgument, match="token must be of a transfer of this queue"):
            near.queue.wait(token)


def test_a_wait_that_ends_loses_nothing(world, connection):
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
def test_closing_wakes(connection, num_threads):
    near = connection.near
    waiters = [Waiter(lambda: near.queue.poll(timeout_s=FOR_EVER)) for _ in range(num_threads)]
    near.queue.close()
    for waiter in waiters:
        error = waiter.result()
        assert isinstance(error, InvalidArgument), error
        assert "completion queue of fake0 must be open, but is closed" in str(error)


def test_the_time_is_up(world, connection):
    near = connection.near
    assert near.queue.poll(timeout_s=0.01) == []
    with world.held():
        token = connection.write([(0, 0, 8)])
        with pytest.raises(TimeoutError, match=f"transfer {token} is not over after 0.01 s"):
            near.queue.wait(token, timeout_s=0.01)
    assert near.queue.wait(token).ok  # it went on


def test_a_queue_that_cannot_be_armed(world, connection):
    world.fail("ibv_req_notify_cq", errno.EIO)
    with pytest.raises(OSError, match="ibv_req_notify_cq: fake0"):
        connection.near.queue.poll(timeout_s=FOR_EVER)


def test_a_nic_that_is_gone_while_one_waits(world, connection):
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


def test_several_who_poll_share_what_is_over(world, connection):
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


def test_waiting_for_one_that_fails(world, connection):
    world.fail_work("remote access error")
    with pytest.raises(TransferError, match="transfer with queue pair .*: remote access error"):
        connection.near.queue.wait(connection.write([(0, 0, 8)]))
