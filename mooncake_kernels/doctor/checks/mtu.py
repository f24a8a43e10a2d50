"""Checks of MTUs. RoCE's follows from the interface's; libibverbs reports it for all ports."""

from collections.abc import Iterator, Mapping, Sequence

from ..._machine_root import MachineRoot
from ...rdma import DeviceInfo, PortInfo
from ..finding import Finding, Topic
from ..ports import Port

TOPIC = Topic(
    "mtu",
    {
        "mtu": "small packets cost bandwidth: the payload should be 4096 bytes",
        "mtu_mismatch": "queue pairs whose ends differ in MTU lose packets, or never start",
    },
)
_PAYLOADS = (4096, 2048, 1024, 512, 256)
# The kernel's reserve for GRH, UDP, BTH, XRC, atomic headers and ICRC.
_HEADER_BYTES = 40 + 8 + 12 + 4 + 28 + 4


def payload_bytes(netdev_mtu: int) -> int:
    """Return the RDMA MTU that fits into an interface's."""
    return next((size for size in _PAYLOADS if size + _HEADER_BYTES <= netdev_mtu), 0)


def check(
    root: MachineRoot, all_ports: list[Port], devices: Sequence[DeviceInfo]
) -> Iterator[Finding]:
    """Check the MTU of active ports, and whether they agree."""
    verbs = {
        f"{device.name} port {port.number}": port for device in devices for port in device.ports
    }
    active: dict[str, int] = {}
    for port in all_ports:
        if not port.is_active:
            continue
        netdev_mtu = root.integer(f"/sys/class/net/{port.netdev}/mtu") if port.netdev else None
        said = verbs.get(port.name)
        if port.is_roce:
            finding, size = _roce(port, netdev_mtu, said)
            yield finding
        elif said is not None:
            finding, size = _said(port, said)
            yield finding
        else:
            continue
        if size:
            active[port.name] = size
    yield from _mismatches(active, {port.name: port.netdev for port in all_ports})


def _roce(port: Port, netdev_mtu: int | None, said: PortInfo | None) -> tuple[Finding, int]:
    if netdev_mtu is None or not 0 < netdev_mtu < 1 << 20:
        detail = f"the MTU of {port.netdev or 'its interface'} cannot be read"
        return TOPIC.unknown("mtu", port.name, detail), said.active_mtu if said else 0
    size = payload_bytes(netdev_mtu)
    detail = f"{netdev_mtu} bytes on {port.netdev}: payload of {size}"
    if said is not None and said.active_mtu != min(size, said.max_mtu):
        detail += f", but libibverbs says {said.active_mtu}"
        fix = f"ip link set dev {port.netdev} down && ip link set dev {port.netdev} up"
        return TOPIC.warning("mtu", port.name, detail, fix), said.active_mtu
    if size < min(_PAYLOADS[0], said.max_mtu if said else _PAYLOADS[0]):
        detail += ", should be 4096"
        fix = f"ip link set dev {port.netdev} mtu 9000 (the switch and all other hosts too)"
        return TOPIC.warning("mtu", port.name, detail, fix), size
    return TOPIC.ok("mtu", port.name, detail), size


def _said(port: Port, said: PortInfo) -> tuple[Finding, int]:
    detail = f"payload of {said.active_mtu} bytes"
    if said.active_mtu < said.max_mtu:
        fix = "in opensm's partitions.conf: Default=0x7fff, ipoib, mtu=5: ALL=full;"
        detail += f", the port can {said.max_mtu}"
        return TOPIC.warning("mtu", port.name, detail, fix), said.active_mtu
    return TOPIC.ok("mtu", port.name, detail), said.active_mtu


def _mismatches(active: Mapping[str, int], netdevs: Mapping[str, str | None]) -> Iterator[Finding]:
    largest = max(active.values(), default=0)
    if len(active) > 1 and min(active.values()) == largest:
        yield TOPIC.ok("mtu_mismatch", "all active ports", f"payload of {largest} bytes")
    for name, size in active.items():
        if size < largest:
            other = next(port for port in active if active[port] == largest)
            detail = f"payload of {size} bytes, where {other} has {largest}"
            netdev = netdevs[name]
            fix = f"ip link set dev {netdev} mtu 9000" if netdev else None
            yield TOPIC.warning("mtu_mismatch", name, detail, fix)
