"""from_nccl_xml reads dumps of NCCL, and the static files of clouds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.topology import PathKind, Topology

from .support import MACHINES, check_or_refused, names, shared

DUMP = MACHINES / "dump-two-switches.nccl.xml"
STATIC = MACHINES / "static-classes.nccl.xml"


def test_a_dump():
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
    assert "eth0: not chosen: 10 Gb/s beside 400 Gb/s" in topology.explain("cuda:1")


def test_a_static_file():
    topology = Topology.from_nccl_xml(STATIC)
    assert [gpu.pci for gpu in topology.gpus] == ["0001:00:00.0", "0002:00:00.0"]
    assert names(topology.nics) == ["0101:00:00.0", "0102:00:00.0"]
    assert topology.path("cuda:0", "0101:00:00.0") == PathKind.PIX
    assert topology.path("cuda:0", "0102:00:00.0") == PathKind.PHB
    assert topology.choose_nics("cuda:1")[0].link_layer == "InfiniBand"


@pytest.mark.parametrize("name", ["aws-p4d.nccl.xml", "azure-ndv4.nccl.xml"])
def test_the_files_of_clouds(name):
    path = shared(name)
    if path is None:
        pytest.skip(f"{name} is not beside this checkout")
    topology = Topology.from_nccl_xml(path)
    assert len(topology.gpus) == 8
    first = [topology.choose_nics(gpu)[0] for gpu in topology.gpus]
    assert {topology.path(gpu, nic) for gpu, nic in zip(topology.gpus, first, strict=True)} == {
        PathKind.PIX
    }
    counts = {nic.name: first.count(nic) for nic in topology.nics}
    assert set(counts.values()) == {8 // len(topology.nics)}


def test_processes_that_all_saw_one_gpu(tmp_path):
    """Each wrote dev=0: then GPUs are in the order of their buses."""
    path = tmp_path / "dump.xml"
    path.write_text(DUMP.read_text().replace('dev="1" sm', 'dev="0" sm'))
    assert [gpu.pci for gpu in Topology.from_nccl_xml(path).gpus] == [
        "0000:18:00.0",
        "0000:9a:00.0",
    ]


def test_gpus_in_domains_of_their_own(tmp_path):
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
        ('<system><cpu numaid="0"/><cpu/></system>', "numaid >= 0 beside others, got -1"),
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
def test_a_bad_file_is_refused(text, message, tmp_path):
    path = tmp_path / "bad.xml"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=f"from_nccl_xml: path must be .*{message}"):
        Topology.from_nccl_xml(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InvalidArgument, match="got .*none.xml: No such file"):
        Topology.from_nccl_xml(tmp_path / "none.xml")
    with pytest.raises(InvalidArgument, match="from_nccl_xml: path must be .* got 7"):
        Topology.from_nccl_xml(7)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_damaged_file_is_read_or_refused(data, tmp_path_factory):
    content = bytearray(data.draw(st.sampled_from([DUMP, STATIC])).read_bytes())
    for _ in range(data.draw(st.integers(0, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(32, 126))
    del content[data.draw(st.integers(len(content) // 2, 2 * len(content))) :]
    path = tmp_path_factory.getbasetemp() / "damaged.xml"
    path.write_bytes(content)
    check_or_refused(lambda: Topology.from_nccl_xml(path))
