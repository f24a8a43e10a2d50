"""Small tcp requests of several threads, each by a connection to itself; what they may overtake."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

from mooncake_kernels import config
from mooncake_kernels.errors import TransferError
from mooncake_kernels.transfer import TransferEngine

from .handshake import answer, receive_exactly
from .support import (
    ACK,
    HEADER,
    NOTIFY,
    RANGE,
    WAIT_S,
    WRITE,
    ZEROS,
    addressed,
    engine_pair,
    eventually,
    raw_server,
    untouched,
)

SIZE = 64


class Gated:
    """A peer that notes what arrives, and confirms a write of address n after ``release(n)``.

    Attributes:
        arrived: the address of each write, and the bytes of each notification, in order.
        by: the number of the connection by which each of them came.
    """

    def __init__(self) -> None:
        self.arrived: list[int | bytes] = []
        self.by: list[int] = []
        self.drop: set[int] = set()  # addresses whose connection is closed, once each
        self._released: set[int] = set()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []

    def serve(self, connection) -> None:
        number = len(self._threads)
        self._threads.append(threading.Thread(target=self._serve, args=(connection, number)))
        self._threads[-1].start()

    def num_connected(self) -> int:
        return sum(thread.is_alive() for thread in self._threads)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(WAIT_S)

    def release(self, *addresses: int) -> None:
        with self._changed:
            self._released |= set(addresses)
            self._changed.notify_all()

    def _serve(self, connection, number: int) -> None:
        with contextlib.suppress(OSError, EOFError):
            answer(connection)
            while True:
                op, num_ranges, request, _, size = HEADER.unpack(
                    receive_exactly(connection, HEADER.size)
                )
                table = receive_exactly(connection, num_ranges * RANGE.size)
                if op == WRITE:
                    receive_exactly(connection, len(ZEROS))
                payload = receive_exactly(connection, size)
                if op == WRITE:
                    address, _ = RANGE.unpack(table)
                    if not self._take(address, number):
                        return connection.close()
                elif op == NOTIFY:
                    with self._changed:
                        self.arrived.append(payload)
                        self.by.append(number)
                connection.sendall(ACK.pack(0, 0, request, size))

    def _take(self, address: int, number: int) -> bool:
        with self._changed:
            self.arrived.append(address)
            self.by.append(number)
            if address in self.drop:
                self.drop.remove(address)
                return False
            self._changed.wait_for(lambda: address in self._released, WAIT_S)
            return True


class Caller:
    """A thread that makes requests when it is told to."""

    def __init__(self, near: TransferEngine, peer, here: int, stack: ExitStack):
        self.near, self.peer, self.here = near, peer, here
        self._thread = stack.enter_context(ThreadPoolExecutor(1))

    def do(self, work: Callable[[], object]) -> Future:
        return self._thread.submit(work)

    def write(self, address: int, notify: bytes | None = None, deadline_s: float = WAIT_S):
        row = [(self.here, address, SIZE)]
        return self.do(
            lambda: self.near.write(self.peer, row, notify=notify, deadline_s=deadline_s)
        ).result(WAIT_S)


class Setting:
    """A gated peer, and three threads that make requests to it."""

    def __init__(self, stack: ExitStack):
        self.gate = Gated()
        name = stack.enter_context(raw_server(self.gate.serve, join=self.gate.join))
        self.near = stack.enter_context(TransferEngine(transports=["tcp"]))
        self.peer = self.near.open(name)
        self.region = self.near.register(addressed(SIZE))
        here = self.region.address
        self.callers = [Caller(self.near, self.peer, here, stack) for _ in range(3)]

    def occupy(self, deadline_s: float = WAIT_S) -> tuple:
        """The first thread occupies the queue, the second has a connection to itself.

        Return their tickets, of addresses 1000 and 2000, which are under way.
        """
        first, second, _ = self.callers
        self.gate.release(*range(200))
        for k in range(100):  # until there is one for the second
            tickets = [first.write(500 + k), second.write(k)]
            came_alone = soon(lambda k=k: k in self.gate.arrived)
            self.gate.release(500 + k)
            for ticket in tickets:
                ticket.wait()
            if came_alone:
                break
        held = first.write(1000)
        eventually(lambda: 1000 in self.gate.arrived)
        aside = second.write(2000, deadline_s=deadline_s)
        eventually(lambda: 2000 in self.gate.arrived)
        assert self.by(2000) != self.by(1000)
        return held, aside

    def by(self, what: int | bytes) -> int:
        """The connection by which it came."""
        return self.gate.by[self.gate.arrived.index(what)]


def soon(condition: Callable[[], bool]) -> bool:
    """Whether it holds within some 30 ms, in which a request that is sent at once arrives."""
    until = time.monotonic() + 0.03
    while not condition() and time.monotonic() < until:
        time.sleep(0.001)
    return condition()


@pytest.fixture
def setting() -> Iterator[Setting]:
    with ExitStack() as stack:
        made = Setting(stack)
        yield made
        made.gate.release(*range(1000, 5000, 1000))


def test_threads_do_not_wait_for_each_others_connection(setting):
    held, aside = setting.occupy()
    setting.gate.release(2000)
    aside.wait()
    assert not held.done
    setting.gate.release(1000)
    held.wait()


def test_requests_of_one_thread_stay_in_order(setting):
    held, aside = setting.occupy()
    setting.gate.release(1000)
    held.wait()  # so the first connection is idle
    later = setting.callers[1].write(3000)
    assert not soon(lambda: 3000 in setting.gate.arrived)
    setting.gate.release(2000, 3000)
    later.wait()
    aside.wait()
    assert setting.gate.arrived[-2:] == [2000, 3000]


@pytest.mark.parametrize("caller", [0, 1, 2])
@pytest.mark.parametrize("with_data", [False, True])
def test_notification_follows_the_data_of_every_thread(setting, caller, with_data):
    held, aside = setting.occupy()
    setting.gate.release(1000, 3000)
    held.wait()
    if with_data:
        told = setting.callers[caller].write(3000, notify=b"told")
    else:
        thread = setting.callers[caller]
        told = thread.do(lambda: setting.near.write(setting.peer, [], notify=b"told")).result()
    assert not soon(lambda: b"told" in setting.gate.arrived)
    setting.gate.release(2000)
    told.wait()
    aside.wait()
    assert setting.gate.arrived[-1] == b"told"


def test_cancelling_request_waiting_for_side_keeps_queue_moving(setting):
    held, aside = setting.occupy()
    setting.gate.release(1000)
    held.wait()
    told = setting.callers[2].write(3000, notify=b"told")
    behind = setting.callers[0].write(4000)
    assert told.cancel()
    setting.gate.release(4000)
    behind.wait()  # it does not need the express lane
    assert not aside.done
    assert 3000 not in setting.gate.arrived
    setting.gate.release(2000)
    aside.wait()
    again = setting.callers[1].write(3000)
    setting.gate.release(3000)
    again.wait()


def test_unawaited_side_request_completes(setting):
    setting.occupy()
    setting.gate.release(2000)
    in_flight = lambda: setting.near.stats()["peers"][setting.peer.name]["num_in_flight"]  # noqa: E731
    eventually(lambda: in_flight() == 1)  # that of the first thread


@pytest.mark.parametrize("end", ["cancel", "deadline", "region", "close"])
@pytest.mark.parametrize("waits", [False, True])
def test_unresponsive_side_request_can_be_ended(setting, end, waits):
    held, aside = setting.occupy(deadline_s=0.2 if end == "deadline" else WAIT_S)
    waiting = setting.callers[2].do(aside.wait) if waits else None
    if end == "cancel":
        assert aside.cancel()
    elif end == "region":
        setting.region.close()
    elif end == "close":
        setting.near.close()
    with pytest.raises(TransferError):
        aside.wait(WAIT_S)
    if waiting:
        with pytest.raises(TransferError):
            waiting.result(WAIT_S)
    if end in ("cancel", "deadline"):
        assert not held.done
        setting.gate.release(1000)
        held.wait()


def test_lost_side_is_reestablished_for_its_requests(setting):
    held, aside = setting.occupy()
    setting.gate.release(2000)
    aside.wait()
    setting.gate.drop.add(3000)
    setting.gate.release(3000)
    setting.callers[1].write(3000).wait()
    assert setting.gate.arrived.count(3000) == 2
    assert not held.done
    setting.gate.release(1000)
    held.wait()


def test_unused_express_lanes_disconnect(setting):
    held, aside = setting.occupy()
    setting.gate.release(1000, 2000)
    held.wait()
    aside.wait()
    assert setting.gate.num_connected() > 1
    eventually(lambda: setting.gate.num_connected() == 1)
    again = []

    def reconnects_when_missed() -> bool:
        # A miss while its thread is still disconnecting is not remembered; the next one is.
        again.extend(caller.write(3000) for caller in setting.callers)
        return setting.gate.num_connected() > 1

    eventually(reconnects_when_missed)
    setting.gate.release(3000)
    for ticket in again:
        ticket.wait()


def test_number_of_sides_is_bounded():
    """Each takes a thread and descriptors, for as long as the peer is open."""
    count, threads = 16, 4
    with ExitStack() as stack:
        near = stack.enter_context(TransferEngine(transports=["tcp"]))
        here = near.register(addressed(SIZE)).address
        executor = stack.enter_context(ThreadPoolExecutor(threads))
        for _ in range(count):
            far = stack.enter_context(TransferEngine())
            row = [(here, far.register(untouched(SIZE)).address, SIZE)]
            peer = near.open(far.name)

            def work(_, peer=peer, row=row):
                for _ in range(50):
                    near.write(peer, row).wait()

            list(executor.map(work, range(threads)))
        paths = [path for of in near.stats()["paths"].values() for path in of]
        lanes = [path for path in paths if path not in ("tcp:0", "tcp:1", "rpc")]
        assert 3 < len(lanes) <= 32


def test_single_lane_uses_a_single_connection():
    with config.override(transfer_lanes=1), ExitStack() as stack:
        setting = Setting(stack)
        first, second, _ = setting.callers
        setting.gate.release(*range(100))
        for i in range(50):
            tickets = [first.write(i), second.write(i)]
            for ticket in tickets:
                ticket.wait()
        assert set(setting.gate.by) == {0}


def test_many_threads_keep_order_and_notifications():
    """Bytes, order and notifications of many threads, some of whose requests no one waits for."""
    count, rounds = 6, 60
    with engine_pair("tcp") as pair, ThreadPoolExecutor(count) as threads:
        near, far = pair.regions(untouched(SIZE * count), untouched(SIZE * count))

        def work(i: int) -> None:
            part = slice(i * SIZE, (i + 1) * SIZE)
            row = [(near.address + part.start, far.address + part.start, SIZE)]
            for k in range(rounds):
                near._buffer.owner[part] = k
                tickets = [pair.near.write(pair.peer, row) for _ in range(1 + k % 3)]
                if k % 4 == 0:
                    pair.near.write(pair.peer, [], notify=bytes([i, k])).wait()
                    assert (far._buffer.owner[part] == k).all()
                if k % 5:
                    tickets[-1].wait()
                    assert (far._buffer.owner[part] == k).all()
                for ticket in tickets:
                    ticket.wait()

        list(threads.map(work, range(count)))
        np.testing.assert_array_equal(near._buffer.owner, far._buffer.owner)
        told = [note for _, note in pair.far.receive_notifications()]
        for i in range(count):
            assert [note[1] for note in told if note[0] == i] == list(range(0, rounds, 4))
