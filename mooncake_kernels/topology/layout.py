"""Placement of a machine's picture: sockets, switches, GPUs and NICs as boxes without overlap.

Ports that lead to a single thing are omitted; a line is labelled with the narrowest link it
represents. A tree grows downward: a switch is above its children, and as wide as they are.
"""

from dataclasses import dataclass, field

from .model import NVSWITCH, Gpu, Nic, PciNode, System

CHAR = 7.2  # width of a character of the font, 12 px high
LINE = 16
PAD = 10
GAP = 14
LINK = 30  # height of a line between two boxes, with its label
MAX_ROW = 1040  # a socket wraps into rows no wider than this


@dataclass
class Box:
    """A rectangle with lines of text, and its children below it."""

    kind: str  # socket, switch, gpu, nic, down
    lines: list[str]
    link: str = ""  # label of the line to the box above
    below: list["Box"] = field(default_factory=list)
    x: float = 0
    y: float = 0
    width: float = 0
    height: float = 0

    def place(self, x: float, y: float) -> None:
        """Move the box and all below it to a corner."""
        self.x, self.y = x, y
        self.height = 2 * PAD + LINE * len(self.lines)
        left = x
        for box in self.below:
            box.place(left, y + self.height + LINK)
            left += box.span + GAP
        self.width = self.span

    @property
    def span(self) -> float:
        """Its width, including all below it."""
        own = max(CHAR * len(line) for line in [*self.lines, self.link]) + 2 * PAD
        return max(own, sum(box.span for box in self.below) + GAP * (len(self.below) - 1))

    def all(self) -> list["Box"]:
        """Return the box and all below it."""
        return [self, *(inner for box in self.below for inner in box.all())]

    @property
    def bottom(self) -> float:
        """The lowest point of the box and all below it."""
        return max(box.y + box.height for box in self.all())


@dataclass
class Socket:
    """A panel: a NUMA node, and the trees of its host bridges in rows."""

    title: str
    trees: list[Box]
    x: float = 0
    y: float = 0
    width: float = 0
    height: float = 0

    def place(self, x: float, y: float) -> None:
        """Move the panel and its trees to a corner."""
        self.x, self.y = x, y
        left, top, bottom, right = x + GAP, y + LINE + 2 * PAD + LINK, 0.0, 0.0
        for tree in self.trees:
            if left > x + GAP and left + tree.span > x + MAX_ROW:
                left, top = x + GAP, bottom + LINK + GAP
            tree.place(left, top)
            left += tree.span + GAP
            right, bottom = max(right, left), max(bottom, tree.bottom)
        title = CHAR * len(self.title) + 2 * PAD + GAP
        self.width = max(right - x, title)
        self.height = max(bottom - y + GAP, LINE + 2 * PAD)


def sockets_of(system: System, first_nic: dict[str, str]) -> list[Socket]:
    """Return the panels, placed one below the other.

    Args:
        system: the machine.
        first_nic: by PCI address of a GPU, the NIC that it uses first.
    """
    by_numa: dict[int, list[Box]] = {node.id: [] for node in system.numa}
    only = system.numa[0].id if len(system.numa) == 1 else -1
    for node in system.pci:
        if node.parent is None:
            numa = next((n for n in _numas(system, node) if n >= 0), only)
            by_numa.setdefault(numa, []).extend(_boxes(system, node, first_nic, []))
    for nic in system.nics:
        if nic.pci is None:
            numa = nic.numa if nic.numa >= 0 else only
            by_numa.setdefault(numa, []).append(_nic_box(nic, []))
    cpus = {node.id: node.cpus for node in system.numa}
    sockets, top = [], float(GAP + 2 * LINE)
    for numa, trees in by_numa.items():
        title = f"NUMA node {numa}" if numa >= 0 else "of no known NUMA node"
        processors = _shortened(cpus.get(numa, ""))
        socket = Socket(title + (f" · processors {processors}" if processors else ""), trees)
        socket.place(GAP, top)
        top += socket.height + GAP
        sockets.append(socket)
    return sockets


def _shortened(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _numas(system: System, root: PciNode) -> list[int]:
    """Return the NUMA nodes that a node, and then those below it, report."""
    found, above = [root.numa], {root.address}
    for _ in system.pci:
        below = [n for n in system.pci if n.parent in above and n.address not in above]
        if not below:
            break
        above |= {node.address for node in below}
        found += [node.numa for node in below]
    return found


def _boxes(
    system: System, node: PciNode, first_nic: dict[str, str], above: list[PciNode]
) -> list[Box]:
    """Return a node's boxes: for a port that leads nowhere none, for another those below it."""
    way = [*above, node]
    gpus = [gpu for gpu in system.gpus if gpu.pci == node.address]
    nics = [nic for nic in system.nics if nic.pci == node.address]
    if gpus or nics:
        boxes = [_gpu_box(gpu, way, first_nic) for gpu in gpus]
        return boxes + [_nic_box(nic, way) for nic in nics]
    children = [child for child in system.pci if child.parent == node.address]
    if len(children) == 1:
        return _boxes(system, children[0], first_nic, way)
    below = [box for child in children for box in _boxes(system, child, first_nic, [])]
    if len(below) <= 1:
        return below
    # A switch has ports below it; the children of a port are functions of one card.
    what = "switch" if node.is_switch or any(_is_port(child) for child in children) else "port"
    return [Box("switch", [f"PCI {what} {node.address}"], _link(way), below)]


def _is_port(node: PciNode) -> bool:
    return node.pci_class >> 8 == 0x0604


def _gpu_box(gpu: Gpu, way: list[PciNode], first_nic: dict[str, str]) -> Box:
    lines = [f"{gpu}", gpu.pci]
    if gpu.name:
        lines.insert(1, _shortened(gpu.name.removeprefix("NVIDIA "), 24))
    links = sum(count for _, count in gpu.nvlinks)
    if links:
        lines.append(f"NVLink x{links}" + (" NVSwitch" if NVSWITCH in dict(gpu.nvlinks) else ""))
    if gpu.pci in first_nic:
        lines.append(f"→ {_shortened(first_nic[gpu.pci], 20)}")
    return Box("gpu", lines, _link(way))


def _nic_box(nic: Nic, way: list[PciNode]) -> Box:
    lines = [_shortened(nic.name, 24)]
    if nic.pci is not None and nic.pci != nic.name:
        lines.append(nic.pci)
    speed = "" if nic.gbit_per_s is None else f"{nic.gbit_per_s:g} Gb/s"
    state = "" if nic.state == "ACTIVE" else nic.state
    lines += [line for line in (f"{speed} {nic.link_layer}".strip(), state) if line]
    return Box("nic" if nic.state in ("ACTIVE", "") else "down", lines, _link(way))


def _link(way: list[PciNode]) -> str:
    speeds = [node.gb_per_s for node in way if node.gb_per_s is not None]
    return f"{min(speeds):.0f} GB/s" if speeds else ""
