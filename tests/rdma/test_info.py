"""What sysfs adds to what verbs report of a NIC: its place, its link."""

import pytest

from mooncake_kernels import _host
from mooncake_kernels._machine_root import MachineRoot
from mooncake_kernels.rdma import devices, info
from mooncake_kernels.rdma.info import describe, gid_text

FUNCTION = "sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0"


def facts(name):
    port = {"number": 1, "state": "ACTIVE", "link_layer": "InfiniBand", "active_mtu": 4096,
            "max_mtu": 4096, "max_message_bytes": 1 << 30, "lid": 7, "gids": []}  # fmt: skip
    return {"name": name, "node_type": "CA", "node_guid": 0x506B4B0300C26AE0,
            "firmware": "28.39.1002", "vendor_id": 0x2C9,
            "max_mr_bytes": 1 << 40, "max_mr": 1 << 24, "max_qp": 1 << 17,
            "max_qp_wr": 1 << 15, "max_sge": 30, "max_sge_read": 30, "max_cq": 1 << 24,
            "max_cqe": 1 << 22, "max_reads_in": 16, "max_reads_out": 16,
            "ports": [port]}  # fmt: skip


def write(root, name, text):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def root(tmp_path):
    write(tmp_path, f"{FUNCTION}/numa_node", "1\n")
    nic = tmp_path / FUNCTION / "infiniband/mlx5_0"
    write(nic, "ports/1/rate", "400 Gb/sec (4X NDR)\n")
    (nic / "device").symlink_to("../..")
    (tmp_path / "sys/class/infiniband").mkdir(parents=True)
    link = tmp_path / "sys/class/infiniband/mlx5_0"
    link.symlink_to(f"../../../{FUNCTION}/infiniband/mlx5_0")
    return tmp_path


def test_pci_nic_is_described(root):
    info = describe(facts("mlx5_0"), MachineRoot(root))
    assert (info.pci, info.numa) == ("0000:3b:00.0", 1)
    assert info.pci_path == f"/{FUNCTION}"
    assert info.node_guid == "506b:4b03:00c2:6ae0"
    (port,) = info.ports
    assert (port.rate_gbps, port.width, port.lid) == (400.0, 4, 7)


@pytest.mark.parametrize("rate, expected", [("10 Gb/sec", (10.0, None)), ("2.5 Gb/sec (1X SDR)",
                         (2.5, 1)), ("", (None, None)), ("fast", (None, None))])  # fmt: skip
def test_link_rate_and_width_from_sysfs(root, rate, expected):
    (root / FUNCTION / "infiniband/mlx5_0/ports/1/rate").write_text(rate)
    (port,) = describe(facts("mlx5_0"), MachineRoot(root)).ports
    assert (port.rate_gbps, port.width) == expected


def test_unknown_numa_node_is_none(root):
    (root / FUNCTION / "numa_node").write_text("-1\n")
    assert describe(facts("mlx5_0"), MachineRoot(root)).numa is None


def test_nic_without_a_pci_bus(root):
    info = describe(facts("siw0"), MachineRoot(root))
    assert (info.pci, info.pci_path, info.numa) == (None, None, None)


def test_gids_as_text():
    mapped = bytes(10) + b"\xff\xff" + bytes([10, 0, 0, 1])
    assert gid_text(mapped) == "::ffff:10.0.0.1"
    assert gid_text(b"\xfe\x80" + bytes(13) + b"\x01") == "fe80::1"


def test_missing_library_hides_devices_with_a_warning(monkeypatch, caplog, tmp_path, root):
    """A NIC of the kernel's is not left out silently."""
    monkeypatch.setattr(_host, "missing_verbs", lambda: "libibverbs.so.1: cannot open it")
    monkeypatch.setattr(info, "MachineRoot", lambda: MachineRoot(tmp_path / "none"))
    assert devices() == [] and not caplog.records
    monkeypatch.setattr(info, "MachineRoot", lambda: MachineRoot(root))
    assert devices() == []
    assert caplog.messages == ["mlx5_0 is not listed: libibverbs.so.1: cannot open it"]
