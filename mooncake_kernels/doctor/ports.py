"""RDMA devices and their ports as sysfs shows them."""

import ipaddress
from dataclasses import dataclass

from .._machine_root import MachineRoot
from .._rdma_kind import why_unusable
from . import pci

CLASS = "/sys/class/infiniband"
# A table has 256 entries, filled from the front: after this many free ones nothing follows.
_MAX_FREE_GIDS = 16


@dataclass(frozen=True)
class Gid:
    """One entry of a port's table that is in use."""

    index: int
    text: str
    type: str  # "IB/RoCE v1", "RoCE v2"; empty if the kernel does not say
    netdev: str | None

    @property
    def address(self) -> str:
        """Return it in the usual notation: 10.0.0.1, fe80::1."""
        try:
            address = ipaddress.IPv6Address(self.text)
        except ValueError:
            return self.text
        return str(address.ipv4_mapped or address)

    @property
    def kind(self) -> str:
        """Return "ipv4" (a mapped address), "global", "link-local" (of either), or "none"."""
        try:
            address = ipaddress.IPv6Address(self.text)
        except ValueError:
            return "none"
        if (address.ipv4_mapped or address).is_link_local:
            return "link-local"
        return "ipv4" if address.ipv4_mapped else "global"


@dataclass(frozen=True)
class Port:
    """One port. Texts are the kernel's, without its numbers; None is unreadable."""

    device: str
    number: int
    state: str | None  # "ACTIVE", "DOWN", "INIT", ...
    phys_state: str | None  # "LinkUp", "Polling", "Disabled", ...
    rate: str | None
    link_layer: str | None
    netdev: str | None
    gids: tuple[Gid, ...]

    @property
    def name(self) -> str:
        return f"{self.device} port {self.number}"

    @property
    def is_active(self) -> bool:
        return self.state == "ACTIVE"

    @property
    def is_roce(self) -> bool:
        return self.link_layer == "Ethernet"


def devices(root: MachineRoot) -> list[str]:
    """Return the names of the RDMA devices that may be usable."""
    unusable = left_out(root)
    return [name for name in root.names(CLASS) if name not in unusable]


def left_out(root: MachineRoot) -> dict[str, str]:
    """Return the names of the others (iWARP, EFA, ...), and why."""
    reasons = {name: _why_unusable(root, name) for name in root.names(CLASS)}
    return {name: reason for name, reason in reasons.items() if reason}


def _why_unusable(root: MachineRoot, name: str) -> str:
    folder = root.resolve(f"{CLASS}/{name}")
    return why_unusable(root, folder) if folder else ""


def address_of(root: MachineRoot, device: str) -> str | None:
    """Return a device's PCI function; for soft-RoCE that of its network interface."""
    parent = root.text(f"{CLASS}/{device}/parent")
    return pci.address_of(root, f"{CLASS}/{device}/device") or (
        pci.address_of(root, f"/sys/class/net/{parent}/device") if parent else None
    )


def ports(root: MachineRoot) -> list[Port]:
    """Read all ports of these devices."""
    return [
        _port(root, device, int(number))
        for device in devices(root)
        for number in root.names(f"{CLASS}/{device}/ports")
        if number.isascii() and number.isdigit()
    ]


def _port(root: MachineRoot, device: str, number: int) -> Port:
    folder = f"{CLASS}/{device}/ports/{number}"
    gids = _gids(root, folder)
    named = [gid.netdev for gid in gids if gid.netdev]
    return Port(
        device=device,
        number=number,
        state=_after_colon(root.text(f"{folder}/state")),
        phys_state=_after_colon(root.text(f"{folder}/phys_state")),
        rate=root.text(f"{folder}/rate"),
        link_layer=root.text(f"{folder}/link_layer"),
        netdev=named[0] if named else _netdev(root, device, number),
        gids=gids,
    )


def _after_colon(text: str | None) -> str | None:
    return None if text is None else text.split(":", 1)[-1].strip()


def _gids(root: MachineRoot, folder: str) -> tuple[Gid, ...]:
    gids = []
    names = root.names(f"{folder}/gids")
    num_free = 0
    for index in sorted(int(name) for name in names if name.isascii() and name.isdigit()):
        text = root.text(f"{folder}/gids/{index}") or ""
        if not text.strip("0:"):
            num_free += 1
            if num_free == _MAX_FREE_GIDS:
                break
            continue
        num_free = 0
        kind = root.text(f"{folder}/gid_attrs/types/{index}") or ""
        netdev = root.text(f"{folder}/gid_attrs/ndevs/{index}")
        gids.append(Gid(index, text, kind, netdev or None))
    return tuple(gids)


def _netdev(root: MachineRoot, device: str, number: int) -> str | None:
    names = root.names(f"{CLASS}/{device}/device/net")
    for name in names:
        if root.integer(f"/sys/class/net/{name}/dev_port") == number - 1:
            return name
    return names[0] if names else root.text(f"{CLASS}/{device}/parent") or None
