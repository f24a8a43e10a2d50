"""Descriptions of this machine's NICs: from verbs, and from sysfs."""

import ipaddress
import logging
import re
from dataclasses import dataclass
from typing import Any

from .. import _host
from .._machine_root import MachineRoot

_RATE = re.compile(r"([0-9]+\.?[0-9]*) Gb/sec(?: \(([0-9]+)X)?")  # "100 Gb/sec (4X EDR)"
_CLASS = "/sys/class/infiniband"
_PCI = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


_log = logging.getLogger("mooncake_kernels.rdma")


@dataclass(frozen=True)
class GidInfo:
    """An address of a port.

    Attributes:
        index: its place in the port's table.
        gid: the address in IPv6 notation: ``::ffff:10.0.0.1`` stands for an IPv4 address.
        type: ``"RoCE v2"``, ``"RoCE v1"``, ``"IB"``; empty if the library cannot tell.
    """

    index: int
    gid: str
    type: str


@dataclass(frozen=True)
class PortInfo:
    """A port of a NIC.

    Attributes:
        number: 1 is the first.
        state: ``"ACTIVE"``, ``"DOWN"``, ``"INIT"``, ``"ARMED"``, ``"ACTIVE_DEFER"`` or ``"NOP"``.
        link_layer: ``"InfiniBand"`` or ``"Ethernet"``.
        rate_gbps: of the link, in Gb/s; None if sysfs does not say.
        active_mtu, max_mtu: in bytes.
        lid: address on an InfiniBand subnet; 0 on Ethernet.
        gids: the addresses that are set.
        width: lanes of the link; None if sysfs does not say.
    """

    number: int
    state: str
    link_layer: str
    rate_gbps: float | None
    active_mtu: int
    max_mtu: int
    lid: int
    gids: tuple[GidInfo, ...]
    width: int | None = None


@dataclass(frozen=True)
class DeviceInfo:
    """A NIC, as ``devices()`` found it.

    Attributes:
        name: ``"mlx5_0"``.
        node_guid: ``"506b:4b03:00c2:6ae0"``.
        firmware: its version, in the vendor's words.
        pci: address of the PCI function, ``"0000:3b:00.0"``; None if it is not behind one.
        numa: node of the NIC; None if unknown.
        max_mr_bytes, max_mr: the size of a region, and how many there may be.
        max_qp, max_cqe, max_sge: queue pairs, entries per completion queue, ranges per request.
        ports: in order.
        pci_path: where the function is in the PCI tree, ``"/sys/devices/pci0000:3a/..."``.
        node_type: ``"CA"``, of InfiniBand and RoCE; ``"RNIC"``, of iWARP; ``"unspecified"``, of EFA
            among others; and ``"usNIC"``. Only the first has the queue pairs of this package.
    """

    name: str
    node_guid: str
    firmware: str
    pci: str | None
    numa: int | None
    max_mr_bytes: int
    max_mr: int
    max_qp: int
    max_cqe: int
    max_sge: int
    ports: tuple[PortInfo, ...]
    pci_path: str | None = None
    node_type: str = ""


def devices() -> list[DeviceInfo]:
    """Describe every NIC of this machine that supports verbs.

    Returns:
        In the order of libibverbs, without those that cannot be queried (``open`` says why); empty
        where there is none, or no libibverbs. A warning is logged if it is missing for a NIC that
        the kernel has.

    Raises:
        OSError: none of them can be queried, with the errno of the first.
    """
    if missing := _host.missing_verbs():
        if names := MachineRoot().names(_CLASS):
            _log.warning("%s is not listed: %s", ", ".join(names), missing)
        return []
    return [describe(facts) for facts in _host.rdma_devices()]


def describe(facts: dict[str, Any], root: MachineRoot | None = None) -> DeviceInfo:
    """Add sysfs's facts to those that verbs report for a device."""
    root = root or MachineRoot()
    name = facts["name"]
    folder = _pci_folder(root, name)
    numa = root.integer(f"{folder}/numa_node") if folder else None
    guid = f"{facts['node_guid']:016x}"
    return DeviceInfo(
        name=name,
        node_guid=":".join(guid[i : i + 4] for i in range(0, 16, 4)),
        firmware=facts["firmware"],
        node_type=facts["node_type"],
        pci=folder.rsplit("/", 1)[1] if folder else None,
        pci_path=folder,
        numa=None if numa is None or numa < 0 else numa,
        **{key: facts[key] for key in ("max_mr_bytes", "max_mr", "max_qp", "max_cqe", "max_sge")},
        ports=tuple(describe_port(name, port, root) for port in facts["ports"]),
    )


def describe_port(device: str, facts: dict[str, Any], root: MachineRoot) -> PortInfo:
    """The same for a port."""
    rate = root.text(f"{_CLASS}/{device}/ports/{facts['number']}/rate")
    words = _RATE.match(rate or "")
    return PortInfo(
        rate_gbps=float(words[1]) if words else None,
        width=int(words[2]) if words and words[2] else None,
        gids=tuple(
            GidInfo(gid["index"], gid_text(gid["gid"]), gid["type"]) for gid in facts["gids"]
        ),
        **{key: facts[key] for key in ("number", "state", "link_layer")},
        **{key: facts[key] for key in ("active_mtu", "max_mtu", "lid")},
    )


def gid_text(gid: bytes) -> str:
    """Format a GID as IPv6, that of an IPv4 address with dots."""
    address = ipaddress.IPv6Address(gid)
    return f"::ffff:{address.ipv4_mapped}" if address.ipv4_mapped else str(address)


def _pci_folder(root: MachineRoot, name: str) -> str | None:
    """The folder of the NIC's PCI function; for soft-RoCE that of its network interface."""
    folder = root.resolve(f"{_CLASS}/{name}/device")
    if folder is None:
        parent = root.text(f"{_CLASS}/{name}/parent")
        folder = root.resolve(f"/sys/class/net/{parent}/device") if parent else None
    while folder and not _PCI.fullmatch(folder.rsplit("/", 1)[1]):
        folder = folder.rpartition("/")[0]  # a virtio device is a child of its function
    return folder or None
