"""Which NICs an engine of ``transfer.py`` moves data with."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import _host
from ._arguments import as_instance
from .errors import InvalidArgument, Unavailable
from .topology import Nic, Topology

MAX_NICS = 64

_log = logging.getLogger("mooncake_kernels.transfer")


@dataclass(frozen=True)
class NicChoice:
    """The NICs of an engine, in the order of their names, as the host code takes them.

    Attributes:
        nics: (name, port, GB/s) each.
        near: for each NUMA node the set of NICs that are best for its memory, as bits.
        required: whether memory that they cannot use is refused.
    """

    nics: Sequence[tuple[str, int, float]] = ()
    near: Sequence[int] = ()
    required: bool = False


def choose_nics(topology: Any, *, named: bool) -> NicChoice:
    """Choose all that the topology would choose for some NUMA node.

    Args:
        topology: the caller's; None: what this machine says.
        named: whether the caller wants rdma and nothing in its place.

    Raises:
        InvalidArgument: it is no topology.
        Unavailable: there is no NIC, and it was named.
    """
    if topology is not None:
        as_instance("TransferEngine", "topology", topology, Topology, "a Topology or None")
    missing = _missing()
    if missing and topology is None and not named:
        return NicChoice()  # as on most machines
    try:
        if missing:
            raise Unavailable(f"TransferEngine: {missing}")
        chosen = _choice(topology, named)
    except (Unavailable, InvalidArgument, OSError) as error:
        if named or topology is not None:
            raise
        _log.info("no rdma: %s", error)
        return NicChoice()
    _log.info("rdma goes over %s", ", ".join(name for name, *_ in chosen.nics))
    return chosen


def _missing() -> str:
    """Why there can be no NIC."""
    return _host.missing_verbs() or (
        "" if _host.rdma_devices() else "this machine has no RDMA device"
    )


def _choice(topology: Topology | None, named: bool) -> NicChoice:
    topology = topology or Topology.discover()
    nodes = {node.id: f"cpu:{node.id}" for node in topology.numa_nodes}
    tiers = {node: topology.nic_tiers(place) for node, place in nodes.items()}
    usable = {nic.name for kept in tiers.values() for tier in kept for nic in tier}
    nics = [nic for nic in topology.nics if nic.name in usable][:MAX_NICS]
    if not nics:
        raise Unavailable(
            "TransferEngine: the topology has no NIC that can be chosen; "
            "`python -m mooncake_kernels topo` says why"
        )
    fastest = max(nic.gbit_per_s or 0.0 for nic in nics) or 8.0
    near = [_bits(nics, tiers.get(node, [])) for node in range(max(nodes) + 1)]
    speeds = [(nic.name, nic.port, (nic.gbit_per_s or fastest) / 8) for nic in nics]
    return NicChoice(speeds, near, named)


def _bits(nics: Sequence[Nic], tiers: Sequence[Sequence[Nic]]) -> int:
    best = {nic.name for nic in tiers[0]} if tiers else set()
    return sum(1 << i for i, nic in enumerate(nics) if nic.name in best)
