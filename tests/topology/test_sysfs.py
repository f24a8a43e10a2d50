"""discover reads a machine's files: the sysfs made of a captured machine gives that machine."""

import dataclasses
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.topology import PathKind, Topology

from .support import (
    NAMES,
    as_sysfs_tells,
    check_or_refused,
    link,
    machine,
    names,
    write,
    write_routes,
    write_sysfs,
)


@pytest.mark.parametrize("name", NAMES)
def test_discovered_sysfs_matches_the_captured_machine(name, tmp_path):
    captured = as_sysfs_tells(machine(name).system)
    found = Topology.discover(write_sysfs(captured, tmp_path))
    assert found.system == captured
    assert found.to_mooncake_json() == machine(name).to_mooncake_json()


@pytest.fixture
def root(tmp_path):
    return write_sysfs(as_sysfs_tells(machine("down-port").system), tmp_path)


def device(root, address):
    return (root / f"sys/bus/pci/devices/{address}").resolve().relative_to(root.resolve())


def test_discovers_this_machine():
    topology = Topology.discover()
    assert topology.numa_nodes
    assert topology.path("cpu:0", "cpu:0") == PathKind.SELF
    assert topology.explain("cpu:0")


def test_gpus_given_to_the_container_come_first(root):
    """As in NVML, which shows it no others; sysfs shows all."""
    *others, given = [gpu.pci for gpu in Topology.discover(root).gpus]
    for address in others:
        shutil.rmtree(root / f"proc/driver/nvidia/gpus/{address}")
    gpus = Topology.discover(root).gpus
    assert [gpu.pci for gpu in gpus] == [given, *others]
    assert [gpu.index for gpu in gpus] == list(range(len(gpus)))
    assert gpus[0].uuid and not gpus[1].uuid
    shutil.rmtree(root / "proc/driver")  # the driver is not loaded
    assert [gpu.pci for gpu in Topology.discover(root).gpus] == [*others, given]


def test_soft_roce_is_located_at_its_interface(root):
    """rxe0 has no device of its own; its file `parent` names an interface, here of virtio."""
    nic = device(root, "0000:1a:00.0")
    (root / f"{nic}/virtio2/net/eth0").mkdir(parents=True)
    link(root, f"{nic}/virtio2/net/eth0/device", f"{nic}/virtio2")
    link(root, "sys/class/net/eth0", f"{nic}/virtio2/net/eth0")
    rxe = "sys/devices/virtual/infiniband/rxe0"
    write(root, f"{rxe}/parent", "eth0")
    write(root, f"{rxe}/ports/1/state", "4: ACTIVE")
    write(root, f"{rxe}/ports/1/rate", "2.5 Gb/sec (1X SDR)")
    write(root, f"{rxe}/ports/1/link_layer", "Ethernet")
    write(root, f"{rxe}/ports/1/gids/0", "fe80:0000:0000:0000:5054:00ff:fe12:3456")
    link(root, "sys/class/infiniband/rxe0", rxe)
    topology = Topology.discover(root)
    found = topology.nics[-1]
    assert (found.name, found.pci, found.netdevs) == ("rxe0", "0000:1a:00.0", ("eth0",))
    assert found.has_gid and found.link_layer == "Ethernet"
    assert topology.path("cuda:0", "rxe0") == PathKind.PIX


def test_nic_without_a_pci_device(root):
    rxe = "sys/devices/virtual/infiniband/rxe1"
    write(root, f"{rxe}/parent", "lo")
    link(root, "sys/class/infiniband/rxe1", rxe)
    topology = Topology.discover(root)
    assert topology.nics[-1].pci is None
    assert topology.path("cuda:0", "rxe1") == PathKind.SYS  # of two nodes, it is not known which


def test_gpu_memory_node_is_mapped_to_the_nearest_cpu_node(root):
    """GB200: a GPU of node 2, which has no processors, belongs to the nearest one that has."""
    write(root, "sys/devices/system/node/node2/cpulist", "")
    for node, distances in enumerate(("10 20 80", "20 10 40", "80 40 10")):
        write(root, f"sys/devices/system/node/node{node}/distance", distances)
    gpu = machine("down-port").gpus[0].pci
    write(root, f"{device(root, gpu)}/numa_node", 2)
    topology = Topology.discover(root)
    assert [node.id for node in topology.numa_nodes] == [0, 1]
    assert topology.path("cpu:1", "cuda:0") == PathKind.PHB


def test_local_cpus_decide_if_the_numa_node_is_hidden(root):
    for node in Topology.discover(root).system.pci:
        write(root, f"{device(root, node.address)}/numa_node", -1)
        write(root, f"{device(root, node.address)}/local_cpulist", "0-31")
    assert {node.numa for node in Topology.discover(root).system.pci} == {0}
    for node in Topology.discover(root).system.pci:
        write(root, f"{device(root, node.address)}/local_cpulist", "0-63")
    assert {node.numa for node in Topology.discover(root).system.pci} == {-1}


def test_single_numa_node_is_assumed_without_numa(root, tmp_path):
    (root / "sys/devices/system/node").rename(tmp_path / "away")
    (root / "sys/bus").rename(tmp_path / "bus")
    (root / "sys/class/infiniband").rename(tmp_path / "infiniband")
    assert [node.id for node in Topology.discover(root).numa_nodes] == [0]


def test_default_route_of_a_vlan_belongs_to_its_nic(root):
    (root / "sys/devices/virtual/net/ib0.7").mkdir(parents=True)
    link(root, "sys/class/net/ib0.7", "sys/devices/virtual/net/ib0.7")
    link(root, "sys/devices/virtual/net/ib0.7/lower_ib0", "sys/class/net/ib0")
    write_routes(root, ["ib0.7"])
    assert [nic.has_default_route for nic in Topology.discover(root).nics] == [1, 0, 0, 0]


def test_default_route_of_ipv6_is_detected(root):
    zero = "0" * 32
    write(root, "proc/net/ipv6_route", f"{zero} 00 {zero} 00 {'f' * 32} 0400 1 0 0003     ib2")
    assert [nic.has_default_route for nic in Topology.discover(root).nics] == [0, 0, 1, 0]


def test_the_best_port_counts(root):
    base = f"{device(root, '0000:1a:00.0')}/infiniband/mlx5_0/ports"
    write(root, f"{base}/2/state", "4: ACTIVE")
    write(root, f"{base}/2/rate", "800 Gb/sec (8X NDR)")
    write(root, f"{base}/3/state", "1: DOWN")
    write(root, f"{base}/3/rate", "1600 Gb/sec")
    [nic] = [nic for nic in Topology.discover(root).nics if nic.name == "mlx5_0"]
    assert (nic.port, nic.gbit_per_s, nic.link_layer) == (2, 800.0, "")


def test_bmc_is_not_listed_as_a_gpu(root):
    folder = "sys/devices/pci0000:00/0000:00:1f.0"
    write(root, f"{folder}/class", "0x030000")
    write(root, f"{folder}/vendor", "0x1a03")
    link(root, "sys/bus/pci/devices/0000:00:1f.0", folder)
    assert len(Topology.discover(root).gpus) == 4


def test_bandwidth_uses_maximum_speed_and_current_width(root):
    """Speeds are the highest the link can, lanes those in use; what is unknown does not limit."""
    nic = device(root, "0000:1a:00.0")
    write(root, f"{nic}/current_link_width", 8)
    assert Topology.discover(root).path_bandwidth("cuda:0", "mlx5_0") == pytest.approx(31.5, 0.01)
    write(root, f"{nic}/current_link_width", 255)
    write(root, f"{nic}/max_link_speed", "Unknown")
    assert Topology.discover(root).path_bandwidth("cuda:0", "mlx5_0") == pytest.approx(63.0, 0.01)
    virtual = machine("vm-h200")
    assert virtual.path_bandwidth("cuda:0", "mlx5_0") is None


def break_gpu(root):
    (root / "sys/bus/pci/devices/0000:18:00.0").unlink()
    link(root, "sys/bus/pci/devices/0000:18:00.0", "sys/devices/gone")


def break_nic(root):
    (root / "sys/class/infiniband/mlx5_2").unlink()
    link(root, "sys/class/infiniband/mlx5_2", "sys/class/infiniband/mlx5_2")


def break_numa(root):
    write(root, f"{device(root, '0000:18:00.0')}/numa_node", "zero")


def break_node(root):
    write(root, f"{device(root, '0000:18:00.0')}/numa_node", 7)


def break_rate(root):
    write(root, f"{device(root, '0000:1a:00.0')}/infiniband/mlx5_0/ports/1/rate", "fast")


def break_tree(root):
    """A GPU's folder that is inside another device as well: above and below each other."""
    old = device(root, "0000:18:00.0")
    again = f"{old}/0000:f9:00.0/0000:18:00.0"
    (root / again).mkdir(parents=True)
    link(root, "sys/class/infiniband/mlx5_9/device", again)


def break_width(root):
    write(root, f"{device(root, '0000:18:00.0')}/current_link_width", "x16")


def break_cpus(root):
    write(root, "sys/devices/system/node/node1/cpulist", "0-zz")


def break_class(root):
    write(root, f"{device(root, '0000:18:00.0')}/class", "3D")


def break_file(root):
    """Files that a driver leaves next to its devices."""
    write(root, "sys/class/infiniband/notes", "no device")


def break_port(root):
    path = root / f"{device(root, '0000:1a:00.0')}/infiniband/mlx5_0/ports"
    (path / "1").rename(path / "0")


GPU = "0000:18:00.0"


@pytest.mark.parametrize(
    ("break_it", "left_out", "warning"),
    [
        (break_gpu, GPU, "0000:18:00.0 leads nowhere: left out"),
        (break_nic, "mlx5_2", "/sys/class/infiniband/mlx5_2 leads nowhere: left out"),
        (break_class, GPU, "0000:18:00.0/class must hold an integer, got '3D'"),
        (break_numa, "", "0000:18:00.0/numa_node must hold an integer, got 'zero'"),
        (break_node, "", "0000:18:00.0/numa_node must be one of [0, 1] or -1, got '7'"),
        (break_rate, "", "ports/1/rate must hold a number of Gb/sec, got 'fast'"),
        (break_width, "", "current_link_width must hold an integer, got 'x16'"),
        (break_cpus, "", "node1/cpulist must list processors, got '0-zz'"),
        (break_file, "", ""),
        (break_port, "", ""),
    ],
)
def test_broken_device_hides_no_other(root, caplog, break_it, left_out, warning):
    before = Topology.discover(root)
    break_it(root)
    found = Topology.discover(root)
    assert [node.id for node in found.numa_nodes] == [node.id for node in before.numa_nodes]
    assert {gpu.pci for gpu in before.gpus} - {gpu.pci for gpu in found.gpus} <= {left_out}
    assert set(names(before.nics)) - set(names(found.nics)) <= {left_out}
    assert len(found.gpus) + len(found.nics) == (
        len(before.gpus) + len(before.nics) - bool(left_out)
    )
    assert warning in caplog.text
    assert bool(caplog.records) == bool(warning)
    assert found.choose_nics(f"cuda:{len(found.gpus) - 1}")


def test_pci_cycle_is_rejected(root):
    break_tree(root)
    message = "PCI device 0000:18:00.0 is below .* and also below 0000:f9:00.0: a loop"
    with pytest.raises(InvalidArgument, match=f"discover: root must be .*{message}"):
        Topology.discover(root)


def test_root_without_sysfs_is_rejected(tmp_path):
    with pytest.raises(InvalidArgument, match="root must have a folder sys"):
        Topology.discover(tmp_path)
    with pytest.raises(InvalidArgument, match="root must be a path, got 7"):
        Topology.discover(7)


def test_empty_sysfs_gives_an_empty_machine(tmp_path):
    (tmp_path / "sys").mkdir()
    topology = Topology.discover(tmp_path)
    assert (topology.gpus, topology.nics, topology.choose_nics("cpu:0")) == ((), (), [])
    assert dataclasses.asdict(topology.numa_nodes[0]) == {"id": 0, "cpus": ""}
    assert names(topology.nics) == []


KINDS = [
    ("1: CA", ""),
    ("4: RNIC", "iWARP: its queue pairs connect by rdma_cm alone"),
    ("5: usNIC", "node type usNIC: it has no RC queue pairs"),
    ("6: usNIC UDP", "node type usNIC UDP: it has no RC queue pairs"),
    ("7: unspecified", "node type unspecified: it has no RC queue pairs"),
    ("9: <unknown>", ""),
    ("CA", ""),
    ("", ""),
]


@pytest.mark.parametrize("node_type, reason", KINDS)
def test_unusable_device_types_are_marked(root, node_type, reason):
    write(root, f"{device(root, '0000:1a:00.0')}/infiniband/mlx5_0/node_type", node_type)
    topology = Topology.discover(root)
    assert topology.nics[0].unusable == reason
    assert ("mlx5_0" not in names(topology.choose_nics("cuda:0"))) == bool(reason)
    assert (f"mlx5_0: not chosen: {reason}\n" in topology.explain("cuda:0")) == bool(reason)


def test_efa_is_recognized_by_its_vendor(root):
    nic = device(root, "0000:1a:00.0")
    write(root, f"{nic}/vendor", "0x1d0f")
    write(root, f"{nic}/infiniband/mlx5_0/node_type", "7: unspecified")
    write(root, f"{nic}/infiniband/mlx5_0/ports/1/link_layer", "Unknown")
    topology = Topology.discover(root)
    assert topology.nics[0].unusable == "EFA: it has no RC queue pairs"
    assert "mlx5_0: not chosen: EFA: it has no RC" in topology.explain("cuda:0")


def test_software_iwarp_on_the_interface_of_the_default_route(root):
    before = Topology.discover(root)
    siw = "sys/devices/virtual/infiniband/siw_eth0"
    write(root, f"{siw}/node_type", "4: RNIC")
    write(root, f"{siw}/ports/1/state", "4: ACTIVE")
    write(root, f"{siw}/ports/1/link_layer", "Ethernet")
    write(root, f"{siw}/ports/1/gids/0", "0200:1700:0000:0000:0000:0000:0000:0000")
    link(root, "sys/class/infiniband/siw_eth0", siw)
    topology = Topology.discover(root)
    for location in topology.locations:
        assert topology.choose_nics(location) == before.choose_nics(location)
        assert "siw_eth0: not chosen: iWARP" in topology.explain(location)


def test_virtual_functions_come_after_their_physical_function(root):
    """They share its port: the card alone gives all of it."""
    nic = device(root, "0000:1a:00.0")
    (root / f"{nic}/physfn").mkdir()
    topology = Topology.discover(root)
    assert [one.is_vf for one in topology.nics] == [True] + [False] * (len(topology.nics) - 1)
    assert "a virtual function" in topology.explain("cuda:0")


@pytest.fixture(scope="module")
def machine_root(tmp_path_factory):
    system = as_sysfs_tells(machine("bonded").system)
    return write_sysfs(system, tmp_path_factory.mktemp("machine"))


WORDS = ["", "-1", "0x", "99999999999999999999", "1e9 GT/s", "nan Gb/sec", "4:", "\0", "../..", "é"]


@pytest.mark.parametrize("state", [b"\x00\n\x00", b"4: ACTIVE\nDOWN", b"", b"4:"])
def test_malformed_port_state_is_unknown(machine_root, state):
    path = sorted(machine_root.rglob("ports/*/state"))[0]
    whole = path.read_bytes()
    path.write_bytes(state)
    try:
        topology = Topology.discover(machine_root)
    finally:
        path.write_bytes(whole)
    assert topology.explain("cpu:0").count("\n") == len(topology.nics) - 1


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_files_are_read_or_rejected(data, machine_root):
    files = sorted(p for p in machine_root.rglob("*") if p.is_file() and not p.is_symlink())
    path = data.draw(st.sampled_from(files))
    whole = path.read_bytes()
    damaged = data.draw(
        st.one_of(
            st.binary(max_size=20),
            st.sampled_from(WORDS).map(str.encode),
            st.integers(0, len(whole)).map(lambda size: whole[:size]),
        )
    )
    path.write_bytes(damaged)
    try:
        check_or_refused(lambda: Topology.discover(machine_root))
    finally:
        path.write_bytes(whole)
