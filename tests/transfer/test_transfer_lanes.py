"""Concurrent requests: which lanes and threads carry them, and in what order they arrive."""

from functools import partial

import numpy as np
import pytest

import mooncake_kernels as mk

from ..threads import in_threads
from .scripts import run_fork
from .support import UNTOUCHED, WAIT_S, addressed, engine_pair, eventually, untouched

MIB = 1 << 20
NUM_REQUESTS = 6  # more than a lane has under way


@pytest.fixture(params=["shm", "tcp"])
def lanes(request):
    """Engines that are joined by several connections."""
    with engine_pair(request.param) as engines:
        yield engines


def write_mibs(pair, source, target, **named):
    """Write a MiB a request, none of which is waited for."""
    return [
        pair.near.write(pair.peer, [(source.address + at, target.address + at, MIB)], **named)
        for at in range(0, source.num_bytes, MIB)
    ]


def test_lanes_share_single_piece_requests(lanes):
    near, far = addressed(NUM_REQUESTS * MIB), untouched(NUM_REQUESTS * MIB)
    source, target = lanes.regions(near, far)

    def both_have_moved_some():
        far[:] = 0xEE
        for ticket in write_mibs(lanes, source, target):
            ticket.wait()
        assert (far == near).all()
        paths = lanes.near.stats()["paths"][lanes.peer.name]
        return len(paths) == 2 and all(path["num_bytes_written"] > 0 for path in paths.values())

    eventually(both_have_moved_some)  # the second lane connects when it is first needed


@pytest.mark.parametrize("verb", ["write", "read"])
@pytest.mark.parametrize("mapped", [False, True])
def test_large_request_right_after_a_notification(lanes, verb, mapped):
    """Whether it is allowed is known here: nothing is sent, and the answer is another's."""
    near, far = addressed(16 * MIB), untouched(16 * MIB)
    if mapped:
        far = mk.shared_memory(16 * MIB).numpy()
    source, target = lanes.regions(near, far)
    move = getattr(lanes.near, verb)
    for num_mibs in (0, 1, 2):
        after = (num_mibs * MIB, 9 * MIB)
        tickets = [
            move(lanes.peer, [(source.address + at, target.address + at, n)][:n], notify=told)
            for at, n, told in ((0, after[0], b"x"), (*after, None), (15 * MIB, 1, None))
        ]
        for ticket in tickets:
            ticket.wait()
        assert (far[after[0] : sum(after)] == near[after[0] : sum(after)]).all()
        assert lanes.far.receive_notifications(timeout_s=WAIT_S) == [(lanes.near.name, b"x")]
    blocks = np.arange(8193) * 100  # more than are checked here at once
    columns = (source.address + blocks, target.address + blocks, np.full(len(blocks), 50))
    for ticket in [
        move(lanes.peer, [], notify=b"x"),
        move(lanes.peer, np.stack(columns, axis=1)),
    ]:
        ticket.wait()


@pytest.mark.parametrize("seed", range(4))
def test_any_requests_in_a_row(lanes, seed):
    """None waits for another's answer. Each moves bytes that no other does: ThreadSanitizer does
    not see the order of what threads do that hear of each other by a socket.
    """
    random = np.random.default_rng(seed)
    room = 2 * MIB + 4096
    near, far = addressed(30 * room), untouched(30 * room)
    source, target = lanes.regions(near, far)
    for row in range(0, 30, 5):
        moved = []
        for at in range(row * room, (row + random.integers(1, 6)) * room, room):
            size = int(random.choice([0, 1, 4096, 300_000, MIB, 2 * MIB + 1]))
            writes = bool(random.integers(2))
            ticket = (lanes.near.write if writes else lanes.near.read)(
                lanes.peer,
                [(source.address + at, target.address + at, size)][:size],
                notify=b"x" if size == 0 or random.integers(2) else None,
                checksum=bool(random.integers(8) == 0),
                deadline_s=WAIT_S,
            )
            moved.append((ticket, slice(at, at + size), writes))
        for ticket, part, writes in moved:
            ticket.wait()
            assert (near[part] == far[part]).all()
            assert writes or (near[part] == UNTOUCHED).all()
        lanes.far.receive_notifications()


def test_sequential_requests_use_the_leading_lane(lanes):
    near, far = addressed(MIB), untouched(MIB)
    source, target = lanes.regions(near, far)
    for _ in range(20):
        for ticket in write_mibs(lanes, source, target):
            ticket.wait()
    paths = lanes.near.stats()["paths"][lanes.peer.name]
    assert sorted(path["num_bytes_written"] for path in paths.values()) == [0, 20 * MIB]


def test_notification_follows_data_of_other_lanes(lanes):
    near, far = untouched(NUM_REQUESTS * MIB), untouched(NUM_REQUESTS * MIB)
    source, target = lanes.regions(near, far)
    for i in range(20):
        near[:] = i
        tickets = write_mibs(lanes, source, target)
        last = lanes.near.write(lanes.peer, [], notify=b"all")
        assert lanes.far.receive_notifications(timeout_s=WAIT_S) == [(lanes.near.name, b"all")]
        assert (far == i).all()
        for ticket in [*tickets, last]:
            ticket.wait()


def test_notification_with_data_follows_data_of_other_lanes(lanes):
    near, far = untouched(NUM_REQUESTS * MIB), untouched(NUM_REQUESTS * MIB)
    source, target = lanes.regions(near, far)
    for i in range(20):
        near[:] = i
        tickets = write_mibs(lanes, source, target, notify=b"one")
        received = []
        while len(received) < NUM_REQUESTS:
            received += lanes.far.receive_notifications(timeout_s=WAIT_S)
            assert received
            assert (far[: len(received) * MIB] == i).all()
        for ticket in tickets:
            ticket.wait()


@pytest.mark.parametrize("num_bytes", [1, 4096, 300 << 10])
def test_more_threads_than_lanes(pair, num_bytes):
    num_threads, num_rounds = 20, 10
    near, far = addressed(num_threads * num_bytes), untouched(num_threads * num_bytes)
    source, target = pair.regions(near, far)

    def move(i):
        here, there = source.address + i * num_bytes, target.address + i * num_bytes
        part = slice(i * num_bytes, (i + 1) * num_bytes)
        for _ in range(num_rounds):
            far[part] = 0xEE
            pair.near.write(pair.peer, [(here, there, num_bytes)]).wait()
            assert (far[part] == near[part]).all()
            pair.near.write_blocks(pair.peer, np.array([here]), np.array([there]), num_bytes).wait()

    in_threads(*(partial(move, each) for each in range(num_threads)))
    assert (far == near).all()


def test_remaining_lane_works_when_no_thread_can_be_started():
    """The lane that is there carries on, and the others come when they can."""
    code = """
import resource
with TransferEngine() as there, TransferEngine(transports=["tcp"]) as here:
    source, target = np.ones(8 << 20, np.uint8), np.zeros(8 << 20, np.uint8)
    row = (here.register(source).address, there.register(target).address, 8 << 20)
    peer = here.open(there.name)
    pages = int(open("/proc/self/statm").read().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + (4 << 20)  # a thread's stack is larger
    num_threads = len(os.listdir("/proc/self/task"))
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    here.write(peer, [row]).wait()
    assert target.all() and len(os.listdir("/proc/self/task")) == num_threads
    resource.setrlimit(resource.RLIMIT_AS, before)
    here.write(peer, [row]).wait()
    assert len(os.listdir("/proc/self/task")) > num_threads
"""
    assert run_fork(code) == (0, "")
