"""Ports, addresses, MTUs and bonds."""

import pytest

from mooncake_kernels.doctor import Here, State
from mooncake_kernels.rdma import DeviceInfo, PortInfo

from .machine import nic

IB = "/sys/class/infiniband/mlx5_3"


def place(machine, name):
    """Return the name of a file without links, to write over it."""
    for link in sorted(machine.links, key=len, reverse=True):
        if name.startswith(link + "/"):
            return place(machine, machine.links[link] + name[len(link) :])
    return name


def broken(machine, changes):
    """Change files (None removes one) and return what is then wrong."""
    for name, content in changes.items():
        if content is None:
            machine.remove(place(machine, name))
        else:
            machine.files[place(machine, name)] = content
    return machine.bad()


def left_out(machine, node_type):
    """mlx5_3 is of another kind; return the findings that name it."""
    machine.files[place(machine, f"{IB}/node_type")] = node_type
    pci = nic(3)
    return [
        f for f in machine.findings() if "mlx5_3" in f"{f.subject} {f.detail}" or pci in f.subject
    ]


@pytest.mark.parametrize(
    "node_type, vendor, reason",
    [
        ("4: RNIC\n", None, "iWARP: its queue pairs connect by rdma_cm alone"),
        ("6: usNIC UDP\n", None, "node type usNIC UDP: it has no RC queue pairs"),
        ("7: unspecified\n", "0x1d0f\n", "EFA: it has no RC queue pairs"),
    ],
)
def test_unusable_device_is_left_out_of_all_checks(machine, node_type, vendor, reason):
    """Nothing of it is to be fixed: not its addresses, not its files."""
    port = f"{IB}/ports/1"
    machine.files[place(machine, f"{port}/state")] = "1: DOWN\n"
    machine.files[place(machine, f"{port}/link_layer")] = "Unknown\n"
    if vendor:
        machine.files[place(machine, f"{IB}/device/vendor")] = vendor
    machine.remove(place(machine, f"{port}/gids"))
    machine.remove("/dev/infiniband/uverbs3")
    [finding] = left_out(machine, node_type)
    assert (finding.check, finding.state) == ("devices", State.INFO)
    assert (finding.subject, finding.detail, finding.fix) == ("mlx5_3", f"left out: {reason}", None)
    assert machine.bad() == []


def test_only_unusable_devices_means_host_transports_only(machine):
    for pair in range(8):
        machine.files[place(machine, f"/sys/class/infiniband/mlx5_{pair}/node_type")] = "4: RNIC\n"
    details = [f.detail for f in machine.findings("devices")]
    assert details[-1] == "no usable RDMA device: host transports only" and len(details) == 9
    assert machine.bad() == []


PORT, NET = f"{IB}/ports/1", "/sys/class/net/eth3"


@pytest.mark.parametrize(
    "changes, check, state, detail, fix",
    [
        ({f"{PORT}/state": "1: DOWN\n", f"{PORT}/phys_state": "3: Disabled\n",
          f"{NET}/flags": "0x1002\n", f"{NET}/operstate": "down\n"},
         "port", State.WARNING, "DOWN, physically Disabled, must be ACTIVE",
         "ip link set dev eth3 up"),
        ({f"{PORT}/state": "1: DOWN\n", f"{PORT}/phys_state": "2: Polling\n"},
         "port", State.WARNING, "DOWN, physically Polling",
         "check cable and switch: rdma link show mlx5_3/1; ethtool eth3"),
        ({f"{PORT}/state": "2: INIT\n", f"{PORT}/link_layer": "InfiniBand\n"},
         "port", State.WARNING, "INIT", "systemctl start opensm"),
        ({f"{PORT}/state": "1: DOWN\n", f"{PORT}/link_layer": "InfiniBand\n"},
         "port", State.WARNING, "DOWN", "ibportstate -D 0 1"),
        ({f"{NET}/operstate": "down\n"}, "netdev", State.PROBLEM, "eth3 is down, must be up",
         "ip link set dev eth3 up"),
        ({f"{PORT}/gid_attrs/types/1": "IB/RoCE v1\n", f"{PORT}/gid_attrs/types/3": "IB/RoCE v1\n"},
         "gid", State.PROBLEM, "4 GIDs, none of them RoCE v2", "ibv_devinfo -v -d mlx5_3"),
        ({f"{PORT}/gids/2": None, f"{PORT}/gids/3": None},
         "gid", State.WARNING, "fe80:", "ip addr add ADDRESS/PREFIX dev eth3"),
        ({f"{PORT}/gids/{i}": "0000:0000:0000:0000:0000:ffff:a9fe:0304\n" for i in range(4)},
         "gid", State.WARNING, "169.254.3.4", "ip addr add ADDRESS/PREFIX dev eth3"),
        ({f"{PORT}/gids": None, f"{PORT}/gid_attrs": None},
         "gid", State.PROBLEM, "no GID", "ip addr add ADDRESS/PREFIX dev eth3"),
        ({f"{PORT}/link_layer": "InfiniBand\n", f"{PORT}/pkeys/0": "0x7fff\n"},
         "pkey", State.WARNING, "0x7fff", "partitions.conf"),
        ({f"{PORT}/link_layer": "InfiniBand\n", f"{PORT}/gids": None},
         "gid", State.PROBLEM, "no GID", "rdma link show mlx5_3/1"),
    ],
)  # fmt: skip
def test_each_broken_port_attribute_is_reported(machine, changes, check, state, detail, fix):
    (finding,) = broken(machine, changes)
    assert (finding.check, finding.subject, finding.state) == (check, "mlx5_3 port 1", state)
    assert detail in finding.detail
    assert fix in finding.fix


def test_no_active_port_is_a_problem(machine):
    changes = {f"/sys/class/infiniband/mlx5_{i}/ports/1/state": "1: DOWN\n" for i in range(8)}
    bad = broken(machine, changes)
    assert [(f.check, f.state) for f in bad] == [("port", State.PROBLEM)] * 8


def test_unreadable_port_state_is_unknown(machine):
    assert broken(machine, {f"{PORT}/state": None}) == []
    (finding,) = [f for f in machine.findings("ports") if f.state is State.UNKNOWN]
    assert finding.subject == "mlx5_3 port 1"


def test_interface_in_another_namespace_is_a_warning(machine):
    machine.remove(NET)
    (finding,) = machine.bad()
    assert (finding.check, finding.state) == ("netdev", State.WARNING)
    assert "eth3 is not in this namespace" in finding.detail and "--network host" in finding.fix


def test_slow_port_is_only_info(machine):
    assert broken(machine, {f"{PORT}/rate": "25 Gb/sec (1X EDR)\n"}) == []
    (finding,) = machine.findings("rate")
    assert finding.state is State.INFO and finding.subject == "mlx5_3 port 1"
    assert finding.detail == "25 Gb/s, where the fastest port has 400"


@pytest.mark.parametrize("mtu, payload", [("1500", 1024), ("4191", 2048), ("600", 256), ("200", 0)])
def test_small_mtu_on_one_port_is_reported(machine, mtu, payload):
    mismatch = broken(machine, {f"{NET}/mtu": mtu})
    assert [f.state for f in mismatch] == [State.WARNING] * len(mismatch)
    assert mismatch[0].check == "mtu" and f"payload of {payload}" in mismatch[0].detail
    assert mismatch[0].fix.startswith("ip link set dev eth3 mtu 9000")
    if payload:
        assert mismatch[1].check == "mtu_mismatch" and mismatch[1].subject == "mlx5_3 port 1"
        assert mismatch[1].detail == f"payload of {payload} bytes, where mlx5_0 port 1 has 4096"


def test_smallest_mtu_that_carries_4096_bytes(machine):
    assert broken(machine, {f"/sys/class/net/eth{i}/mtu": "4192" for i in range(8)}) == []


def verbs(name, active, maximum=4096, **more):
    limits = {"max_mr_bytes": 1 << 62, "max_mr": 1 << 24, "max_qp": 1 << 17, "max_cqe": 1 << 22}
    port = PortInfo(1, "ACTIVE", "Ethernet", 400.0, active, maximum, 0, ())
    return DeviceInfo(name, "", "", None, None, ports=(port,), max_sge=30, **limits | more)


def test_active_mtu_from_libibverbs_is_checked(machine):
    machine.here = Here(devices=(verbs("mlx5_3", 1024), verbs("mlx5_2", 4096)))
    bad = machine.bad()
    assert [f.check for f in bad] == ["mtu", "mtu_mismatch"]
    assert bad[0].detail.endswith("payload of 4096, but libibverbs says 1024")
    assert "eth3 down" in bad[0].fix


def test_infiniband_mtu_comes_from_libibverbs(machine):
    machine.files[place(machine, f"{PORT}/link_layer")] = "InfiniBand\n"
    machine.here = Here(devices=(verbs("mlx5_3", 2048),))
    bad = machine.bad()
    assert [f.check for f in bad] == ["mtu", "mtu_mismatch"]
    assert bad[0].detail == "payload of 2048 bytes, the port can 4096"
    assert "mtu=5" in bad[0].fix


def test_memory_region_limits_are_reported(machine):
    machine.here = Here(
        devices=(
            verbs("mlx5_3", 4096, max_mr=100),
            verbs("mlx5_2", 4096, max_mr_bytes=2 << 30),
        )
    )
    findings = {(f.check, f.subject): f for f in machine.findings("regions")}
    assert findings["max_mr", "mlx5_3"].state is State.WARNING
    assert "100 regions" in findings["max_mr", "mlx5_3"].detail
    small = findings["max_mr_size", "mlx5_2"]
    assert small.state is State.INFO and small.detail.startswith("2 GiB a region, of 1008 GiB")
    assert findings["max_mr", "mlx5_2"].state is State.OK


def test_nic_without_rdma_driver_is_a_problem(machine):
    machine.remove("/sys/class/infiniband")
    machine.remove("/sys/class/infiniband_verbs")
    bad = machine.bad()
    assert [(f.check, f.subject) for f in bad] == [("devices", nic(pair)) for pair in range(8)]
    assert bad[0].state is State.PROBLEM and bad[0].fix == "modprobe mlx5_ib"


def bond(machine, mode, slave="up"):
    net = "/sys/devices/virtual/net/bond0"
    machine.links["/sys/class/net/bond0"] = net
    machine.files |= {
        f"{net}/bonding/mode": mode,
        f"{net}/bonding/slaves": "eth2 eth3\n",
        place(machine, "/sys/class/net/eth3/bonding_slave/mii_status"): slave,
        place(machine, "/sys/class/net/eth2/bonding_slave/mii_status"): "up\n",
    }
    for name in ("eth2", "eth3"):
        machine.links[place(machine, f"/sys/class/net/{name}/master")] = net


def test_healthy_bond_is_ok(machine):
    bond(machine, "802.3ad 4\n")
    findings = machine.findings("bonding")
    assert {f.state for f in findings} == {State.OK}
    assert "802.3ad over mlx5_2, mlx5_3" in findings[0].detail


def test_bond_slave_that_is_down_is_reported(machine):
    bond(machine, "active-backup 1\n", slave="down\n")
    (finding,) = machine.bad()
    assert finding.subject == "eth3 of bond0" and finding.detail == "down, must be up"
    assert finding.fix == "ip link set dev eth3 up"


def test_bond_mode_unsupported_by_rdma_is_a_problem(machine):
    bond(machine, "balance-rr 0\n")
    (finding,) = machine.bad()
    assert finding.state is State.PROBLEM and finding.subject == "bond0"
    assert finding.detail.startswith("balance-rr over mlx5_2, mlx5_3")
    steps = finding.fix.split(" && ")
    assert steps[0] == "ip link set dev bond0 down"
    assert "ip link set dev eth3 down nomaster" in steps
    assert "ip link set dev bond0 type bond mode 802.3ad" in steps


def test_gids_are_printed_as_ip_addresses(machine):
    findings = {finding.subject: finding.detail for finding in machine.findings("gid")}
    assert findings["mlx5_3 port 1"] == "index 3: 10.0.3.1, RoCE v2"


def test_global_ipv6_gid_is_accepted(machine):
    changes = {f"{PORT}/gids/2": None, f"{PORT}/gids/3": "2001:0db8:0000:0000:0000:0000:0000:0003"}
    assert broken(machine, changes) == []
    findings = {finding.subject: finding.detail for finding in machine.findings("gid")}
    assert findings["mlx5_3 port 1"] == "index 3: 2001:db8::3, RoCE v2"
