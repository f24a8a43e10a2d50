"""Which NICs an engine uses."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import _host
from .._arguments import as_instance
from .._machine_root import MachineRoot
from ..errors import InvalidArgument, Unavailable
from ..topology import Nic, Topology
from ..topology.gpu_order import visible_gpus

MAX_NICS = 64

_Tiers = Sequence[Sequence[Nic]]  # the best first

_log = logging.getLogger("mooncake_kernels.transfer")


@dataclass(frozen=True)
class NicChoice:
    """The NICs of an engine, ordered by name, as the host code takes them.

    Attributes:
        nics: (name, port, GB/s) each.
        near_nodes: for each NUMA node the set of NICs that are best for its memory, as a bit set.
        near_gpus: the same for each GPU, by CUDA's ordinals.
        required: whether to refuse memory that they cannot use.
    """

    nics: Sequence[tuple[str, int, float]] = ()
    near_nodes: Sequence[int] = ()
    near_gpus: Sequence[int] = ()
    required: bool = False


def choose_nics(topology: Any, *, named: bool) -> NicChoice:
    """Choose every NIC that the topology would choose for memory of some NUMA node or GPU.

    Args:
        topology: the caller's; None: discover this machine's.
        named: whether the caller named rdma, so that there is no fallback.

    Raises:
        InvalidArgument: it is not a topology.
        Unavailable: there is no NIC, and rdma was named.
        OSError: none can be queried, and rdma was named.
    """
    if topology is not None:
        as_instance("TransferEngine", "topology", topology, Topology, "a Topology or None")
    try:
        in_kernel = MachineRoot().names("/sys/class/infiniband")
        missing = _missing(in_kernel)
        if missing and topology is None and not named and not in_kernel:
            return NicChoice()  # as on most machines
        if missing:
            raise Unavailable(f"TransferEngine: {missing}")
        chosen = _choice(topology, named)
    except (Unavailable, InvalidArgument, OSError) as error:
        if named:
            raise
        _log.warning("no rdma: %s", error)  # though there are NICs, or the caller named some
        return NicChoice()
    _log.info("rdma goes over %s", ", ".join(name for name, *_ in chosen.nics))
    return chosen


def _missing(in_kernel: Sequence[str]) -> str:
    """Why there can be no NIC, of those that the kernel has; empty if there can."""
    if missing := _host.missing_verbs():
        return missing
    if _host.rdma_devices():
        return ""
    if in_kernel:
        return f"libibverbs lists none of {', '.join(in_kernel)}; see `mooncake_kernels doctor`"
    return "this machine has no RDMA device"


def _choice(topology: Topology | None, named: bool) -> NicChoice:
    if topology is None:
        topology = Topology.discover().with_visible_gpus()
    else:
        _warn_of_order(topology)
    tiers = {place: topology.nic_tiers(place) for place in topology.locations}
    usable = {nic.name for kept in tiers.values() for tier in kept for nic in tier}
    nics = [nic for nic in topology.nics if nic.name in usable][:MAX_NICS]
    for nic in topology.nics:
        if nic.unusable:
            _log.info("rdma leaves out %s: %s", nic.name, nic.unusable)
    if not nics:
        raise Unavailable(f"TransferEngine: no NIC can be chosen: {_why_none(topology)}")
    fastest = max(nic.gbit_per_s or 0.0 for nic in nics) or 8.0
    speeds = [(_device_name(nic), nic.port, (nic.gbit_per_s or fastest) / 8) for nic in nics]
    near_nodes = _near(nics, tiers, "cpu:", [node.id for node in topology.numa_nodes])
    near_gpus = _near(nics, tiers, "cuda:", [gpu.index for gpu in topology.gpus])
    return NicChoice(speeds, near_nodes, near_gpus, named)


def _why_none(topology: Topology) -> str:
    """Say why the first location may use none of the NICs."""
    return topology.explain(topology.locations[0]).replace(": not chosen", "").replace("\n", "; ")


def _warn_of_order(topology: Topology) -> None:
    """Warn of a topology in which cuda:0 is another GPU than in this process.

    Its NICs would be near to other memory than it says.
    """
    if not topology.gpus or not os.environ.get("CUDA_VISIBLE_DEVICES"):
        return
    try:
        machine = Topology.discover()
    except (InvalidArgument, OSError):
        return
    numbers = {gpu.pci: gpu.index for gpu in topology.gpus}
    for here, gpu in enumerate(visible_gpus(machine.gpus)):
        there = numbers.get(gpu.pci, here)
        if there != here:
            _log.warning(
                "CUDA_VISIBLE_DEVICES makes GPU %s cuda:%d, which the topology takes for cuda:%d: "
                "NICs that are near to other GPUs will be used; see Topology.with_visible_gpus",
                *(gpu.uuid or gpu.pci, here, there),
            )
            return


def _device_name(nic: Nic) -> str:
    """Return the name to open it by, also of one that is known by its PCI address.

    That is all that the NCCL_TOPO_FILE of a cloud says of it.
    """
    if nic.name != nic.pci:
        return nic.name
    names = MachineRoot().names(f"/sys/bus/pci/devices/{nic.pci}/infiniband")
    return names[0] if names else nic.name


def _near(
    nics: Sequence[Nic], tiers: Mapping[str, _Tiers], kind: str, numbers: Sequence[int]
) -> list[int]:
    """Return the sets of NICs for the places of a kind: entry n belongs to number n."""
    count = max(numbers, default=-1) + 1
    return [_bits(nics, tiers.get(f"{kind}{number}", ())) for number in range(count)]


def _bits(nics: Sequence[Nic], tiers: _Tiers) -> int:
    best = {nic.name for nic in tiers[0]} if tiers else set()
    return sum(1 << i for i, nic in enumerate(nics) if nic.name in best)
