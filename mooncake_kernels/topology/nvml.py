"""What NVML adds to a PCI tree: the order, names and UUIDs of the GPUs, and their NVLinks.

nvidia-ml-py is imported when a machine is discovered, and only for this machine (root "/").
Without it GPUs are ordered as NVML orders them, too: by PCI address, those that this process may
use (by the driver's folder in /proc) before the others.
"""

import dataclasses
import logging
from typing import Any

from .model import NVSWITCH, Gpu, System

_log = logging.getLogger(__name__)
_MAX_LINKS = 36  # NVML_NVLINK_MAX_LINKS of the newest header; older drivers refuse high ones


def with_nvml(system: System) -> System:
    """Return the system with NVML's data on its GPUs; unchanged if NVML is not available.

    GPUs that NVML does not show (for instance to a container) come after those that it does.
    """
    if not system.gpus:
        return system
    try:
        import pynvml
    except ImportError as error:
        _log.debug("topology: NVML is not used: %s", error)
        return system
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        _log.debug("topology: NVML is not used: %s", error)
        return system
    try:
        return _merged(system, _read(pynvml, {gpu.pci for gpu in system.gpus}))
    except pynvml.NVMLError as error:
        _log.warning("topology: NVML is not used: %s", error)
        return system
    finally:
        pynvml.nvmlShutdown()


def _read(nvml: Any, addresses: set[str]) -> list[Gpu]:
    gpus = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        gpus.append(
            Gpu(
                index=index,
                pci=_address(nvml.nvmlDeviceGetPciInfo(handle).busId),
                name=_text(nvml.nvmlDeviceGetName(handle)),
                uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
                nvlinks=_nvlinks(nvml, handle, addresses),
            )
        )
    return gpus


def _nvlinks(nvml: Any, handle: Any, addresses: set[str]) -> tuple[tuple[str, int], ...]:
    counts: dict[str, int] = {}
    for link in range(_MAX_LINKS):
        try:
            is_up = nvml.nvmlDeviceGetNvLinkState(handle, link)
        except nvml.NVMLError:  # there are no more, or the GPU has none
            break
        if not is_up:
            continue
        try:
            remote = _address(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)
        except nvml.NVMLError:  # not a PCI device of this machine: a switch of the rack
            remote = ""
        peer = remote if remote in addresses else NVSWITCH
        counts[peer] = counts.get(peer, 0) + 1
    return tuple(sorted(counts.items()))


def _merged(system: System, seen: list[Gpu]) -> System:
    known = {gpu.pci for gpu in system.gpus}
    first = [gpu for gpu in seen if gpu.pci in known]
    shown = {gpu.pci for gpu in first}
    ordered = first + [gpu for gpu in system.gpus if gpu.pci not in shown]
    gpus = [dataclasses.replace(gpu, index=i) for i, gpu in enumerate(ordered)]
    return dataclasses.replace(system, gpus=tuple(gpus))


def _address(bus_id: bytes | str) -> str:
    """Return 0000:1b:00.0 of NVML's 00000000:1B:00.0."""
    domain, _, rest = _text(bus_id).lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
