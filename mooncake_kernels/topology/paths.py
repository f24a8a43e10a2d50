"""How near two places of a machine are, and the bandwidth of the PCI links between them.

A path goes up from each end to their first common port. Its kind is determined by counting ports: a
switch is two of them in a row (one up, one down), so two devices of one switch meet in its upper
port with at most one port below on either side.
"""

from dataclasses import dataclass

from .model import Gpu, Nic, PathKind, PciNode, System


@dataclass(frozen=True)
class Place:
    """An end of a path: a NUMA node, a GPU or a NIC.

    Attributes:
        name: its location, or the NIC's name.
        chain: its PCI function and all ports above it, upward; () for a NUMA node.
        numa: NUMA node; -1: unknown.
        is_node: whether it is a NUMA node, to which all of the node's host bridges belong.
    """

    name: str
    chain: tuple[PciNode, ...]
    numa: int
    is_node: bool = False


def places_of(system: System) -> dict[str, Place]:
    """Return all places of a machine by name."""
    nodes = {node.address: node for node in system.pci}
    places = [Place(f"cpu:{node.id}", (), node.id, True) for node in system.numa]
    devices: list[Gpu | Nic] = [*system.gpus, *system.nics]
    for device in devices:
        chain: list[PciNode] = []
        above = device.pci
        while above is not None:
            chain.append(nodes[above])
            above = nodes[above].parent
        known = [node.numa for node in chain if node.numa >= 0]
        own = device.numa if isinstance(device, Nic) else -1
        numa = own if own >= 0 else known[0] if known else -1
        if numa < 0 and len(system.numa) == 1:
            numa = system.numa[0].id
        places.append(Place(str(device), tuple(chain), numa))
    return {place.name: place for place in places}


def kind_of(a: Place, b: Place) -> PathKind:
    """Return how two places are connected."""
    if a.name == b.name:
        return PathKind.SELF
    if a.chain and b.chain and a.chain[-1].host_bridge == b.chain[-1].host_bridge:
        below_a, below_b = _below_meeting(a, b)
        if len(below_a) == len(a.chain):
            return PathKind.PHB
        ports = max(_num_ports(below_a), _num_ports(below_b))
        return PathKind.PIX if ports <= 1 else PathKind.PXB
    if a.numa != b.numa or a.numa < 0:
        return PathKind.SYS
    return PathKind.PHB if a.is_node or b.is_node else PathKind.NODE


def gb_per_s_of(a: Place, b: Place) -> float | None:
    """Return GB/s of the narrowest PCI link between two places; None if all are unknown."""
    if a.name == b.name:
        return None
    below_a, below_b = a.chain, b.chain
    if a.chain and b.chain and a.chain[-1].host_bridge == b.chain[-1].host_bridge:
        below_a, below_b = _below_meeting(a, b)
    speeds = [node.gb_per_s for node in (*below_a, *below_b)]
    return min((speed for speed in speeds if speed is not None), default=None)


def _below_meeting(a: Place, b: Place) -> tuple[tuple[PciNode, ...], tuple[PciNode, ...]]:
    """Return what each has below the first node that is above both (or is one of them)."""
    position = {node.address: i for i, node in enumerate(a.chain)}
    for i, node in enumerate(b.chain):
        if node.address in position:
            return a.chain[: position[node.address]], b.chain[:i]
    return a.chain, b.chain


def _num_ports(below: tuple[PciNode, ...]) -> int:
    return sum(2 if node.is_switch else 1 for node in below[1:])
