"""Small tcp requests, which their callers' threads carry out, whether they wait or not."""

import contextlib
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from mooncake_kernels.errors import TransferError
from mooncake_kernels.transfer import TransferEngine

from ..store.support import child, ended_well
from ..threads import in_threads
from .handshake import answer, receive_exactly
from .support import (
    ACK,
    HEADER,
    RANGE,
    READ,
    WAIT_S,
    WRITE,
    addressed,
    engine_pair,
    eventually,
    raw_server,
    stall,
    untouched,
)

SIZE = 4096


@pytest.fixture
def stalled():
    """An engine, a region of its, and a peer that never answers."""
    with raw_server(stall) as name, TransferEngine(transports=["tcp"]) as near:
        yield near, near.register(addressed(SIZE)), near.open(name)


def connections_to(name):
    """This process's sockets that are connected there, as duplicates."""
    port = int(name.rpartition(":")[2])
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            found = socket.fromfd(number, socket.AF_INET, socket.SOCK_STREAM)
            if found.getpeername()[1] == port:
                yield found


@pytest.mark.parametrize("spin_us", [0, 200])
@pytest.mark.parametrize("size", [1, 4096, 128 << 10, 512 << 10, (512 << 10) + 1])
def test_sequential_writes_and_reads(spin_us, size):
    with (
        TransferEngine(transports=["tcp"], spin_us=spin_us) as near,
        TransferEngine(spin_us=spin_us) as far,
    ):
        here, there = near.register(addressed(size)), far.register(untouched(size))
        peer = near.open(far.name)
        for i in range(50):
            here._buffer.owner[:] = i
            near.write(peer, [(here.address, there.address, size)]).wait()
            assert (there._buffer.owner == i).all()
            there._buffer.owner[:] = i + 1
            near.read(peer, [(here.address, there.address, size)]).wait()
            assert (here._buffer.owner == i + 1).all()


@contextlib.contextmanager
def streaming(pair, near, far, size):
    """Another thread writes one request after the other, as long as the ``with`` block lasts."""
    stop = threading.Event()

    def stream():
        while not stop.is_set():
            pair.near.write(pair.peer, [(near, far, size)]).wait()

    thread = threading.Thread(target=stream)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_requests_of_one_thread_arrive_in_order_among_those_of_another(tcp_pair):
    near, far = tcp_pair.regions(untouched(2 * SIZE), untouched(2 * SIZE))
    with streaming(tcp_pair, near.address + SIZE, far.address + SIZE, SIZE):
        for k in range(300):
            tickets = []
            for value in (2 * k % 256, (2 * k + 1) % 256):
                near._buffer.owner[value % 2] = value
                row = [(near.address + value % 2, far.address, 1)]
                tickets.append(tcp_pair.near.write(tcp_pair.peer, row))
            for ticket in tickets:
                ticket.wait()
            assert far._buffer.owner[0] == (2 * k + 1) % 256


@pytest.mark.parametrize("transport", ["local", "shm", "tcp"])
def test_a_request_without_a_waiter_is_moved_during_those_of_another_thread(transport):
    """In the end: that it takes two milliseconds at most, this does not check."""
    size = 1 << 20
    with engine_pair(transport) as pair:
        near, far = pair.regions(addressed(2 * size), untouched(2 * size))
        with streaming(pair, near.address + size, far.address + size, size):
            for k in range(20):
                near._buffer.owner[:size] = k
                pair.near.write(pair.peer, [(near.address, far.address, size)])
                eventually(lambda k=k: (far._buffer.owner[:size] == k).all())


def test_notifications_of_each_thread_follow_its_data(tcp_pair):
    count, num_rounds = 4, 50
    near, far = tcp_pair.regions(untouched(SIZE * count), untouched(SIZE * count))

    def work(i):
        part = slice(i * SIZE, (i + 1) * SIZE)
        row = [(near.address + part.start, far.address + part.start, SIZE)]
        for k in range(num_rounds):
            near._buffer.owner[part] = k
            ticket = tcp_pair.near.write(tcp_pair.peer, row)
            tcp_pair.near.write(tcp_pair.peer, [], notify=bytes([i, k])).wait()
            assert (far._buffer.owner[part] == k).all()
            ticket.wait()

    in_threads(*(partial(work, each) for each in range(count)))
    notes = [note for _, note in tcp_pair.far.receive_notifications()]
    assert sorted(notes) == [bytes([i, k]) for i in range(count) for k in range(num_rounds)]


def test_bare_notifications_of_all_threads_arrive_in_order(tcp_pair):
    count, num_rounds = 4, 500

    def work(i):
        for k in range(num_rounds):
            tcp_pair.near.write(tcp_pair.peer, [], notify=k.to_bytes(2, "big") + bytes([i])).wait()

    in_threads(*(partial(work, each) for each in range(count)))
    notes = [note for _, note in tcp_pair.far.receive_notifications()]
    expected = [k.to_bytes(2, "big") for k in range(num_rounds)]
    for i in range(count):  # those of a thread in their order
        assert [note[:2] for note in notes if note[2] == i] == expected


def test_order_is_kept_whichever_thread_sends(tcp_pair):
    """A small one in the caller's thread, then more than the connection takes at once."""
    near, far = tcp_pair.regions(addressed(SIZE), untouched(SIZE))
    row = [(near.address, far.address, SIZE)]
    for i in range(100):
        tcp_pair.near.write(tcp_pair.peer, row, notify=i.to_bytes(2, "big"))
    notes = []
    while len(notes) < 100:
        notes += tcp_pair.far.receive_notifications(WAIT_S)
    assert [int.from_bytes(note, "big") for _, note in notes] == list(range(100))


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("verb", ["write", "read"])
def test_deadline_expires_before_or_in_wait(stalled, verb, waits):
    near, here, peer = stalled
    ticket = getattr(near, verb)(peer, [(here.address, 1 << 20, SIZE)], deadline_s=0.05)
    time.sleep(0 if waits else 0.1)
    with pytest.raises(TransferError, match="deadline of 0.05 s passed"):
        ticket.wait()


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("what", ["ticket", "peer", "region", "engine"])
def test_transfer_fails_when_its_region_peer_or_engine_closes(stalled, what, waits):
    near, here, peer = stalled
    ticket = near.write(peer, [(here.address, 1 << 20, SIZE)], deadline_s=WAIT_S)
    with ThreadPoolExecutor(1) as threads:
        wait = threads.submit(ticket.wait) if waits else None
        time.sleep(0.02 if waits else 0)
        ends = {"ticket": ticket.cancel, "peer": peer.close, "region": here.close}
        ends.get(what, near.close)()
        causes = {"ticket": "cancelled", "region": "a region in use was closed"}
        for outcome in (wait.result, ticket.wait) if wait else (ticket.wait,):
            with pytest.raises(TransferError, match=causes.get(what, f"the {what} was closed")):
                outcome()


def test_submit_does_not_block_on_a_full_connection():
    """Of 16 KiB, but with much to say of where to, and after it, to a peer that reads nothing."""
    size = 16 << 10
    with raw_server(stall, narrow=True) as name, TransferEngine(transports=["tcp"]) as near:
        here, peer = near.register(addressed(size)), near.open(name)
        rows = [(here.address + i, (1 << 20) + 2 * i, 2) for i in range(0, size, 2)]
        ticket = near.write(peer, rows, notify=bytes(65536), deadline_s=1.0)
        assert not ticket.done
        assert ticket.cancel()


def test_caller_sends_no_more_than_the_socket_buffer_takes():
    """It returns, though the peer reads nothing and the kernel keeps no more of it."""
    size = 256 << 10
    with raw_server(stall, narrow=True) as name, TransferEngine(transports=["tcp"]) as near:
        here, peer = near.register(addressed(size)), near.open(name)
        for connection in connections_to(name):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 << 10)
        ticket = near.write(peer, [(here.address, 1 << 20, size)], deadline_s=1.0)
        assert not ticket.done
        assert ticket.cancel()


def test_request_is_sent_while_another_thread_waits(stalled):
    """Whoever waits lets the lane go: the next one is sent at once."""
    near, here, peer = stalled
    first = near.write(peer, [(here.address, 1 << 20, 8)], deadline_s=WAIT_S)
    with ThreadPoolExecutor(1) as threads:
        wait = threads.submit(first.wait)
        time.sleep(0.02)
        second = near.write(peer, [(here.address, 1 << 20, 8)], deadline_s=0.1)
        with pytest.raises(TransferError, match="deadline of 0.1 s passed"):
            second.wait()
        first.cancel()
        with pytest.raises(TransferError, match="cancelled"):
            wait.result(WAIT_S)


def test_wait_timeout_holds_for_partial_response():
    """Its waiter does not go beyond his time for the rest."""
    go_on = threading.Event()

    def behave(connection):
        answer(connection)
        op, _, request, _, size = HEADER.unpack(receive_exactly(connection, HEADER.size))
        assert op == READ
        receive_exactly(connection, RANGE.size)
        whole = ACK.pack(0, 0, request, size) + b"a" * size
        connection.sendall(whole[:100])
        go_on.wait(WAIT_S)
        connection.sendall(whole[100:])
        receive_exactly(connection, 1)

    with raw_server(behave) as name, TransferEngine(transports=["tcp"]) as near:
        here = near.register(untouched(SIZE))
        ticket = near.read(near.open(name), [(here.address, 1 << 20, SIZE)])
        with pytest.raises(TimeoutError):
            ticket.wait(0.05)
        go_on.set()
        ticket.wait()
        assert (here._buffer.owner == ord("a")).all()


def test_requests_follow_a_partial_response():
    """Its waiter is woken once, when all is there; whoever waits next, at the first byte."""
    size, first_bytes = 64 << 10, 8 << 10

    def behave(connection):
        answer(connection)
        for op in (READ, WRITE, WRITE):
            asked, num_ranges, request, _, num_bytes = HEADER.unpack(
                receive_exactly(connection, HEADER.size)
            )
            assert asked == op
            num_zeros = -num_ranges % 4 if op == WRITE else 0
            receive_exactly(connection, (num_ranges + num_zeros) * RANGE.size)
            ack = ACK.pack(0, 0, request, num_bytes)
            if op == READ:
                connection.sendall(ack + b"a" * first_bytes)
                time.sleep(0.02)
                connection.sendall(b"a" * (num_bytes - first_bytes))
            else:
                receive_exactly(connection, num_bytes)
                connection.sendall(ack)
        receive_exactly(connection, 1)

    with raw_server(behave) as name, TransferEngine(transports=["tcp"]) as near:
        here = near.register(untouched(1 << 20))
        peer = near.open(name)
        near.read(peer, [(here.address, 1 << 20, size)]).wait()
        assert (here._buffer.owner[:size] == ord("a")).all()
        for num_bytes in (size, 1 << 20):  # by its caller, and by the lane's thread
            near.write(peer, [(here.address, 1 << 20, num_bytes)], deadline_s=WAIT_S).wait(1)


def test_lost_connection_is_reestablished_and_request_retried():
    served = []

    def behave(connection):
        answer(connection)
        served.append(connection)
        while True:
            _, _, request, _, size = HEADER.unpack(receive_exactly(connection, HEADER.size))
            receive_exactly(connection, RANGE.size + size)
            if len(served) == 1:
                return connection.close()
            connection.sendall(ACK.pack(0, 0, request, size))

    with raw_server(behave) as name, TransferEngine(transports=["tcp"]) as near:
        here = near.register(addressed(SIZE))
        near.write(near.open(name), [(here.address, 1 << 20, SIZE)]).wait()
        assert len(served) == 2


def test_forked_child_cannot_wait_for_parents_ticket(tcp_pair):
    near, far = tcp_pair.regions(addressed(SIZE), untouched(SIZE))
    ticket = tcp_pair.near.write(tcp_pair.peer, [(near.address, far.address, SIZE)])

    def wait():
        with pytest.raises(ValueError):
            ticket.wait()

    with child(wait) as pid:
        assert ended_well(pid)
    ticket.wait()
