"""The RDMA devices in sysfs: their PCI functions, ports, addresses and network interfaces."""

from collections.abc import Callable

from .._machine_root import MachineRoot
from .._rdma_kind import why_unusable
from .check import MAX_PORTS
from .model import Nic, natural
from .sysfs_values import integer, leading_number, warn_of_vanished

_INFINIBAND = "/sys/class/infiniband"
_NET = "/sys/class/net"
_MAX_GIDS = 256  # size of a port's table
_MIN_IPV6_FIELDS = 10


def read_nics(
    root: MachineRoot, add_device: Callable[[str], str | None], numa_of: Callable[[str], int]
) -> tuple[Nic, ...]:
    """Return the NICs by name. ``add_device`` adds a folder of /sys/devices to the PCI tree."""
    routed = _with_lower_interfaces(root, _default_route_interfaces(root))
    nics = []
    for name in sorted(root.names(_INFINIBAND), key=natural):
        folder = root.resolve(f"{_INFINIBAND}/{name}")
        if folder is None:
            warn_of_vanished(f"{_INFINIBAND}/{name}")
            continue
        if not root.path(folder).is_dir():
            continue
        device = _device_folder(root, folder)
        pci = add_device(device) if device else None
        port = _best_port(root, folder)
        base = f"{folder}/ports/{port}"
        netdevs = _interfaces(root, name, pci, device, base)
        nics.append(
            Nic(
                name=name,
                pci=pci,
                numa=numa_of(device) if device else -1,
                port=port,
                state=_state(root, base),
                gbit_per_s=leading_number(root, f"{base}/rate", "Gb/sec")
                or _interface_gbit(root, netdevs),
                link_layer=_link_layer(root, base),
                has_gid=_has_gid(root, base),
                netdevs=netdevs,
                has_default_route=not routed.isdisjoint(netdevs),
                is_vf=bool(device) and root.resolve(f"{device}/physfn") is not None,
                unusable=why_unusable(root, folder),
            )
        )
    return tuple(nics)


def _device_folder(root: MachineRoot, folder: str) -> str | None:
    """Return the hardware's folder: for soft-RoCE that of the interface it runs on, if any."""
    device = root.resolve(f"{folder}/device")
    if device is not None:
        return device
    if "/infiniband/" in folder and "/devices/virtual/" not in folder:
        return folder.split("/infiniband/")[0]
    parent = root.text(f"{folder}/parent")
    return root.resolve(f"{_NET}/{parent}/device") if parent else None


def _best_port(root: MachineRoot, folder: str) -> int:
    """Return the fastest port that is up, or of all ports if none is."""
    numbers = [int(name) for name in root.names(f"{folder}/ports") if name.isdecimal()]
    ports = [number for number in numbers if 1 <= number <= MAX_PORTS]

    def rank(port: int) -> tuple[bool, float, int]:
        base = f"{folder}/ports/{port}"
        speed = leading_number(root, f"{base}/rate", "Gb/sec")
        return _state(root, base) == "ACTIVE", speed, -port

    return max(ports, key=rank, default=1)


def _state(root: MachineRoot, base: str) -> str:
    """Return ACTIVE of ``4: ACTIVE``; "" if it is not a word."""
    state = (root.text(f"{base}/state") or "").rpartition(":")[2].strip()
    return state if state.isidentifier() else ""


def _link_layer(root: MachineRoot, base: str) -> str:
    text = root.text(f"{base}/link_layer") or ""
    return text if text in ("InfiniBand", "Ethernet") else ""


def _has_gid(root: MachineRoot, base: str) -> bool | None:
    names = root.names(f"{base}/gids")[:_MAX_GIDS]
    if not names:
        return None
    return any((root.text(f"{base}/gids/{name}") or "").strip("0:") for name in names)


def _interfaces(
    root: MachineRoot, name: str, pci: str | None, device: str | None, base: str
) -> tuple[str, ...]:
    """Return the interfaces of a device: its own, and bonds that contain them."""
    found: set[str | None] = set(root.names(f"{device}/net")) if pci else set()
    found |= {root.text(f"{_INFINIBAND}/{name}/parent"), root.text(f"{base}/gid_attrs/ndevs/0")}
    for interface in list(found):
        master = root.resolve(f"{_NET}/{interface}/master") if interface else None
        found.add(master.rpartition("/")[2] if master else None)
    return tuple(sorted((interface for interface in found if interface), key=natural))


def _interface_gbit(root: MachineRoot, netdevs: tuple[str, ...]) -> float | None:
    """Return the speed of the fastest interface, which sysfs gives in Mb/s."""
    speed = max((integer(root, f"{_NET}/{name}/speed", 0) for name in netdevs), default=0)
    return speed / 1000 if speed > 0 else None


def _default_route_interfaces(root: MachineRoot) -> set[str]:
    """Return the interfaces with a default route in /proc/net/route and ipv6_route."""
    found = set()
    for line in (root.text("/proc/net/route") or "").splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[1] == fields[7] == "00000000":
            found.add(fields[0])
    for line in (root.text("/proc/net/ipv6_route") or "").splitlines():
        fields = line.split()
        if len(fields) >= _MIN_IPV6_FIELDS and fields[0] == "0" * 32 and fields[1] == "00":
            found.add(fields[9])
    return found - {"lo"}


def _with_lower_interfaces(root: MachineRoot, names: set[str]) -> set[str]:
    """Add the interfaces beneath: the slaves of a bond, the interface under a VLAN."""
    found: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        todo += (root.text(f"{_NET}/{name}/bonding/slaves") or "").split()
        lower = [n for n in root.names(f"{_NET}/{name}") if n.startswith("lower_")]
        todo += [n.removeprefix("lower_") for n in lower]
    return found
