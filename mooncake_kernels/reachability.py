"""Find out which NICs reach which memory: probe each pair and record the result in the topology.

A NIC can register a GPU's memory and yet not access it, for instance behind an IOMMU or a switch
that redirects. No file reveals that; a write does.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch

from . import _host, rdma
from .errors import CudaError, InvalidArgument, Unavailable
from .topology import Nic, Topology

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
            host memory counts as one location: what is found of ``cpu:0`` is recorded of each node.

    Returns:
        (location, NIC) to the reason why the NIC does not reach it, empty if it does. If the NIC
        could not be opened, or has no such port, that is ``"not opened: ..."``; if it could not
        register the memory, ``"not registered: ..."``; then the topology is unchanged. NICs whose
        port is not active are left out.

    Raises:
        InvalidArgument: a location does not exist.
        Unavailable: no libibverbs; or this process cannot allocate memory at a location.
    """
    if missing := _host.missing_verbs():
        raise Unavailable(f"probe_all: {missing}")
    places = _locations(topology) if locations is None else list(locations)
    for place in places:
        if place not in topology.locations:
            known = ", ".join(topology.locations)
            raise InvalidArgument(f"probe_all: locations must be of {known}, got {place!r}")
    reasons: dict[tuple[str, str], str] = {}
    for nic in topology.nics:
        with ExitStack() as opened:
            try:
                device = opened.enter_context(rdma.open(nic.name))
                state = device.port(nic.port).state
            except (InvalidArgument, Unavailable, OSError) as error:
                reasons.update({(place, nic.name): f"not opened: {error}" for place in places})
                continue
            for place in places if state == "ACTIVE" else ():
                memory = _memory(topology, place)
                try:
                    reason = rdma.probe(device, memory, port=nic.port)
                except (InvalidArgument, Unavailable, CudaError, OSError) as error:
                    reasons[place, nic.name] = f"not registered: {error}"
                    continue
                reasons[place, nic.name] = reason
                _record(topology, place, nic, reason)
    return reasons


def _record(topology: Topology, place: str, nic: Nic, reason: str) -> None:
    is_host = place.startswith("cpu:")
    nodes = [location for location in topology.locations if location.startswith("cpu:")]
    for location in nodes if is_host else [place]:
        if reason:
            topology.mark_unreachable(location, nic, reason)
        else:
            topology.mark_reachable(location, nic)


def _locations(topology: Topology) -> list[str]:
    here = {"cpu:0", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))}
    return [location for location in topology.locations if location in here]


def _memory(topology: Topology, location: str) -> Any:
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
