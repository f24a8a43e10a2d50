"""A machine from NCCL's XML, as written to NCCL_TOPO_DUMP_FILE and read from NCCL_TOPO_FILE.

Files shipped by clouds say less than a dump: a device is only a PCI class, a NIC is named by its
PCI address, and GPUs are ordered by theirs. Some name addresses alone: NCCL takes the rest from the
machine that it runs on, and so does this. NCCL omits host bridges; here two trees below one
<cpu> share one if they are in the same PCI domain.
"""

import dataclasses
import logging
import xml.etree.ElementTree as ET
from pathlib import Path

from .._machine_root import MachineRoot
from .._rdma_kind import why_unusable_function
from .check import MAX_DEPTH, checked
from .model import (
    ADDRESS,
    NVSWITCH,
    Gpu,
    Malformed,
    Nic,
    NumaNode,
    PciNode,
    System,
    bus_order,
    natural,
)
from .sysfs_values import MAX_WIDTH, integer, leading_number, number_with_unit

_BRIDGE, _NETWORK, _DISPLAY = 0x06, 0x02, 0x03
_NVIDIA = 0x10DE
_3D = 0x0302
_DEVICES = "/sys/bus/pci/devices"
_MAX_NAMED = 4  # of the devices that a warning is about

_log = logging.getLogger("mooncake_kernels.topology")


def read_nccl_xml(path: Path, machine: MachineRoot | None = None) -> System:
    """Read a file; ``machine`` (this one, unless given) has what it does not say of its devices.

    Raises:
        Malformed: it is not such a file; the message says why.
        OSError: it cannot be read.
    """
    try:
        root = ET.fromstring(path.read_bytes())
    except (ET.ParseError, ValueError, LookupError) as error:  # the others: from the encoding
        raise Malformed(f"it is not well-formed XML: {error}") from None
    if root.tag != "system":
        raise Malformed(f"it must be a <system>, got <{root.tag}>")
    reader = _Reader(machine or MachineRoot())
    for cpu in root.iterfind("cpu"):
        reader.add_cpu(cpu, only=len(root.findall("cpu")) == 1)
    if reader.unknown:
        named = reader.unknown[:_MAX_NAMED] + ["..."] * (len(reader.unknown) > _MAX_NAMED)
        _log.warning(
            "%s: %d devices have no class, and are not on this machine: neither GPUs nor NICs (%s)",
            *(path, len(reader.unknown), ", ".join(named)),
        )
    return reader.system()


class _Reader:
    def __init__(self, machine: MachineRoot) -> None:
        self.unknown: list[str] = []  # addresses of devices, of which nothing is known
        self._machine = machine
        self._numa: list[NumaNode] = []
        self._pci: list[PciNode] = []
        self._gpus: list[tuple[int | None, Gpu]] = []  # with NCCL's dev
        self._nics: dict[str, Nic] = {}

    def add_cpu(self, cpu: ET.Element, *, only: bool) -> None:
        numa = _integer(cpu, "numaid", -1)
        if numa < 0 and not only:
            raise Malformed(f"<cpu> must have a numaid >= 0 where there are others, got {numa}")
        node = NumaNode(max(numa, 0), _cpu_list(cpu.get("affinity", "")))
        if node.id in (other.id for other in self._numa):
            raise Malformed(f"<cpu numaid={node.id}> is there twice: it is of several hosts")
        self._numa.append(node)
        for nic in cpu.iterfind("nic"):
            self._add_nets(nic, None, node.id)
        for pci in cpu.iterfind("pci"):
            self._add_pci(pci, None, "", node.id, 0)

    def _add_pci(
        self, pci: ET.Element, parent: str | None, host_bridge: str, numa: int, depth: int
    ) -> None:
        address = pci.get("busid", "").lower()
        if not ADDRESS.fullmatch(address):
            raise Malformed(f"PCI device {address!r} has no address like 0000:1b:00.0")
        if depth > MAX_DEPTH:
            raise Malformed(f"<pci busid={address!r}> is below more than {MAX_DEPTH} others")
        self._complete(pci, address)
        host_bridge = host_bridge or f"pci{address.partition(':')[0]}@cpu:{numa}"
        children = pci.findall("pci")
        pci_class = _integer(pci, "class", 0, base=16)
        self._pci.append(
            PciNode(
                address=address,
                parent=parent,
                host_bridge=host_bridge,
                numa=numa,
                pci_class=pci_class,
                gt_per_s=_gt_per_s(pci, address),
                width=_integer(pci, "link_width", 0),
                is_switch=bool(children) or pci_class >> 16 == _BRIDGE,
            )
        )
        if not children:
            self._add_device(pci, address, pci_class, numa)
            if not len(pci) and "class" not in pci.attrib:
                self.unknown.append(address)
        for child in children:
            self._add_pci(child, address, host_bridge, numa, depth + 1)

    def _complete(self, pci: ET.Element, address: str) -> None:
        """Add what the machine says of a device of which the file says not even the class."""
        folder = f"{_DEVICES}/{address}"
        if "class" in pci.attrib or self._machine.resolve(folder) is None:
            return
        for key in ("class", "vendor", "device"):
            value = integer(self._machine, f"{folder}/{key}", 0)
            if value > 0:
                pci.attrib.setdefault(key, hex(value))
        speed = leading_number(self._machine, f"{folder}/max_link_speed", "GT/s")
        pci.attrib.setdefault("link_speed", f"{speed} GT/s")
        width = integer(self._machine, f"{folder}/max_link_width", 0)
        pci.attrib.setdefault("link_width", str(width if 0 < width <= MAX_WIDTH else 0))

    def _add_device(self, pci: ET.Element, address: str, pci_class: int, numa: int) -> None:
        """Add a device from its children; without any, from its PCI class."""
        gpu, nics = pci.find("gpu"), pci.findall("nic")
        nvidia = _integer(pci, "vendor", _NVIDIA, base=16) == _NVIDIA
        display = pci_class >> 16 == _DISPLAY and (nvidia or pci_class >> 8 == _3D)
        if gpu is not None or (not nics and display):
            number = _integer(gpu, "dev", -1) if gpu is not None else -1
            links = _nvlinks(gpu) if gpu is not None else ()
            self._gpus.append((number if number >= 0 else None, Gpu(0, address, nvlinks=links)))
        vendor, device = (_integer(pci, key, 0, base=16) for key in ("vendor", "device"))
        unusable = why_unusable_function(vendor, device)
        for nic in nics:
            self._add_nets(nic, address, numa, pci_class, unusable)
        if gpu is None and not nics and pci_class >> 16 == _NETWORK:
            layer = _link_layer(pci_class)
            made = Nic(address, address, numa, link_layer=layer, unusable=unusable)
            self._nics[address] = made

    def _add_nets(
        self,
        nic: ET.Element,
        address: str | None,
        numa: int,
        pci_class: int = 0,
        unusable: str = "",
    ) -> None:
        for net in nic.iterfind("net"):
            name = net.get("name", "")
            speed = _integer(net, "speed", 0)
            made = Nic(
                name=name,
                pci=address,
                numa=numa,
                port=max(_integer(net, "port", 1), 1),
                gbit_per_s=speed / 1000 if speed > 0 else None,
                link_layer=_link_layer(pci_class),
                unusable=unusable or _why_not_rdma(net),
            )
            other = self._nics.get(name)  # another of its ports
            if other is None or (made.gbit_per_s or 0) > (other.gbit_per_s or 0):
                self._nics[name] = made

    def system(self) -> System:
        addresses = {gpu.pci for _, gpu in self._gpus}
        numbers = [number for number, _ in self._gpus if number is not None]
        # Processes with one GPU each may have written `dev` as each saw it: always 0.
        numbered = len(set(numbers)) == len(self._gpus)
        self._gpus.sort(key=lambda item: bus_order(item[1].pci))
        if numbered:
            self._gpus.sort(key=lambda item: item[0] or 0)
        gpus = [
            dataclasses.replace(gpu, index=i, nvlinks=_with_switches(gpu.nvlinks, addresses))
            for i, (_, gpu) in enumerate(self._gpus)
        ]
        nics = sorted(self._nics.values(), key=lambda nic: natural(nic.name))
        numa = tuple(sorted(self._numa, key=lambda node: node.id))
        return checked(System(numa, tuple(self._pci), tuple(gpus), tuple(nics)))


def _why_not_rdma(net: ET.Element) -> str:
    """Return why it is no RDMA device: NCCL numbers their ports from 1, and those of others 0.

    Without a number, what has no GPUDirect RDMA counts as one of the others.
    """
    if _integer(net, "port", -1) == 0:
        return "a network interface without RDMA: its port is 0"
    if "port" not in net.attrib and _integer(net, "gdr", 1) == 0:
        return "a network interface without RDMA: it has no port, and gdr is 0"
    return ""


def _nvlinks(gpu: ET.Element) -> tuple[tuple[str, int], ...]:
    links = [link for link in gpu.iterfind("nvlink") if _integer(link, "count", 0) > 0]
    return tuple((link.get("target", "").lower(), _integer(link, "count", 0)) for link in links)


def _with_switches(
    links: tuple[tuple[str, int], ...], addresses: set[str]
) -> tuple[tuple[str, int], ...]:
    counts: dict[str, int] = {}
    for target, count in links:
        peer = target if target in addresses else NVSWITCH
        counts[peer] = counts.get(peer, 0) + count
    return tuple(sorted(counts.items()))


def _link_layer(pci_class: int) -> str:
    return {0x0200: "Ethernet", 0x0207: "InfiniBand"}.get(pci_class >> 8, "")


def _gt_per_s(pci: ET.Element, address: str) -> float:
    text = pci.get("link_speed", "")
    if not text or text.lower().startswith("unknown"):
        return 0.0
    try:
        return number_with_unit(text, "GT/s")
    except ValueError:
        raise Malformed(f"link_speed of {address} must be like 16.0 GT/s, got {text!r}") from None


def _integer(element: ET.Element, key: str, default: int, base: int = 10) -> int:
    text = element.get(key)
    if not text:
        return default
    try:
        value = int(text, base)
    except ValueError:
        value = -2
    if not -1 <= value < 1 << 32:
        raise Malformed(f"{key} of <{element.tag}> must be an integer, got {text[:80]!r}") from None
    return value


def _cpu_list(mask: str) -> str:
    """Return 0-23 of 00000000,00ffffff."""
    try:
        bits = int(mask.replace(",", "") or "0", 16)
    except ValueError:
        raise Malformed(f"affinity of <cpu> must be hexadecimal, got {mask[:80]!r}") from None
    if bits < 0 or bits.bit_length() > 1 << 14:
        raise Malformed("affinity of <cpu> must be at most 16384 processors")
    runs: list[str] = []
    first = None
    for i in range(bits.bit_length() + 1):
        on = bits >> i & 1
        if on and first is None:
            first = i
        if not on and first is not None:
            runs.append(str(first) if first == i - 1 else f"{first}-{i - 1}")
            first = None
    return ",".join(runs)
