"""Handles are released once, in the order that verbs require, whatever the order of closing."""

import contextlib
import errno
import gc
import itertools
import mmap
import threading
import time
import weakref
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_kernels import InvalidArgument, rdma

from ...threads import in_threads
from .pairs import Connection
from .world import KINDS

NAMES = ("device", "queue", "pair", "region")
ENDED = (InvalidArgument, OSError)  # what a call may say of a handle that is being closed


def make() -> dict[str, object]:
    device = rdma.open("fake0")
    queue = device.completion_queue(64)
    pair = queue.queue_pair(max_sends=8)
    region = device.register(bytearray(100), "remote_read_write")
    return {"device": device, "queue": queue, "pair": pair, "region": region}


@pytest.mark.parametrize("order", list(itertools.permutations(NAMES)))
def test_closing_in_any_order(world, order):
    handles = make()
    for name in order:
        handles[name].close()
        assert handles[name].closed
        handles[name].close()
    world.check()
    assert world.calls("ibv_destroy_qp") == world.calls("ibv_dereg_mr") == 1


@given(order=st.permutations(NAMES), data=st.data())
@settings(max_examples=30)
def test_dropping_references_in_any_order(world, order, data):
    handles = make()
    for name in order:
        if data.draw(st.booleans()):
            handles[name].close()
        del handles[name]
    gc.collect(0)
    world.check()


def test_closing_a_device_closes_its_objects(world):
    with Connection(world, max_immediates=2) as c:
        with world.held():
            c.write([(0, 0, 8)], immediate=1)
            c.near.device.close()
            assert c.near.queue.closed and c.near.pair.closed and c.near.region.closed
            assert world.live() == dict.fromkeys(KINDS, 1)


def test_closed_objects_are_rejected(connection):
    near, far = connection.near, connection.far
    near.device.close()
    calls = [
        (
            near.device.completion_queue,
            "completion_queue: device fake0 must be open, but is closed",
        ),
        (near.queue.queue_pair, "queue_pair: completion queue of fake0 must be open"),
        (near.queue.poll, "poll: completion queue of fake0 must be open"),
        (lambda: near.device.register(bytearray(8)), "register: device fake0 must be open"),
        (lambda: near.pair.connect(far.pair.endpoint), "connect: queue pair .* must be open"),
        (lambda: connection.write([]), "write: queue pair .* must be open"),
        (lambda: near.region.remote, "pieces: region of 65536 bytes on fake0 must be open"),
        (near.device.wait_event, "wait_event: device fake0 must be open"),
    ]
    for call, message in calls:
        with pytest.raises(InvalidArgument, match=message):
            call()
    assert near.pair.number == 17 and near.pair.endpoint.qp_num == 17
    assert not near.pair.connected


def test_failed_close_is_not_repeated(world):
    """What the kernel does not take back is lost to us; closing goes on."""
    handles = make()
    world.fail("ibv_dereg_mr", errno.EBUSY)
    handles["region"].close()
    handles["region"].close()
    assert world.calls("ibv_dereg_mr") == 1 and handles["region"].closed
    assert world.live()["region"] == 1
    world.forget("region")
    handles["device"].close()


ACTIONS = ["register", "queue", "pair", "poll", "wait", "write", "connect", "event"]


def act(name: str, c: Connection, made: list) -> None:
    near, far = c.near, c.far
    if name == "register":
        made.append(near.device.register(bytearray(5000), max_piece_bytes=4096))
    elif name == "queue":
        made.append(near.device.completion_queue(8))
    elif name == "pair":
        made.append(near.queue.queue_pair(max_sends=1))
    elif name == "poll":
        near.queue.poll()
    elif name == "wait":
        near.queue.poll(timeout_s=0.01)
    elif name == "write":
        c.write([(8, 8, 100), (900, 8, 5)])
    elif name == "connect":
        near.pair.reset()
        far.pair.reset()
        c.connect()
    elif name == "event":
        near.device.wait_event(0.001)


@pytest.mark.parametrize("closing", NAMES)
@pytest.mark.parametrize("delayed", ["", "ibv_create_qp", "ibv_create_cq", "ibv_reg_mr_iova2"])
def test_close_races_with_use(world, closing, delayed):
    """No call sees a handle that is destroyed, and what is made meanwhile is closed as well."""
    for _ in range(5):
        with Connection(world, depth=4096, max_sends=8) as c:
            if delayed:
                world.delay(delayed, 300)
            stop, made = threading.Event(), []

            def use(name, c=c, stop=stop, made=made):
                while not stop.is_set():
                    with contextlib.suppress(*ENDED):
                        act(name, c, made)

            threads = [threading.Thread(target=use, args=(name,)) for name in ACTIONS]
            for thread in threads:
                thread.start()
            stop.wait(0.01)
            closers = [
                threading.Thread(target=getattr(c.near, closing).close),
                threading.Thread(target=c.near.pair.close),
            ]
            for thread in closers:
                thread.start()
            stop.wait(0.005)
            stop.set()
            for thread in threads + closers:
                thread.join()
            c.near.device.close()
            assert all(handle.closed for handle in made)
        world.reset_rules()
        world.check()


def test_concurrent_closes_from_many_threads(world):
    for _ in range(20):
        handles = make()
        start = threading.Barrier(8)

        def close(handle, start=start):
            start.wait()
            handle.close()
            assert handle.closed

        in_threads(*(partial(close, handle) for handle in [*handles.values()] * 2))
        world.check()


def test_last_references_dropped_during_device_close(world):
    """Who closes a device may be the last to hold what lives on it."""
    c = Connection(world)
    device = c.near.device
    world.delay("ibv_destroy_qp", 100_000)
    closing = threading.Thread(target=device.close)
    closing.start()
    time.sleep(0.03)
    c.near.pair = c.near.queue = c.near.region = None
    gc.collect()
    closing.join(60)
    assert not closing.is_alive()
    c.far.device.close()


@pytest.mark.parametrize("end", ["wait", "poll", "failure", "close", "close of the device"])
def test_transfer_keeps_its_region_alive(world, end):
    """A NIC does not write to memory that was freed, though nobody kept the region."""
    with Connection(world) as c:
        near, far = c.near, c.far
        base = np.zeros(4096, np.uint8)  # keeps a failure of this test from destroying the heap
        memory = base[:]
        held = weakref.ref(memory)
        region = near.device.register(memory)
        ranges = [(region.address, far.region.address, 4096)]
        if end == "failure":
            world.fail_work("local protection error")
        with world.held():
            token = near.pair.read(region, far.region.remote, ranges)
            del memory, region
            gc.collect()
            assert held() is not None and world.live()["region"] == 3
            if end == "close":
                near.queue.close()
            elif end == "close of the device":
                near.device.close()
        if end == "wait":
            assert near.queue.wait(token).ok
        elif not end.startswith("close"):
            assert [e.ok for e in near.queue.poll()] == [end == "poll"]
        gc.collect()
        assert held() is None
        assert world.live()["region"] == (1 if end == "close of the device" else 2)


def test_rejected_transfer_keeps_nothing_alive(world, connection):
    memory = np.zeros(4096, np.uint8)
    held = weakref.ref(memory)
    with pytest.raises(InvalidArgument, match=r"local\[0\] must be within"):
        region = connection.near.device.register(memory)
        connection.near.pair.read(region, connection.far.region.remote, [(1, 1, 1)])
    del memory, region
    gc.collect()
    assert held() is None


def test_closed_objects_release_their_memory(world, device):
    """Otherwise a mapping could not be closed: its buffer would still be exported."""
    memory = mmap.mmap(-1, 4096)
    with device.register(memory) as region:
        assert region.pieces
    with rdma.RegistrationCache([device]) as cache:
        with cache.lease(memory) as lease:
            assert lease.regions[0].pieces
        memory.close()
    assert region.num_bytes == lease.regions[0].num_bytes == 4096


def test_objects_closed_by_their_device_release_memory(world):
    memory = mmap.mmap(-1, 4096)
    with rdma.open("fake0") as first, rdma.open("fake1") as second:
        regions = [*rdma.register([first, second], memory), first.register(memory)]
    memory.close()
    assert all(region.closed for region in regions)
