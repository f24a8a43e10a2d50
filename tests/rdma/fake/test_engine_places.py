"""Slices go between the NICs near the memory at either end, whatever their numbers."""

import contextlib
import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from mooncake_kernels import InvalidArgument
from mooncake_kernels._machine_root import MachineRoot
from mooncake_kernels.topology import Gpu, Nic, NumaNode, PciNode, System, Topology
from mooncake_kernels.transfer import Peer, TransferEngine
from mooncake_serving.compat.mooncake import names

from .engines import ALL
from .pairs import addressed

SIZE = 1 << 16
FACTS = {"state": "ACTIVE", "gbit_per_s": 100.0, "link_layer": "Ethernet", "has_gid": True}


def on_nodes(**nodes: int) -> Topology:
    """A machine of two NUMA nodes, with each NIC on one of them."""
    nics = tuple(Nic(name, numa=node, **FACTS) for name, node in nodes.items())
    return Topology(System(numa=(NumaNode(0), NumaNode(1)), nics=nics))


def beside_gpus(**gpus: int) -> Topology:
    """A machine with each NIC on the PCI switch of a GPU."""
    pci, nics = [], []
    for name, gpu in gpus.items():
        port = f"0000:{gpu}0:00.0"
        bridge = {"host_bridge": f"pci0000:{gpu}0", "numa": 0}
        pci += [PciNode(port, None, pci_class=0x060400, **bridge)]
        pci += [PciNode(f"0000:{gpu}{i}:00.0", port, **bridge) for i in (1, 2)]
        nics += [Nic(name, pci=f"0000:{gpu}2:00.0", numa=0, **FACTS)]
    places = tuple(Gpu(gpu, f"0000:{gpu}1:00.0") for gpu in sorted(gpus.values()))
    return Topology(System(pci=tuple(pci), gpus=places, nics=tuple(nics)))


@contextlib.contextmanager
def joined(
    near: Topology | None, far: Topology, here, there
) -> Iterator[tuple[TransferEngine, Peer, int, int]]:
    with (
        TransferEngine(transports=["rdma"], topology=near) as first,
        TransferEngine(transports=["rdma"], topology=far) as second,
    ):
        addresses = [first.register(here).address, second.register(there).address]
        with first.open(second.name) as peer:
            yield first, peer, *addresses


def moved(engine: TransferEngine, peer: Peer) -> dict[str, int]:
    """Bytes written by each of our NICs that wrote any."""
    paths = engine.stats()["paths"][peer.name]
    counts = {name: counters["num_bytes_written"] for name, counters in paths.items()}
    return {name: count for name, count in counts.items() if count}


def rails(engine: TransferEngine, peer: Peer, here: int, there: int) -> list[str]:
    *_, told = engine.explain_path(here, peer, there, SIZE).reasons
    return told.partition("NIC to NIC: ")[2].split(", ")


def test_rail_between_near_nics_is_used(world):
    """Ours of the second number, the peer's of the first: no rail by numbers is near to both."""
    here, there = addressed(SIZE), addressed(SIZE, 1)
    near, far = on_nodes(fake0=1, fake1=0), on_nodes(fake2=0, fake3=1)
    with joined(near, far, here, there) as (engine, peer, a, b):
        assert world.live()["queue pair"] == 2 * 2
        for _ in range(3):
            engine.write(peer, [(a, b, SIZE)]).wait()
        np.testing.assert_array_equal(there, here)
        assert moved(engine, peer) == {"fake1": 3 * SIZE}


def test_slow_small_request_does_not_switch_to_far_nics(world):
    """What the NICs that are near take for it is latency, and others have not been tried."""
    for index in range(4):
        world.set_device(index, bytes_per_s=20 << 20)  # of what the ports claim
    here, there = addressed(SIZE), addressed(SIZE, 1)
    near, far = on_nodes(fake0=1, fake1=0), on_nodes(fake2=0, fake3=1)
    with joined(near, far, here, there) as (engine, peer, a, b):
        for _ in range(5):
            engine.write(peer, [(a, b, SIZE)]).wait()
        assert moved(engine, peer) == {"fake1": 5 * SIZE}
        assert world.live()["queue pair"] == 2 * 3
        told = rails(engine, peer, a, b)
        assert told == ["fake0 to fake2", "fake1 to fake3", "fake1 to fake2"]


def test_numbered_rails_suffice_when_they_are_near():
    here, there = addressed(SIZE), addressed(SIZE, 1)
    nodes = {"near": on_nodes(fake0=1, fake1=0), "far": on_nodes(fake2=1, fake3=0)}
    with joined(**nodes, here=here, there=there) as (engine, peer, a, b):
        engine.write(peer, [(a, b, SIZE)]).wait()
        assert rails(engine, peer, a, b) == ["fake0 to fake2", "fake1 to fake3"]
        assert moved(engine, peer) == {"fake1": SIZE}


def test_transfer_works_without_an_unavailable_rail(world):
    here, there = addressed(SIZE), addressed(SIZE, 1)
    near, far = on_nodes(fake0=1, fake1=0), on_nodes(fake2=0, fake3=1)
    with joined(near, far, here, there) as (engine, peer, a, b):
        world.set_port(1, state="DOWN")  # what is up stays so
        engine.write(peer, [(a, b, SIZE)]).wait()
        np.testing.assert_array_equal(there, here)
        assert world.live()["queue pair"] == 2 * 2
        assert "port 1 of fake1 is DOWN" in rails(engine, peer, a, b)[2]


@pytest.mark.parametrize("crossed", [False, True])
def test_memory_of_gpus(gpu, crossed):
    here, there = gpu.allocate(SIZE), gpu.allocate(SIZE, device=1)
    here.bytes[:], there.bytes[:] = addressed(SIZE), addressed(SIZE, 1)
    far = beside_gpus(fake2=1, fake3=0) if crossed else beside_gpus(fake2=0, fake3=1)
    with joined(beside_gpus(fake0=1, fake1=0), far, here, there) as (engine, peer, a, b):
        engine.write(peer, [(a, b, SIZE)]).wait()
        np.testing.assert_array_equal(there.bytes, addressed(SIZE))
        assert moved(engine, peer) == {"fake1": SIZE}
        assert rails(engine, peer, a, b)[2:] == (["fake1 to fake2"] if crossed else [])


@pytest.mark.parametrize(
    ("visible", "nic"),
    [
        *(("1", "fake0"), ("1,0", "fake0"), ("GPU-b", "fake0"), ("GPU-b00,GPU-a", "fake0")),
        *(("0", "fake1"), ("", "fake1"), ("GPU-c", "fake1"), ("7,1", "fake1"), ("GPU-", "fake1")),
    ],
)
def test_gpu_numbering_follows_cuda_visible_devices(gpu, monkeypatch, visible, nic):
    """What it calls cuda:0 is the second one, if that is the first that it sees."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    machine = beside_gpus(fake0=1, fake1=0).system
    uuids = [dataclasses.replace(gpu, uuid=f"GPU-{gpu.index + 10:x}00") for gpu in machine.gpus]
    found = Topology(dataclasses.replace(machine, gpus=tuple(uuids)))
    monkeypatch.setattr(Topology, "discover", lambda: found)
    here, there = gpu.allocate(SIZE), gpu.allocate(SIZE, device=1)
    with joined(None, beside_gpus(fake2=1, fake3=0), here, there) as (engine, peer, a, b):
        engine.write(peer, [(a, b, SIZE)]).wait()
        assert moved(engine, peer) == {nic: SIZE}


@pytest.mark.parametrize(
    ("visible", "order", "warnings"),
    [
        *(("1", [], 1), ("1", [1], 0), ("1,0", [1], 0), ("1,0", [0], 1)),
        *(("0", [], 0), ("", [1], 0), ("7", [1], 0)),
    ],
)
def test_topology_in_another_gpu_order_triggers_warning(
    world, caplog, monkeypatch, visible, order, warnings
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = beside_gpus(fake0=1, fake1=0)
    monkeypatch.setattr(Topology, "discover", lambda: found)
    with TransferEngine(topology=found.with_gpu_order(order)):
        pass
    texts = [entry.message for entry in caplog.records if entry.levelname == "WARNING"]
    assert len(texts) == warnings
    assert all("see Topology.with_visible_gpus" in text for text in texts)


def test_named_nics_follow_visible_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setattr(Topology, "discover", lambda: beside_gpus(fake0=0, fake1=1))
    topology = names.topology_of("fake0,fake1", ("rdma",))
    assert [nic.name for nic in topology.nic_tiers("cuda:0")[0]] == ["fake1"]


def test_nic_is_resolved_by_its_pci_address(world, monkeypatch, tmp_path):
    """As in the NCCL_TOPO_FILE of a cloud."""
    address = "0101:00:00.0"
    (tmp_path / f"sys/bus/pci/devices/{address}/infiniband/fake1").mkdir(parents=True)
    monkeypatch.setattr("mooncake_kernels.transfer.nics.MachineRoot", lambda: MachineRoot(tmp_path))
    pci = (PciNode(address, None, "pci0101:00"), PciNode("0102:00:00.0", None, "pci0102:00"))
    nics = tuple(Nic(node.address, node.address, **FACTS) for node in pci)
    topology = Topology(System(pci=pci, nics=nics))
    here, there = addressed(SIZE), addressed(SIZE, 1)
    with joined(topology, on_nodes(fake2=0), here, there) as (engine, peer, a, b):
        engine.write(peer, [(a, b, SIZE)]).wait()
        assert moved(engine, peer) == {"fake1": SIZE}
    with pytest.raises(InvalidArgument, match='got "0102:00:00.0"'):
        TransferEngine(transports=["rdma"], topology=Topology(System(pci=pci[1:], nics=nics[1:])))


def test_single_node_uses_numbered_rails(world):
    """On a machine of one node all NICs are near to all of its memory."""
    here, there = addressed(SIZE), addressed(SIZE, 1)
    topologies = (on_nodes(**dict.fromkeys(names, 0)) for names in (ALL[:3], ALL[3:]))
    with joined(*topologies, here, there) as (engine, peer, a, b):
        engine.write(peer, [(a, b, SIZE)]).wait()
        assert world.live()["queue pair"] == 2 * 3
