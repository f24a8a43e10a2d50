"""Find out which NICs reach which memory: probe each pair and record the result in the topology.

A NIC can register a GPU's memory and yet not access it, for instance behind an IOMMU or a switch
that redirects. No file reveals that; a write does.
"""

from collections.abc import Iterable
from typing import Any

import torch

from . import rdma
from .errors import CudaError, InvalidArgument, Unavailable
from .topology import Topology

_NUM_BYTES = 4096


def probe_all(
    topology: Topology, *, locations: Iterable[str] | None = None
) -> dict[tuple[str, str], str]:
    """Write to memory of each location with each NIC, and record the result in the topology.

    ::

        for nic in topology.nics:
            for location in locations:
                reason = mk.rdma.probe(nic, memory of location)
                mark the NIC as unreachable from there, with the reason, or as reachable

    Save it with ``topology.to_json()``, which includes the results.

    Args:
        topology: of this machine.
        locations: ``"cpu:0"``, ``"cuda:1"``, ...; None: ``cpu:0`` and each GPU of this process. All
            host memory counts as one location.

    Returns:
        (location, NIC) to the reason why the NIC does not reach it, empty if it does. If the memory
        could not be registered, that is ``"not registered: ..."``, and the topology is unchanged.
        NICs without an active port are left out.

    Raises:
        InvalidArgument: a location does not exist.
        Unavailable: no libibverbs; or this process cannot allocate memory at a location.
    """
    places = _locations(topology) if locations is None else list(locations)
    reasons: dict[tuple[str, str], str] = {}
    names = {nic.name for nic in topology.nics}
    for info in rdma.devices():
        if info.name not in names or not any(port.state == "ACTIVE" for port in info.ports):
            continue
        with rdma.open(info.name) as device:
            port = next(port.number for port in info.ports if port.state == "ACTIVE")
            for place in places:
                memory = _memory(topology, place)
                try:
                    reason = rdma.probe(device, memory, port=port)
                except (Unavailable, CudaError, OSError) as error:
                    reasons[place, info.name] = f"not registered: {error}"
                    continue
                reasons[place, info.name] = reason
                if reason:
                    topology.mark_unreachable(place, info.name, reason)
                else:
                    topology.mark_reachable(place, info.name)
    return reasons


def _locations(topology: Topology) -> list[str]:
    here = {"cpu:0", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))}
    return [location for location in topology.locations if location in here]


def _memory(topology: Topology, location: str) -> Any:
    if location not in topology.locations:
        known = ", ".join(topology.locations)
        raise InvalidArgument(f"probe_all: locations must be of {known}, got {location!r}")
    if location.startswith("cpu"):
        return bytearray(_NUM_BYTES)
    _check_numbering(topology, int(location.removeprefix("cuda:")))
    try:
        return torch.empty(_NUM_BYTES, dtype=torch.uint8, device=location)
    except (RuntimeError, AssertionError) as error:
        raise Unavailable(f"probe_all: no memory of {location} in this process: {error}") from None


def _check_numbering(topology: Topology, index: int) -> None:
    """Check that cuda:i is the topology's GPU i: CUDA_VISIBLE_DEVICES may renumber GPUs."""
    if index >= torch.cuda.device_count():
        return  # torch reports the error
    here = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
    there = topology.gpus[index].uuid
    if there and there != here:
        raise InvalidArgument(
            f"probe_all: topology must number GPUs as this process does, whose cuda:{index} is "
            f"{here}, got {there}: see Topology.with_gpu_order"
        )
