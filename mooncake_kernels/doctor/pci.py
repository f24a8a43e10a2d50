"""PCI functions as sysfs shows them: GPUs, bridges above a device, capabilities."""

import re

from .._machine_root import MachineRoot

DEVICES = "/sys/bus/pci/devices"
EXPRESS = 0x10  # capability: PCI Express
ACS = 0x0D  # extended capability: Access Control Services
_NVIDIA, _MELLANOX = 0x10DE, 0x15B3
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_FIRST_EXTENDED = 0x100


def _of_kind(root: MachineRoot, vendor: int, classes: tuple[int, ...]) -> list[str]:
    def matches(address: str) -> bool:
        if root.integer(f"{DEVICES}/{address}/vendor") != vendor:
            return False
        return (root.integer(f"{DEVICES}/{address}/class") or 0) >> 8 in classes

    return [address for address in root.names(DEVICES) if matches(address)]


def gpus(root: MachineRoot) -> list[str]:
    """Return addresses of NVIDIA's GPUs (VGA and 3D controllers)."""
    return _of_kind(root, _NVIDIA, (0x0300, 0x0302))


def mellanox_nics(root: MachineRoot) -> list[str]:
    """Return addresses of network controllers that certainly support RDMA."""
    return _of_kind(root, _MELLANOX, (0x0200, 0x0207))


def address_of(root: MachineRoot, folder: str) -> str | None:
    """Return the PCI function that a device is or is below: the last one in its path."""
    path = path_of(root, folder)
    return path[-1] if path else None


def path_of(root: MachineRoot, folder: str) -> list[str]:
    """Return the PCI functions from the root port down to the device."""
    resolved = root.resolve(folder) or ""
    return [part for part in resolved.split("/") if _ADDRESS.fullmatch(part)]


def driver_of(root: MachineRoot, address: str) -> str | None:
    """Return the name of the kernel driver bound to the device."""
    resolved = root.resolve(f"{DEVICES}/{address}/driver")
    return resolved.rsplit("/", 1)[-1] if resolved else None


def config(root: MachineRoot, address: str) -> bytes:
    """Return the readable part of the configuration space; only root reads past 64 bytes."""
    resolved = root.resolve(f"{DEVICES}/{address}/config")
    try:
        return root.path(resolved).read_bytes() if resolved else b""
    except OSError:
        return b""


def capability(space: bytes, wanted: int) -> int | None:
    """Return the offset of a capability; None if it is absent or the list is not readable."""
    offset = space[0x34] & 0xFC if len(space) > 0x34 else 0
    for _ in range(48):  # the most that fit, so that a loop ends
        if offset < 0x40 or offset + 1 >= len(space):
            return None
        if space[offset] == wanted:
            return offset
        offset = space[offset + 1] & 0xFC
    return None


def extended_capability(space: bytes, wanted: int) -> int | None:
    """Return the offset of an extended capability; None as above."""
    offset = _FIRST_EXTENDED
    for _ in range(960):
        if offset < _FIRST_EXTENDED or offset + 4 > len(space):
            return None
        header = word(space, offset) | word(space, offset + 2) << 16
        if header & 0xFFFF == wanted:
            return offset
        offset = header >> 20 & 0xFFC
    return None


def word(space: bytes, offset: int) -> int:
    """Return 16 bits; zero past the end."""
    return int.from_bytes(space[offset : offset + 2], "little")
