"""Whether the parts of a machine are consistent: every reader's result passes this check."""

from collections import Counter
from collections.abc import Iterable

from .model import ADDRESS, LINK_LAYERS, Malformed, System

MAX_PORTS = 255  # of a NIC: verbs number them from 1, in 8 bits
MAX_DEPTH = 64  # ports above one device; PCI has 256 buses, real machines six ports


def checked(system: System) -> System:
    """Return the system.

    Raises:
        Malformed: the description is inconsistent; the message names the part.
    """
    _unique("NUMA node", (node.id for node in system.numa))
    _unique("PCI device", (node.address for node in system.pci))
    _unique("NIC", (nic.name for nic in system.nics))
    _unique("GPU of PCI device", (gpu.pci for gpu in system.gpus))
    if not system.numa:
        raise Malformed("it has no NUMA node")
    for numa_node in system.numa:
        if numa_node.id < 0:
            raise Malformed(f"a NUMA node must have a number from 0, got {numa_node.id}")
    nodes = {node.address: node for node in system.pci}
    parents = {node.address: node.parent for node in system.pci}
    numa = {node.id for node in system.numa} | {-1}
    for node in system.pci:
        if not ADDRESS.fullmatch(node.address):
            raise Malformed(f"PCI device {node.address!r} has no address like 0000:1b:00.0")
        if node.parent is not None and node.parent not in nodes:
            raise Malformed(f"PCI device {node.address} is below {node.parent}, which is not there")
        _below_a_root(node.address, parents)
    for index, gpu in enumerate(system.gpus):
        if gpu.index != index:
            raise Malformed(f"GPU {gpu.pci} must be cuda:{index}, got cuda:{gpu.index}")
        if gpu.pci not in nodes:
            raise Malformed(f"GPU cuda:{index} is PCI device {gpu.pci}, which is not there")
    for nic in system.nics:
        if not nic.name or nic.name.startswith(("cuda:", "cpu:")):
            raise Malformed(f"a NIC must have a name of its own, got {nic.name!r}")
        if nic.link_layer not in LINK_LAYERS:
            raise Malformed(
                f"{nic.name}'s link_layer must be one of {LINK_LAYERS}, got {nic.link_layer!r}"
            )
        if not 1 <= nic.port <= MAX_PORTS:
            raise Malformed(f"{nic.name}'s port must be in 1 to {MAX_PORTS}, got {nic.port}")
        if nic.pci is not None and nic.pci not in nodes:
            raise Malformed(f"NIC {nic.name} is PCI device {nic.pci}, which is not there")
    for what, part in [(n.address, n) for n in system.pci] + [(n.name, n) for n in system.nics]:
        if part.numa not in numa:
            raise Malformed(f"{what} is of NUMA node {part.numa}, which is not there")
    return system


def _below_a_root(address: str, parents: dict[str, str | None]) -> None:
    above = parents[address]
    for _ in range(MAX_DEPTH):
        if above is None:
            return
        if above == address:
            raise Malformed(f"PCI device {address} is above itself: a loop")
        above = parents.get(above)
    raise Malformed(f"PCI device {address} has more than {MAX_DEPTH} ports above it, or a loop")


def _unique(what: str, names: Iterable[str | int]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise Malformed(f"{what} {name} is there {count} times")
