"""from_nccl_xml reads dumps of NCCL, and the static files of clouds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_kernels._machine_root import MachineRoot
from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.topology import PathKind, Topology
from mooncake_kernels.topology.nccl_xml import read_nccl_xml

from .support import MACHINES, check_or_refused, names, shared, write

DUMP = MACHINES / "dump-two-switches.nccl.xml"
STATIC = MACHINES / "static-classes.nccl.xml"


def test_dump_of_nccl_is_read():
    topology = Topology.from_nccl_xml(DUMP)
    assert [gpu.pci for gpu in topology.gpus] == ["0000:9a:00.0", "0000:18:00.0"]  # by `dev`
    assert [gpu.nvlinks for gpu in topology.gpus] == [(("nvswitch", 18),)] * 2
    assert names(topology.nics) == ["eth0", "mlx5_0", "mlx5_1", "mlx5_2"]
    assert [nic.gbit_per_s for nic in topology.nics] == [10.0, 400.0, 200.0, 400.0]
    assert [node.cpus for node in topology.numa_nodes] == ["0-15", "32-47"]
    kinds = [topology.path("cuda:1", nic) for nic in topology.nics]
    assert kinds == [PathKind.NODE, PathKind.PXB, PathKind.PIX, PathKind.SYS]
    assert topology.path("cuda:0", "mlx5_2") == PathKind.PHB
    assert topology.path_bandwidth("cuda:1", "mlx5_0") == pytest.approx(15.75, 0.01)  # x8
    assert names(topology.choose_nics("cuda:1")) == ["mlx5_1", "mlx5_0", "mlx5_2"]
    eth0 = "eth0: not chosen: a network interface without RDMA: its port is 0"
    assert eth0 in topology.explain("cuda:1")


def test_static_file_is_read():
    topology = Topology.from_nccl_xml(STATIC)
    assert [gpu.pci for gpu in topology.gpus] == ["0001:00:00.0", "0002:00:00.0"]
    assert names(topology.nics) == ["0101:00:00.0", "0102:00:00.0"]
    assert topology.path("cuda:0", "0101:00:00.0") == PathKind.PIX
    assert topology.path("cuda:0", "0102:00:00.0") == PathKind.PHB
    assert topology.choose_nics("cuda:1")[0].link_layer == "InfiniBand"


def cloud(name):
    path = shared(name)
    if path is None:
        pytest.skip(f"{name} is not next to this checkout")
    topology = Topology.from_nccl_xml(path)
    assert len(topology.gpus) == 8
    return topology


def test_cloud_file_with_efa_marks_nics_unusable():
    topology = cloud("aws-p4d.nccl.xml")
    assert len(topology.nics) == 4
    for gpu in topology.gpus:
        assert topology.choose_nics(gpu) == []
        assert topology.explain(gpu).count("not chosen: EFA: it has no RC queue pairs") == 4


def test_cloud_file_spreads_gpus_over_nics():
    topology = cloud("azure-ndv4.nccl.xml")
    first = [topology.choose_nics(gpu)[0] for gpu in topology.gpus]
    assert {topology.path(gpu, nic) for gpu, nic in zip(topology.gpus, first, strict=True)} == {
        PathKind.PIX
    }
    counts = {nic.name: first.count(nic) for nic in topology.nics}
    assert set(counts.values()) == {8 // len(topology.nics)}


WITHOUT_CLASS = """<system version="1">
  <cpu numaid="0"><pci busid="0000:00:16.0"/><pci busid="0000:00:17.0"/></cpu>
  <cpu numaid="1"><pci busid="0000:00:1A.0"/><pci busid="0000:00:1b.0" link_width="4"/></cpu>
</system>"""


def test_omitted_fields_are_read_from_the_machine(tmp_path, caplog):
    """A cloud ships files that say nothing of a device but its address."""
    path = tmp_path / "cloud.xml"
    path.write_text(WITHOUT_CLASS)
    kinds = {"16": ("0x030200", "0x10de"), "17": ("0x020700", "0x15b3")}
    kinds |= {"1a": ("0x020000", "0x1d0f"), "1b": ("0x030200", "0x10de")}
    for number, (pci_class, vendor) in kinds.items():
        folder = f"sys/bus/pci/devices/0000:00:{number}.0"
        write(tmp_path, f"{folder}/class", pci_class)
        write(tmp_path, f"{folder}/vendor", vendor)
        write(tmp_path, f"{folder}/device", "0xefa1")
        write(tmp_path, f"{folder}/max_link_speed", "16.0 GT/s PCIe")
        write(tmp_path, f"{folder}/max_link_width", "16")
    topology = Topology(read_nccl_xml(path, MachineRoot(tmp_path)))
    assert [gpu.pci for gpu in topology.gpus] == ["0000:00:16.0", "0000:00:1b.0"]
    assert names(topology.nics) == ["0000:00:1a.0", "0000:00:17.0"]
    assert [nic.link_layer for nic in topology.nics] == ["Ethernet", "InfiniBand"]
    assert names(topology.choose_nics("cuda:0")) == ["0000:00:17.0"]
    assert "0000:00:1a.0: not chosen: EFA" in topology.explain("cuda:0")
    assert [node.width for node in topology.system.pci] == [16, 16, 16, 4]
    assert not caplog.records


def test_absent_devices_are_counted(tmp_path, caplog):
    path = tmp_path / "cloud.xml"
    path.write_text(WITHOUT_CLASS)
    topology = Topology(read_nccl_xml(path, MachineRoot(tmp_path)))
    assert (topology.gpus, topology.nics) == ((), ())
    addresses = "0000:00:16.0, 0000:00:17.0, 0000:00:1a.0, 0000:00:1b.0"
    [message] = caplog.messages
    assert message == (
        f"{path}: 4 devices have no class, and are not on this machine: neither GPUs nor NICs "
        f"({addresses})"
    )


@pytest.mark.parametrize("value", ["", "soon", "-1"])
def test_malformed_sysfs_values_are_not_taken_for_devices(tmp_path, value):
    path = tmp_path / "cloud.xml"
    path.write_text(WITHOUT_CLASS)
    for file in ("class", "vendor", "device", "max_link_speed", "max_link_width"):
        write(tmp_path, f"sys/bus/pci/devices/0000:00:16.0/{file}", value)
    topology = Topology(read_nccl_xml(path, MachineRoot(tmp_path)))
    assert (topology.gpus, topology.nics) == ((), ())


@pytest.mark.parametrize(
    "attributes, reason",
    [
        ('name="eth1" port="0" gdr="0"', "a network interface without RDMA: its port is 0"),
        ('name="eth1" gdr="0"', "a network interface without RDMA: it has no port, and gdr is 0"),
        ('name="mlx5_3" port="1" gdr="0"', ""),  # RoCE, where no driver lends GPU memory
        ('name="mlx5_3"', ""),
    ],
)
def test_net_without_rdma_device_is_marked_unusable(tmp_path, attributes, reason):
    path = tmp_path / "dump.xml"
    path.write_text(
        '<system><cpu numaid="0"><pci busid="0000:01:00.0" class="0x020000">'
        f'<nic><net speed="100000" {attributes}/></nic></pci></cpu></system>'
    )
    topology = Topology.from_nccl_xml(path)
    [nic] = topology.nics
    assert nic.unusable == reason
    assert bool(topology.choose_nics("cpu:0")) == (not reason)


def test_equal_dev_numbers_fall_back_to_bus_order(tmp_path):
    """Each wrote dev=0: then GPUs are in the order of their buses."""
    path = tmp_path / "dump.xml"
    path.write_text(DUMP.read_text().replace('dev="1" sm', 'dev="0" sm'))
    assert [gpu.pci for gpu in Topology.from_nccl_xml(path).gpus] == [
        "0000:18:00.0",
        "0000:9a:00.0",
    ]


def test_gpus_in_separate_pci_domains_are_near_by_numa_node(tmp_path):
    """GB10: nothing is below a common bridge, so the NUMA node alone says what is near."""
    path = tmp_path / "gb10.xml"
    path.write_text(
        '<system version="1"><cpu arch="arm64">'
        '<pci busid="0000:01:00.0" class="0x020000" link_speed="32.0 GT/s PCIe" link_width="4">'
        '<nic><net name="rocep1s0f0" speed="200000"/></nic></pci>'
        '<pci busid="000f:01:00.0" class="0x030200" link_speed="2.5 GT/s PCIe" link_width="16">'
        '<gpu dev="0" sm="121"><c2c bw="43125" count="8"/></gpu></pci>'
        "</cpu></system>"
    )
    topology = Topology.from_nccl_xml(path)
    assert topology.path("cuda:0", "rocep1s0f0") == PathKind.NODE
    assert topology.path_bandwidth("cuda:0", "rocep1s0f0") == pytest.approx(15.75, 0.01)


def deep(levels):
    opened = "".join(f'<pci busid="0000:{i:02x}:00.0">' for i in range(levels))
    return f'<system><cpu numaid="0">{opened}{"</pci>" * levels}</cpu></system>'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not well-formed XML: no element found"),
        ("<system><cpu>", "not well-formed XML"),
        ('<?xml version="1.0" encoding="klingon"?><system/>', "not well-formed XML"),
        ("<machine/>", "must be a <system>, got <machine>"),
        ("<system/>", "it has no NUMA node"),
        ('<system><cpu numaid="x"/></system>', "numaid of <cpu> must be an integer, got 'x'"),
        ('<system><cpu numaid="0"/><cpu/></system>', "numaid >= 0 where there are others, got -1"),
        ('<system><cpu numaid="0"/><cpu numaid="0"/></system>', "numaid=0> is there twice"),
        ('<system><cpu numaid="0" affinity="fish"/></system>', "affinity of <cpu> must be hex"),
        ('<system><cpu numaid="0"><pci/></cpu></system>', "PCI device '' has no address"),
        (deep(100), "is below more than 64 others"),
        (
            '<system><cpu numaid="0"><pci busid="0000:01:00.0" link_speed="fast"/></cpu></system>',
            "link_speed of 0000:01:00.0 must be like 16.0 GT/s, got 'fast'",
        ),
        (
            '<system><cpu numaid="0"><pci busid="0000:01:00.0"><pci busid="0000:01:00.0"/></pci>'
            "</cpu></system>",
            "PCI device 0000:01:00.0 is there 2 times",
        ),
        (
            '<system><cpu numaid="0"><nic><net speed="1"/></nic></cpu></system>',
            "a NIC must have a name of its own, got ''",
        ),
    ],
)
def test_malformed_file_is_rejected(text, message, tmp_path):
    path = tmp_path / "bad.xml"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=f"from_nccl_xml: path must be .*{message}"):
        Topology.from_nccl_xml(path)


def test_missing_file_is_rejected(tmp_path):
    with pytest.raises(InvalidArgument, match="got .*none.xml: No such file"):
        Topology.from_nccl_xml(tmp_path / "none.xml")
    with pytest.raises(InvalidArgument, match="from_nccl_xml: path must be .* got 7"):
        Topology.from_nccl_xml(7)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_file_is_read_or_rejected(data, tmp_path_factory):
    content = bytearray(data.draw(st.sampled_from([DUMP, STATIC])).read_bytes())
    for _ in range(data.draw(st.integers(0, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(32, 126))
    del content[data.draw(st.integers(len(content) // 2, 2 * len(content))) :]
    path = tmp_path_factory.getbasetemp() / "damaged.xml"
    path.write_bytes(content)
    check_or_refused(lambda: Topology.from_nccl_xml(path))
