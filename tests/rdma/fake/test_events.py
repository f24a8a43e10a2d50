"""Asynchronous events of a NIC."""

import errno
import threading

import pytest

from mooncake_kernels import InvalidArgument

from .pairs import Connection


def test_events_come_in_order(world, device):
    assert device.wait_event() is None
    world.inject("PORT_ERR", port=1)
    world.inject("PORT_ACTIVE", port=1)
    world.inject("DEVICE_FATAL")
    found = [device.wait_event(5.0) for _ in range(3)]
    assert [(e.type, e.port, e.qp_num) for e in found] == [
        *(("PORT_ERR", 1, 0), ("PORT_ACTIVE", 1, 0), ("DEVICE_FATAL", 0, 0)),
    ]
    assert device.wait_event(0.01) is None


def test_events_of_queue_pairs(world):
    with Connection(world) as c:
        world.inject("QP_FATAL", qp_num=c.near.pair.number)
        event = c.near.device.wait_event(5.0)
        assert (event.type, event.qp_num) == ("QP_FATAL", c.near.pair.number)


def test_responder_gets_an_event_for_forbidden_access(connection):
    connection.far.region.close()
    remote = connection.near.region.remote  # keys of another NIC
    near = connection.near
    near.pair.write(near.region, remote, [(near.region.address, near.region.address, 8)])
    [failed] = near.drain()
    assert failed.status == "remote access error"
    event = connection.far.device.wait_event(5.0)
    assert (event.type, event.qp_num) == ("QP_ACCESS_ERR", connection.far.pair.number)


def test_closing_a_queue_pair_drops_its_event(world, device):
    with device.completion_queue() as queue, queue.queue_pair() as pair:
        world.inject("QP_FATAL", qp_num=pair.number)
    assert device.wait_event(0.01) is None


def test_event_wakes_a_waiter(world, device):
    found = []
    thread = threading.Thread(target=lambda: found.append(device.wait_event(60.0)))
    thread.start()
    world.inject("PORT_ERR", port=1)
    thread.join()
    assert found[0].type == "PORT_ERR"


@pytest.mark.parametrize("closes", ["early", "late"])
def test_close_wakes_waiters(world, device, closes):
    """Either nothing has come, or the device is found closed."""
    ends, begun = [], threading.Event()

    def wait():
        begun.set()
        try:
            ends.append(device.wait_event(60.0))
        except InvalidArgument as error:
            ends.append(str(error))

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    if closes == "late":
        begun.wait()
    device.close()
    for thread in threads:
        thread.join()
    closed = "wait_event: device fake0 must be open, but is closed"
    assert len(ends) == 3 and set(ends) <= {None, closed}


def test_removed_device_fails_wait_event(world, device):
    world.fail("ibv_get_async_event", errno.EIO)
    with pytest.raises(OSError, match="ibv_get_async_event: fake0") as caught:
        device.wait_event(60.0)
    assert caught.value.errno == errno.EIO
