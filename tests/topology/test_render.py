"""The matrix, the tree and the picture; and the command that prints them."""

import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from mooncake_kernels.__main__ import main
from mooncake_kernels.topology import Nic, System, Topology
from mooncake_kernels.topology.layout import CHAR, sockets_of

from .support import MACHINES, NAMES, as_sysfs_tells, machine, write_sysfs

SVG = "{http://www.w3.org/2000/svg}"

DOWN_PORT = """\
        cuda:0  cuda:1  cuda:2  cuda:3  mlx5_0  mlx5_1  mlx5_2  mlx5_3  NUMA
cuda:0  X       NV18    NV18    NV18    PIX     PIX     SYS     SYS     0
cuda:1  NV18    X       NV18    NV18    PIX     PIX     SYS     SYS     0
cuda:2  NV18    NV18    X       NV18    SYS     SYS     PIX     PIX     1
cuda:3  NV18    NV18    NV18    X       SYS     SYS     PIX     PIX     1
mlx5_0  PIX     PIX     SYS     SYS     X       PIX     SYS     SYS     0
mlx5_1  PIX     PIX     SYS     SYS     PIX     X       SYS     SYS     0
mlx5_2  SYS     SYS     PIX     PIX     SYS     SYS     X       PIX     1
mlx5_3  SYS     SYS     PIX     PIX     SYS     SYS     PIX     X       1

PIX  at most one PCI switch
SYS  across NUMA nodes, or they are unknown
NV#  # NVLinks
mlx5_0: port 1 400 Gb/s InfiniBand ACTIVE, ib0
mlx5_1: port 1 10 Gb/s InfiniBand DOWN, ib1
mlx5_2: port 1 400 Gb/s InfiniBand ACTIVE, ib2
mlx5_3: port 1 400 Gb/s InfiniBand ACTIVE, ib3
"""
NO_GPU = """\
NUMA node 0, processors 0-31
└─ pci0000:30
   └─ 0000:30:01.0 port, 31.5 GB/s
      └─ 0000:31:00.0 mlx5_0 (port 1 100 Gb/s InfiniBand ACTIVE), 31.5 GB/s
NUMA node 1, processors 32-63
└─ pci0000:b0
   └─ 0000:b0:01.0 port, 31.5 GB/s
      └─ 0000:b1:00.0 mlx5_1 (port 1 100 Gb/s InfiniBand ACTIVE), 31.5 GB/s
"""


def test_matrix_and_tree_text():
    assert machine("down-port").matrix() == DOWN_PORT
    assert machine("no-gpu").tree() == NO_GPU
    assert Topology(System()).matrix() == "this machine has no GPU, and no NIC for RDMA\n"
    assert machine("vm-h200").tree().splitlines()[2] == "of no known NUMA node"


@pytest.mark.parametrize("name", NAMES)
def test_every_device_is_in_the_tree_and_the_svg_once(name):
    topology = machine(name)
    drawn = [text.text for text in ET.fromstring(topology.to_svg()).iter(f"{SVG}text")]
    for device in [*topology.gpus, *topology.nics]:
        assert drawn.count(str(device)) == 1
        assert sum(f" {device} " in line for line in topology.tree().splitlines()) == 1


@pytest.mark.parametrize("name", NAMES)
def test_boxes_hold_their_text_and_do_not_overlap(name):
    sockets = sockets_of(machine(name).system, {})
    for upper, lower in pairwise(sockets):
        assert upper.y + upper.height <= lower.y
    for socket in sockets:
        boxes = [box for tree in socket.trees for box in tree.all()]
        for i, box in enumerate(boxes):
            assert max(CHAR * len(line) for line in box.lines) <= box.width
            assert socket.x <= box.x and box.x + box.width <= socket.x + socket.width
            assert socket.y <= box.y and box.y + box.height <= socket.y + socket.height
            for other in boxes[:i]:
                apart = box.x >= other.x + other.width or other.x >= box.x + box.width
                below = box.y >= other.y + other.height or other.y >= box.y + box.height
                assert apart or below, (box.lines, other.lines)


def test_svg_escapes_strange_names():
    system = System(nics=(Nic('a<b>&"c"\x01', netdevs=("é",)),))
    root = ET.fromstring(Topology(system).to_svg())
    assert 'a<b>&"c"?' in [text.text for text in root.iter(f"{SVG}text")]


def run(capsys, *arguments):
    status = main(["topo", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_command_prints_every_format(capsys, tmp_path):
    saved = MACHINES / "down-port.json"
    source = ("--from-json", saved)
    assert run(capsys, *source) == (0, DOWN_PORT, "")
    assert run(capsys, *source, "--json") == (0, saved.read_text(), "")
    topology = machine("down-port")
    assert run(capsys, *source, "--tree")[1] == topology.tree()
    assert run(capsys, *source, "--mooncake")[1] == topology.to_mooncake_json()
    assert run(capsys, *source, "--explain", "cuda:1")[1] == topology.explain("cuda:1") + "\n"
    assert run(capsys, *source, "--svg", tmp_path / "a.svg")[0] == 0
    assert (tmp_path / "a.svg").read_text() == topology.to_svg()
    root = write_sysfs(as_sysfs_tells(topology.system), tmp_path / "root")
    assert (
        run(capsys, "--root", root, "--explain", "cuda:1")[1] == topology.explain("cuda:1") + "\n"
    )
    assert run(capsys, "--xml", MACHINES / "static-classes.nccl.xml")[0] == 0
    assert run(capsys)[0] == 0  # this machine


def test_command_rejects_bad_input(capsys, tmp_path):
    status, out, err = run(capsys, "--from-json", tmp_path / "none.json")
    assert (status, out) == (2, "") and "No such file" in err
    status, out, err = run(capsys, "--from-json", MACHINES / "gb10.json", "--explain", "cuda:1")
    assert (status, out) == (2, "") and "explain: location must be one of cpu:0, cuda:0" in err
