"""What a machine is made of: NUMA nodes, a PCI tree, GPUs and NICs. Plain data, as it was read."""

import enum
import re
from dataclasses import dataclass

ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
LINK_LAYERS = ("InfiniBand", "Ethernet", "")  # the better first; the last: unknown
NVSWITCH = "nvswitch"  # the peer of a link that ends at a switch

# What emulated bridges, and GPUs that sit beside their processor, say of a link that is none:
# slower than anything that is built, so not believed.
_PLACEHOLDER_GT_PER_S = 2.5


class Malformed(ValueError):
    """What is wrong with the description of a machine; who reads it says which file it was."""


class PathKind(enum.IntEnum):
    """How far two places of a machine are from each other; the smaller, the nearer."""

    SELF = 0  #: they are the same
    PIX = 1  #: at most one PCI switch between them
    PXB = 2  #: several PCI switches, and no host bridge
    PHB = 3  #: through a host bridge
    NODE = 4  #: between two host bridges of one NUMA node
    SYS = 5  #: across NUMA nodes, or nobody says which they are of

    def __str__(self) -> str:
        """Return the name alone, as nvidia-smi prints it."""
        return self.name


@dataclass(frozen=True)
class NumaNode:
    """A NUMA node that has processors, and which: ``"0-55,112-167"``, "" if unknown."""

    id: int
    cpus: str = ""


@dataclass(frozen=True)
class PciNode:
    """A PCI function: a device, or a port of a bridge or switch.

    Attributes:
        address: ``"0000:1b:00.0"``, lower case.
        parent: address of the port above; None below a host bridge.
        host_bridge: ``"pci0000:15"``; another one is another root of the tree.
        numa: NUMA node; -1: unknown.
        pci_class: 24 bits, 0x060400 for a bridge; 0: unknown.
        gt_per_s: transfers of its link upward, of one lane; 0: unknown.
        width: lanes of that link; 0: unknown.
        is_switch: a whole switch with all its ports, as NCCL writes it, and not one of them.
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
        """What its link carries in one direction; None if nobody says anything believable.

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
        pci: address of its PCI function (of the netdev's that soft-RoCE runs on); None: of none.
        numa: NUMA node; -1: unknown.
        port: number of the port described here.
        state: "ACTIVE", "DOWN", "INIT", ...; "" if unknown.
        gbit_per_s: speed of the port; None: unknown.
        link_layer: "InfiniBand", "Ethernet" or "" if unknown.
        has_gid: whether the port has an address; None: unknown.
        netdevs: its network interfaces, a bond they are in among them.
        has_default_route: one of these carries the machine's default route.
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

    def __str__(self) -> str:
        """Return its name."""
        return self.name


@dataclass(frozen=True)
class System:
    """A machine. GPUs are in the order of their index, NICs in that of their names."""

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
