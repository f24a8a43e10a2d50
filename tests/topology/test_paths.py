"""Kinds of paths, and the bandwidth of their narrowest link."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.topology import Gpu, Nic, NumaNode, PathKind, PciNode, System, Topology

from .support import machine

SELF, PIX, PXB, PHB, NODE, SYS = PathKind


@pytest.mark.parametrize(
    ("name", "a", "b", "kind"),
    [
        ("dgx-h100", "cuda:0", "cuda:0", SELF),
        ("dgx-h100", "cuda:0", "mlx5_0", PXB),  # as nvidia-smi says of that machine
        ("dgx-h100", "cuda:0", "mlx5_3", NODE),
        ("dgx-h100", "cuda:0", "mlx5_11", SYS),
        ("dgx-h100", "mlx5_1", "mlx5_2", PIX),  # two functions of one card
        ("dgx-h100", "cpu:0", "mlx5_0", PHB),
        ("dgx-h100", "cpu:1", "mlx5_0", SYS),
        ("dgx-h100", "cpu:0", "cpu:1", SYS),
        ("dgx-h100", "cpu:1", "cpu:1", SELF),
        ("down-port", "cuda:0", "mlx5_0", PIX),
        ("down-port", "cuda:0", "cuda:1", PIX),
        ("gb200", "cuda:0", "mlx5_0", NODE),  # in PCI domains of their own
        ("gb200", "cuda:0", "mlx5_5", SYS),
        ("gb10", "cuda:0", "rocep1s0f0", NODE),
        ("vm-h200", "cuda:0", "mlx5_0", PIX),  # NUMA nodes are hidden, the switch is not
        ("vm-h200", "cuda:0", "mlx5_1", PHB),
        ("vm-h200", "cuda:0", "cpu:0", SYS),  # of two nodes, it is not known which
        ("no-nic", "cuda:0", "cuda:1", NODE),
    ],
)
def test_path_kinds_between_devices(name, a, b, kind):
    assert machine(name).path(a, b) is kind
    assert machine(name).path(b, a) is kind


@pytest.mark.parametrize(
    ("name", "a", "b", "gb_per_s"),
    [
        ("dgx-h100", "cuda:0", "mlx5_0", 63.0),  # 32 GT/s, 16 lanes
        ("hgx-a100-8nic", "cuda:0", "mlx5_0", 31.5),
        ("gb10", "cuda:0", "rocep1s0f0", 15.75),  # 4 lanes; the GPU's own link is none
        ("bonded", "cpu:0", "mlx5_2", 3.94),  # 8 GT/s, 4 lanes
    ],
)
def test_bandwidth_is_that_of_the_narrowest_link(name, a, b, gb_per_s):
    topology = machine(name)
    assert topology.path_bandwidth(a, b) == pytest.approx(gb_per_s, rel=0.01)
    assert topology.path_bandwidth(b, a) == topology.path_bandwidth(a, b)


def test_unknown_bandwidth_is_none():
    assert machine("vm-h200").path_bandwidth("cuda:0", "mlx5_0") is None
    assert machine("dgx-h100").path_bandwidth("cuda:0", "cuda:0") is None
    assert machine("dgx-h100").path_bandwidth("cpu:0", "cpu:1") is None


@pytest.mark.parametrize(
    ("gt_per_s", "width", "gb_per_s"),
    [(2.5, 16, None), (5, 8, 4), (8, 16, 15.75), (64, 16, 121), (16, 0, None), (0, 16, None)],
)
def test_link_bandwidth_from_speed_and_width(gt_per_s, width, gb_per_s):
    node = PciNode("0000:01:00.0", None, "pci0000:00", gt_per_s=gt_per_s, width=width)
    assert node.gb_per_s == (gb_per_s and pytest.approx(gb_per_s, rel=0.001))


def test_kinds_are_ordered_and_print_as_nvidia_smi_does():
    assert SELF < PIX < PXB < PHB < NODE < SYS
    assert [str(kind) for kind in PathKind] == ["SELF", "PIX", "PXB", "PHB", "NODE", "SYS"]


def test_gpu_and_nic_objects_are_accepted_as_endpoints():
    topology = machine("dgx-h100")
    assert topology.path(topology.gpus[0], topology.nics[0]) is PXB
    assert [str(topology.gpus[3]), str(topology.nics[11])] == ["cuda:3", "mlx5_11"]


@pytest.mark.parametrize("name", ["mlx5_9", "cuda:8", "cpu:2", "cuda", "", None, 3])
def test_unknown_endpoint_is_rejected(name):
    topology = machine("down-port")
    for call in (topology.path, topology.path_bandwidth):
        with pytest.raises(InvalidArgument, match=f"b must be one of cpu:0, .* got {name!r}"):
            call("cuda:0", name)


@st.composite
def trees(draw):
    """A forest of ports with GPUs and NICs anywhere in it, and the list of ports above each."""
    numa = draw(st.integers(1, 3))
    nodes, gpus, nics = [], [], []
    for i in range(draw(st.integers(1, 24))):
        parent = draw(st.sampled_from([None, *(n for n in nodes if n.pci_class >> 16 == 6)]))
        what = draw(st.sampled_from([0x060400, 0x060400, 0x030200, 0x020700]))
        bridge = parent.host_bridge if parent else f"pci0000:{draw(st.integers(0, 3)):02x}"
        node = PciNode(
            f"0000:{i:02x}:00.0",
            parent and parent.address,
            bridge,
            draw(st.integers(-1, numa - 1)),
            what,
            draw(st.sampled_from([0.0, 2.5, 8.0, 16.0, 32.0])),
            draw(st.sampled_from([0, 1, 4, 16])),
            draw(st.booleans()) and what == 0x060400,
        )
        nodes.append(node)
        if what == 0x030200:
            gpus.append(Gpu(len(gpus), node.address))
        if what == 0x020700:
            speed = draw(st.sampled_from([None, 25.0, 200.0, 400.0]))
            state = draw(st.sampled_from(["", "ACTIVE", "DOWN"]))
            nics.append(
                Nic(
                    f"mlx5_{i}",
                    node.address,
                    -1,
                    1,
                    state,
                    speed,
                    has_default_route=draw(st.booleans()),
                )
            )
    return System(tuple(NumaNode(i) for i in range(numa)), tuple(nodes), tuple(gpus), tuple(nics))


@given(trees())
def test_paths_in_any_pci_tree(system):
    topology = Topology(system)
    places = [*topology.locations, *map(str, topology.nics)]
    above = {node.address: node.parent for node in system.pci}

    def chain(pci):
        found = []
        while pci is not None:
            found.append(pci)
            pci = above[pci]
        return found

    pci_of = {str(device): device.pci for device in [*system.gpus, *system.nics]}
    for a in places:
        for b in places:
            kind = topology.path(a, b)
            assert kind is topology.path(b, a)
            assert (kind is SELF) == (a == b)
            shared = set(chain(pci_of.get(a))) & set(chain(pci_of.get(b)))
            assert (kind <= PXB) == (a == b or bool(shared))
            speed = topology.path_bandwidth(a, b)
            assert speed == topology.path_bandwidth(b, a)
            assert speed is None or speed > 0


@given(trees(), st.data())
def test_choice_in_any_pci_tree(system, data):
    topology = Topology(system)
    for location in topology.locations:
        chosen = topology.choose_nics(location)
        kinds = [topology.path(location, nic) for nic in chosen]
        assert kinds == sorted(kinds)
        assert all(nic.state != "DOWN" for nic in chosen)
        up = [nic for nic in topology.nics if nic.state != "DOWN"]
        assert bool(chosen) == bool(up)  # of those that are up, one at least is left
        lines = topology.explain(location).splitlines()
        assert len(lines) == max(1, len(topology.nics))
        assert [line.split(":")[0] for line in lines[: len(chosen)]] == list(map(str, chosen))
    order = data.draw(st.permutations(range(len(system.gpus))))
    moved = topology.with_gpu_order(order)
    for new, old in enumerate(order):  # numbered otherwise, a GPU keeps its NICs
        assert moved.choose_nics(f"cuda:{new}") == topology.choose_nics(f"cuda:{old}")
