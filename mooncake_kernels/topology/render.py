"""A machine as text: the matrix of its paths, and its tree."""

from collections.abc import Mapping

from .explain import port_facts
from .model import NVSWITCH, Gpu, Nic, PathKind, PciNode, System
from .paths import Place, kind_of

_LEGEND = {
    PathKind.PIX: "at most one PCI switch",
    PathKind.PXB: "several PCI switches, no host bridge",
    PathKind.PHB: "through a host bridge",
    PathKind.NODE: "between host bridges of one NUMA node",
    PathKind.SYS: "across NUMA nodes, or they are unknown",
}


def matrix(system: System, places: Mapping[str, Place]) -> str:
    """Return the kinds of all paths between GPUs and NICs as a table, with a legend."""
    devices: list[Gpu | Nic] = [*system.gpus, *system.nics]
    if not devices:
        return "this machine has no GPU, and no NIC for RDMA\n"
    rows = [["", *(str(device) for device in devices), "NUMA"]]
    for a in devices:
        cells = [_cell(a, b, places) for b in devices]
        numa = places[str(a)].numa
        rows.append([str(a), *cells, str(numa) if numa >= 0 else "?"])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    used = {cell for row in rows[1:] for cell in row[1:-1]}
    legend = [f"{kind.name:5}{text}" for kind, text in _LEGEND.items() if kind.name in used]
    if any(cell.startswith("NV") for cell in used):
        legend.append("NV#  # NVLinks")
    legend += [
        f"{nic}: {port_facts(nic)}" + (f", {' '.join(nic.netdevs)}" if nic.netdevs else "")
        for nic in system.nics
    ]
    return "\n".join(line.rstrip() for line in [*lines, "", *legend]) + "\n"


def _cell(a: Gpu | Nic, b: Gpu | Nic, places: Mapping[str, Place]) -> str:
    if a is b:
        return "X"
    if isinstance(a, Gpu) and isinstance(b, Gpu):
        links = num_nvlinks(a, b)
        if links:
            return f"NV{links}"
    return kind_of(places[str(a)], places[str(b)]).name


def num_nvlinks(a: Gpu, b: Gpu) -> int:
    """Return the number of NVLinks between two GPUs: direct, or by switches that both link to."""
    direct = dict(a.nvlinks).get(b.pci, 0)
    return direct or min(dict(a.nvlinks).get(NVSWITCH, 0), dict(b.nvlinks).get(NVSWITCH, 0))


def tree(system: System) -> str:
    """Return the PCI tree, one node per line; ports that lead to a single thing are omitted."""
    lines = []
    for node in system.numa:
        lines.append(f"NUMA node {node.id}" + (f", processors {node.cpus}" if node.cpus else ""))
        bridges = sorted({n.host_bridge for n in system.pci if _numa(system, n) == node.id})
        loose = [nic for nic in system.nics if nic.pci is None and nic.numa == node.id]
        lines += _branches(
            [[bridge, *_subtree(system, None, bridge)] for bridge in bridges]
            + [[f"{nic} ({port_facts(nic)})"] for nic in loose]
        )
    known = {node.id for node in system.numa}
    unknown = sorted({n.host_bridge for n in system.pci if _numa(system, n) not in known})
    loose = [nic for nic in system.nics if nic.pci is None and nic.numa not in known]
    if unknown or loose:
        lines.append("of no known NUMA node")
        lines += _branches(
            [[bridge, *_subtree(system, None, bridge)] for bridge in unknown]
            + [[f"{nic} ({port_facts(nic)})"] for nic in loose]
        )
    return "\n".join(lines) + "\n"


def _numa(system: System, node: PciNode) -> int:
    """Return a host bridge's NUMA node: that of the first device below it."""
    known = [n.numa for n in system.pci if n.host_bridge == node.host_bridge and n.numa >= 0]
    only = system.numa[0].id if len(system.numa) == 1 else -1
    return known[0] if known else only


def _subtree(system: System, parent: str | None, host_bridge: str) -> list[str]:
    below = [n for n in system.pci if (n.parent, n.host_bridge) == (parent, host_bridge)]
    return _branches(
        [[_title(system, n), *_subtree(system, n.address, host_bridge)] for n in below]
    )


def _title(system: System, node: PciNode) -> str:
    gpus = [f"{gpu} {gpu.name}".rstrip() for gpu in system.gpus if gpu.pci == node.address]
    nics = [
        f"{nic if nic.name != nic.pci else 'NIC'} ({port_facts(nic)})"
        for nic in system.nics
        if nic.pci == node.address
    ]
    what = ", ".join([*gpus, *nics]) or ("switch" if node.is_switch else "port")
    speed = "" if node.gb_per_s is None else f", {node.gb_per_s:.1f} GB/s"
    return f"{node.address} {what}{speed}"


def _branches(blocks: list[list[str]]) -> list[str]:
    """Indent blocks of lines below their first lines, and draw the tree's lines."""
    lines = []
    for i, (head, *rest) in enumerate(blocks):
        last = i == len(blocks) - 1
        lines.append(("└─ " if last else "├─ ") + head)
        lines += [("   " if last else "│  ") + line for line in rest]
    return lines
