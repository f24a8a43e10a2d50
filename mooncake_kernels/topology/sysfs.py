"""A machine from sysfs, under any root: the PCI tree above its GPUs and NICs, and its NUMA nodes.

Link speeds are the maximum of either end (`max_link_speed`), because an idle GPU drops its link to
2.5 GT/s. Widths are those in use: a badly seated card has lost lanes permanently.
"""

import re

from .._machine_root import MachineRoot
from .check import checked
from .model import ADDRESS, Gpu, Malformed, PciNode, System, bus_order
from .sysfs_nics import read_nics
from .sysfs_numa import NumaReader
from .sysfs_values import MAX_WIDTH, integer, leading_number, warn_of_vanished

_DEVICES = "/sys/bus/pci/devices"
_GIVEN_GPUS = "/proc/driver/nvidia/gpus"
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_NVIDIA = 0x10DE


def read_system(root: MachineRoot) -> System:
    """Read a machine.

    Raises:
        Malformed: the folders do not form a tree; the message names a device.
    """
    reader = _Reader(root)
    devices = filter(ADDRESS.fullmatch, root.names(_DEVICES))
    folders = {address: reader.gpu_folder(address) for address in devices}
    gpus = [address for address, folder in folders.items() if folder]
    # A container sees every GPU in sysfs; the driver's folder shows those that it was given.
    given = set(root.names(_GIVEN_GPUS))
    gpus.sort(key=lambda address: (address not in given, bus_order(address)))
    for address in gpus:
        reader.add_device(folders[address])
    nics = read_nics(root, reader.add_device, reader.numa.of_device)
    numa = reader.numa.nodes(known={node.numa for node in reader.nodes.values()})
    return checked(
        System(
            numa=numa,
            pci=tuple(reader.nodes[address] for address in sorted(reader.nodes)),
            gpus=tuple(_gpu(root, i, address) for i, address in enumerate(gpus)),
            nics=nics,
        )
    )


class _Reader:
    """Collects the PCI functions from devices up to their host bridges."""

    def __init__(self, root: MachineRoot):
        self.root = root
        self.numa = NumaReader(root)
        self.nodes: dict[str, PciNode] = {}

    def gpu_folder(self, address: str) -> str:
        """Return the folder of a PCI device, if it is a GPU; else ""."""
        folder = self.root.resolve(f"{_DEVICES}/{address}")
        if folder is None:
            warn_of_vanished(f"{_DEVICES}/{address}")
            return ""
        base_class = integer(self.root, f"{folder}/class", 0) >> 8
        vendor = integer(self.root, f"{folder}/vendor", _NVIDIA if base_class == 0x0302 else 0)
        return folder if base_class in (0x0300, 0x0302) and vendor == _NVIDIA else ""

    def add_device(self, folder: str) -> str | None:
        """Add the PCI function above a folder of /sys/devices; return its address, None if none."""
        parts = folder.split("/")
        places = [i for i, part in enumerate(parts) if ADDRESS.fullmatch(part)]
        parent = None
        for i in places:
            host_bridge = parts[places[0] - 1]
            if not _HOST_BRIDGE.fullmatch(host_bridge):
                raise Malformed(f"PCI device {parts[i]} must be below a host bridge, got {folder}")
            self._add_node("/".join(parts[: i + 1]), parts[i], parent, host_bridge)
            parent = parts[i]
        return parent

    def _add_node(self, folder: str, address: str, parent: str | None, host_bridge: str) -> None:
        known = self.nodes.get(address)
        if known is not None:
            if (known.parent, known.host_bridge) != (parent, host_bridge):
                raise Malformed(
                    f"PCI device {address} is below {known.parent or known.host_bridge} and also "
                    f"below {parent or host_bridge}: a loop, or a broken copy"
                )
            return
        root = self.root
        width = integer(root, f"{folder}/current_link_width", 0)
        if not 0 < width <= MAX_WIDTH:
            width = integer(root, f"{folder}/max_link_width", 0)
        self.nodes[address] = PciNode(
            address=address,
            parent=parent,
            host_bridge=host_bridge,
            numa=self.numa.of_device(folder),
            pci_class=integer(root, f"{folder}/class", 0),
            gt_per_s=leading_number(root, f"{folder}/max_link_speed", "GT/s"),
            width=width if 0 < width <= MAX_WIDTH else 0,
        )


def _gpu(root: MachineRoot, index: int, address: str) -> Gpu:
    """Describe a GPU from its driver's files in /proc, if the driver is loaded."""
    fields = {}
    text = root.text(f"{_GIVEN_GPUS}/{address}/information") or ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    uuid = fields.get("GPU UUID", "")
    return Gpu(index, address, fields.get("Model", ""), "" if "?" in uuid else uuid)
