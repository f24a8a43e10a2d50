"""The topology learns which NICs reach which memory, keeps it, and explains it."""

import errno

import pytest

from mooncake_kernels import InvalidArgument, Topology
from mooncake_kernels.reachability import probe_all
from mooncake_kernels.topology import Nic, NumaNode, System


@pytest.fixture
def topology(tmp_path):
    """A machine whose NICs are fake0 to fake3, on one NUMA node."""
    for i in range(4):
        function = f"sys/devices/pci0000:00/0000:00:0{i + 1}.0"
        nic = tmp_path / function / "infiniband" / f"fake{i}"
        (nic / "ports/1/gids").mkdir(parents=True)
        files = {"state": "4: ACTIVE", "rate": "100 Gb/sec (4X EDR)", "link_layer": "InfiniBand"}
        for name, text in files.items():
            (nic / "ports/1" / name).write_text(text)
        (tmp_path / function / "numa_node").write_text("0")
        (tmp_path / function / "class").write_text("0x020700")
        (nic / "device").symlink_to("../..")
        folder = tmp_path / "sys/class/infiniband"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"fake{i}").symlink_to(f"../../../{function}/infiniband/fake{i}")
        bus = tmp_path / "sys/bus/pci/devices"
        bus.mkdir(parents=True, exist_ok=True)
        (bus / f"0000:00:0{i + 1}.0").symlink_to(f"../../../../{function}")
    node = tmp_path / "sys/devices/system/node/node0"
    node.mkdir(parents=True)
    (node / "cpulist").write_text("0-3")
    return Topology.discover(tmp_path)


def names(topology: Topology) -> list[str]:
    return [nic.name for nic in topology.choose_nics("cpu:0")]


def test_all_nics_reach_host_memory(topology):
    topology.mark_unreachable("cpu:0", "fake2", "was so yesterday")
    assert probe_all(topology) == {("cpu:0", f"fake{i}"): "" for i in range(4)}
    assert not topology.unreachable and len(names(topology)) == 4


def test_nic_that_registers_but_does_not_reach_is_excluded(world, topology, tmp_path):
    world.fail_work("remote access error", skip=4)  # four requests a probe: the second NIC's first
    reasons = probe_all(topology)
    assert "remote access error" in reasons["cpu:0", "fake1"]
    assert sorted(names(topology)) == ["fake0", "fake2", "fake3"]
    [line] = [line for line in topology.explain("cpu:0").splitlines() if "fake1" in line]
    assert "cannot reach cpu:0" in line and "remote access error" in line
    (tmp_path / "topology.json").write_text(topology.to_json())
    assert sorted(names(Topology.from_json(tmp_path / "topology.json"))) == names(topology)


def test_failed_registration_does_not_mark_unreachable(world, topology):
    world.fail("ibv_reg_mr_iova2", errno.ENOMEM, device="fake3", count=100)
    reasons = probe_all(topology)
    assert reasons["cpu:0", "fake3"].startswith("not registered: ")
    assert not topology.unreachable


def test_down_port_is_not_probed(world, topology):
    world.set_port(0, state="DOWN")
    assert ("cpu:0", "fake0") not in probe_all(topology)


def on_two_nodes(*nics: Nic) -> Topology:
    return Topology(System(numa=(NumaNode(0), NumaNode(1)), nics=nics))


FACTS = {"state": "ACTIVE", "gbit_per_s": 100.0, "link_layer": "Ethernet", "has_gid": True}


def test_host_memory_result_applies_to_every_node(world):
    topology = on_two_nodes(*(Nic(f"fake{i}", numa=i, **FACTS) for i in range(2)))
    world.set_option("corrupt", 1)
    reasons = probe_all(topology)
    assert list(reasons) == [("cpu:0", "fake0"), ("cpu:0", "fake1")] and all(reasons.values())
    assert topology.choose_nics("cpu:0") == topology.choose_nics("cpu:1") == []
    world.set_option("corrupt", 0)
    probe_all(topology)
    assert len(topology.choose_nics("cpu:0")) == len(topology.choose_nics("cpu:1")) == 2


@pytest.mark.parametrize("count", [1, 4])
def test_nic_that_cannot_be_opened_is_reported(world, topology, count):
    """The others are probed."""
    for i in range(count):
        world.fail("ibv_open_device", errno.EACCES, device=f"fake{i}", count=1 << 20)
    reasons = probe_all(topology)
    assert len(reasons) == 4
    for i in range(4):
        expected = f"not opened: [Errno 13] ibv_open_device: fake{i}" if i < count else ""
        assert reasons["cpu:0", f"fake{i}"].startswith(expected)
        assert bool(reasons["cpu:0", f"fake{i}"]) == bool(expected)
    assert not topology.unreachable


def test_port_named_by_the_topology_is_probed(world):
    world.add_port()
    world.set_port(0, 2, state="DOWN")
    nics = [Nic("fake0", port=2, **FACTS), Nic("fake1", port=2, **FACTS), Nic("fake9", **FACTS)]
    reasons = probe_all(on_two_nodes(*nics))
    reason = reasons.pop(("cpu:0", "fake1"))
    assert reason == "not opened: port: number must be in 1 to 1, got 2"
    assert reasons.pop(("cpu:0", "fake9")).startswith("not opened: open: name must be an RDMA dev")
    assert not reasons


@pytest.mark.parametrize("opened", [True, False])
def test_unknown_location_is_rejected(world, topology, opened):
    if not opened:
        world.fail("ibv_open_device", errno.EACCES, count=1 << 20)
    with pytest.raises(InvalidArgument, match="locations must be of cpu:0, got 'cuda:0'"):
        probe_all(topology, locations=["cpu:0", "cuda:0"])
    assert world.calls("ibv_reg_mr_iova2") == 0  # refused before anything is probed
