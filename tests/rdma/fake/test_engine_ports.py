"""Ports that go down and come back, and ports that are not there."""

import threading
import time

import numpy as np
import pytest

from mooncake_kernels import InvalidArgument, TransferError, Unavailable
from mooncake_kernels.topology import Nic, System, Topology
from mooncake_kernels.transfer import TransferEngine

from .engines import ALL, engines


@pytest.mark.parametrize("down", [[0], [1, 2, 3]])
def test_one_round_over_the_peers_nics_counts_one_failure(world, down):
    """Though all of them were tried, if it is not our own port that is down."""
    for index in down:
        world.set_port(index, state="DOWN")
    with engines(near=ALL[:1], far=ALL[1:], transports=["rdma", "tcp"]) as pair:
        pair.move("write", [(0, 0, 4096)])
        failures = pair.near.stats()["paths"][pair.peer.name]["fake0"]["num_failures"]
        rounds = 2  # the second after a pause of 1 s
        assert 1 <= failures <= 3 * rounds  # of each of the three rails


def with_ports(**ports: int) -> Topology:
    nics = tuple(Nic(name, port=port, has_gid=True) for name, port in ports.items())
    return Topology(System(nics=nics))


def test_nonexistent_port_is_rejected(world):
    message = r"topology must give fake0 a port in 1 to 1, got 2"
    with pytest.raises(InvalidArgument, match=message):
        TransferEngine(transports=["rdma"], topology=with_ports(fake0=2))


@pytest.mark.parametrize("is_near", [True, False])
def test_a_nic_without_its_port_is_left_out(world, caplog, is_near):
    odd, good = with_ports(fake0=2, fake1=1), with_ports(fake2=1)
    with (
        TransferEngine(transports=["rdma"], topology=odd if is_near else good) as near,
        TransferEngine(transports=["rdma"], topology=good if is_near else odd) as far,
    ):
        assert "topology must give fake0 a port in 1 to 1, got 2" in caplog.text
        here, there = np.ones(4096, np.uint8), np.zeros(4096, np.uint8)
        source, target = near.register(here), far.register(there)
        with near.open(far.name) as peer:
            near.write(peer, [(source.address, target.address, 4096)]).wait()
        np.testing.assert_array_equal(here, there)


def test_unsupported_nic_type_is_left_out(world, caplog):
    """A file that describes the machine may not say what the NIC itself does."""
    world.set_device(0, node_type=4)
    topology = with_ports(fake0=1, fake1=1)
    with TransferEngine(transports=["rdma"], topology=topology) as engine:
        assert "a NIC is left out: fake0: iWARP: its queue pairs" in caplog.text
        assert engine.register(np.zeros(4096, np.uint8)).note == ""
    world.set_device(1, node_type=7, vendor_id=0x1D0F)
    with pytest.raises(Unavailable, match="iWARP"):
        TransferEngine(transports=["rdma"], topology=topology)


@pytest.mark.parametrize("index", [0, 2])
def test_requests_wait_for_the_only_port(world, index):
    """At either end: requests wait for it, though nothing else could move them."""
    with engines(near=ALL[:1], far=ALL[2:3]) as pair:
        pair.move("write", [(0, 0, 4096)])
        world.set_port(index, state="DOWN")
        world.fail_work("local protection error")
        up = threading.Timer(0.5, world.set_port, [index], {"state": "ACTIVE"})
        up.start()
        pair.move("write", [(0, 0, 1 << 16)])
        up.join()


@pytest.mark.parametrize("how", ["deadline", "cancel"])
def test_wait_for_a_port_ends_on_deadline_or_cancel(world, how):
    with engines(near=ALL[:1], far=ALL[2:3]) as pair:
        world.set_port(0, state="DOWN")
        world.fail_work("local protection error")
        ticket = pair.write([(0, 0, 4096)], deadline_s=1.0 if how == "deadline" else 60.0)
        if how == "cancel":
            time.sleep(0.2)
            assert ticket.cancel()
        with pytest.raises(TransferError, match="deadline of 1 s passed|cancelled"):
            ticket.wait()
        world.set_port(0, state="ACTIVE")
        pair.move("write", [(0, 0, 4096)])


def test_permanently_down_port_is_named_in_the_error(world):
    world.set_port(2, state="DOWN")
    with (
        pytest.raises(TransferError, match="port 1 of fake2 is DOWN"),
        engines(near=ALL[:1], far=ALL[2:3]),
    ):
        pass
