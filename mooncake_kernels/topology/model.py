"""The parts of a machine: NUMA nodes, a PCI tree, GPUs and NICs. Plain data, as read."""

import enum
import re
from dataclasses import dataclass

ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
LINK_LAYERS = ("InfiniBand", "Ethernet", "")  # best first; the last: unknown
NVSWITCH = "nvswitch"  # the peer of a link that ends at a switch

# The speed that emulated bridges, and GPUs attached directly to their processor, report for a link
# that does not exist. It is slower than any real hardware, so it is ignored.
_PLACEHOLDER_GT_PER_S = 2.5


class Malformed(ValueError):
    """An error in the description of a machine; the reader adds which file it was."""


class PathKind(enum.IntEnum):
    """How far apart two places of a machine are; smaller is nearer."""

    SELF = 0  #: the same place
    PIX = 1  #: at most one PCI switch between them
    PXB = 2  #: several PCI switches, but no host bridge
    PHB = 3  #: through a host bridge
    NODE = 4  #: between two host bridges of one NUMA node
    SYS = 5  #: across NUMA nodes, or the nodes are unknown

    def __str__(self) -> str:
        """Return just the name, as nvidia-smi prints it."""
        return self.name


@dataclass(frozen=True)
class NumaNode:
    """A NUMA node with processors, and which: ``"0-55,112-167"``, "" if unknown."""

    id: int
    cpus: str = ""


@dataclass(frozen=True)
class PciNode:
    """A PCI function: a device, or a port of a bridge or switch.

    Attributes:
        address: ``"0000:1b:00.0"``, lower case.
        parent: address of the port above; None below a host bridge.
        host_bridge: ``"pci0000:15"``; each is a root of the tree.
        numa: NUMA node; -1: unknown.
        pci_class: 24 bits, 0x060400 for a bridge; 0: unknown.
        gt_per_s: transfers of its upstream link, per lane; 0: unknown.
        width: lanes of that link; 0: unknown.
        is_switch: a whole switch with all its ports, as NCCL writes it, not one of the ports.
    """

    address: str
    parent: str | None
    host_bridge: str
    numa: int = -1
    pci_class: int = 0
    gt_per_s: float = 0.0
    width: int = 0
    is_switch: bool = False

    @property
    def gb_per_s(self) -> float | None:
        """GB/s of its link in one direction; None if there is no plausible value.

        Up to 5 GT/s, 8 of 10 bits are data; then 128 of 130, and from 64 GT/s on 242 of 256 bytes.
        """
        if self.gt_per_s <= _PLACEHOLDER_GT_PER_S or self.width == 0:
            return None
        share = 8 / 10 if self.gt_per_s <= 5 else 128 / 130 if self.gt_per_s < 64 else 242 / 256
        return self.gt_per_s * self.width * share / 8


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Attributes:
        index: of ``cuda:<index>``.
        pci: its address.
        name: "NVIDIA H100 80GB HBM3", or "".
        uuid: "GPU-...", or "".
        nvlinks: (address of the GPU at the other end, or "nvswitch", number of links) each.
    """

    index: int
    pci: str
    name: str = ""
    uuid: str = ""
    nvlinks: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        """Return its location."""
        return f"cuda:{self.index}"


@dataclass(frozen=True)
class Nic:
    """An RDMA device, with the best of its ports.

    Attributes:
        name: ``mlx5_0``.
        pci: address of its PCI function (for soft-RoCE, of its netdev); None: it has none.
        numa: NUMA node; -1: unknown.
        port: number of the port described here.
        state: "ACTIVE", "DOWN", "INIT", ...; "" if unknown.
        gbit_per_s: speed of the port; None: unknown.
        link_layer: "InfiniBand", "Ethernet" or "" if unknown.
        has_gid: whether the port has an address; None: unknown.
        netdevs: its network interfaces, including a bond they are in.
        has_default_route: whether one of these carries the machine's default route.
        is_vf: whether it is a virtual function (SR-IOV) of a card that this machine has as well.
        unusable: why no transfer can use it, "EFA: it has no RC queue pairs"; "": it may be usable.
    """

    name: str
    pci: str | None = None
    numa: int = -1
    port: int = 1
    state: str = ""
    gbit_per_s: float | None = None
    link_layer: str = ""
    has_gid: bool | None = None
    netdevs: tuple[str, ...] = ()
    has_default_route: bool = False
    is_vf: bool = False
    unusable: str = ""

    def __str__(self) -> str:
        """Return its name."""
        return self.name


@dataclass(frozen=True)
class System:
    """A machine. GPUs are ordered by index, NICs by name."""

    numa: tuple[NumaNode, ...] = (NumaNode(0),)
    pci: tuple[PciNode, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()


_DIGITS = re.compile(r"([0-9]+)")


def natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts mlx5_2 before mlx5_10."""
    parts = _DIGITS.split(name)  # every second one is digits
    return [(int(part), "") if i % 2 else (-1, part) for i, part in enumerate(parts)]


def bus_order(address: str) -> list[int]:
    """Return a key that sorts PCI addresses as CUDA_DEVICE_ORDER=PCI_BUS_ID does."""
    return [int(part, 16) for part in re.split("[:.]", address)]
