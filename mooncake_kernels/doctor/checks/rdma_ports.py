"""Checks of RDMA devices and the state of their ports."""

import re
from collections.abc import Collection, Iterator

from ..._machine_root import MachineRoot
from .. import pci, ports
from ..finding import Finding, State, Topic
from ..ports import Port

TOPIC = Topic(
    "ports",
    {
        "devices": "without an RDMA device only shared memory and TCP are used",
        "port": "a port that is not ACTIVE moves nothing",
        "netdev": "without its interface in this namespace a RoCE port's addresses are unusable",
        "rate": "a slow port among fast ones is often for management: used for KV it is the brake",
    },
)
_MODULES = {"mlx5_core": "modprobe mlx5_ib", "mlx4_core": "modprobe mlx4_ib"}


def check(root: MachineRoot, all_ports: list[Port]) -> Iterator[Finding]:
    """Check devices, and each of their ports."""
    names, left_out = ports.devices(root), ports.left_out(root)
    for name, reason in left_out.items():
        yield TOPIC.info("devices", name, f"left out: {reason}")
    if not names:
        yield from _no_device(root, left_out)
        return
    yield TOPIC.ok("devices", "RDMA", ", ".join(names))
    if not all_ports:
        yield TOPIC.unknown("devices", "RDMA", f"no device of {ports.CLASS} shows its ports")
    is_any_active = any(port.is_active for port in all_ports)
    for port in all_ports:
        yield _state(root, port, is_any_active)
        if port.is_active and port.is_roce:
            yield _netdev(root, port)
    yield from _rates([port for port in all_ports if port.is_active])


def _no_device(root: MachineRoot, left_out: Collection[str]) -> Iterator[Finding]:
    known = {ports.address_of(root, name) for name in left_out}
    nics = [nic for nic in pci.mellanox_nics(root) if nic not in known]
    for nic in nics:
        driver = pci.driver_of(root, nic)
        if driver and driver.startswith("vfio"):
            yield TOPIC.info("devices", nic, f"bound to {driver}: handed to a virtual machine")
            continue
        detail = f"a NIC of NVIDIA (driver: {driver or 'none'}), but not in {ports.CLASS}"
        fix = _MODULES.get(driver or "", "modprobe mlx5_core && modprobe mlx5_ib")
        yield TOPIC.problem("devices", nic, detail, fix)
    if not nics:
        kind = "usable RDMA device" if left_out else "RDMA device"
        yield TOPIC.info("devices", "RDMA", f"no {kind}: host transports only")


def _state(root: MachineRoot, port: Port, is_any_active: bool) -> Finding:
    if port.state is None:
        return TOPIC.unknown("port", port.name, "its state cannot be read")
    if port.is_active:
        detail = f"ACTIVE, {port.link_layer or 'unknown link'}, {port.rate or 'unknown rate'}"
        return TOPIC.ok("port", port.name, detail)
    state = State.WARNING if is_any_active else State.PROBLEM
    detail = (
        f"{port.state or 'no state'}, physically {port.phys_state or 'unknown'}, must be ACTIVE"
    )
    return TOPIC.found("port", port.name, state, detail, _bring_up(root, port))


def _bring_up(root: MachineRoot, port: Port) -> str:
    show = f"rdma link show {port.device}/{port.number}"
    if not port.is_roce:
        if port.state == "INIT":  # the link is up, but has no address
            return (
                "apt or dnf install opensm && systemctl start opensm (on one machine of the fabric,"
                " if no switch runs it)"
            )
        return f"check cable and switch: {show}; ibportstate -D 0 {port.number}"
    if port.netdev is None:
        return f"check cable and switch: {show}"
    flags = root.integer(f"/sys/class/net/{port.netdev}/flags")
    if flags is not None and not flags & 1:  # IFF_UP
        return f"ip link set dev {port.netdev} up"
    return f"check cable and switch: {show}; ethtool {port.netdev}"


def _netdev(root: MachineRoot, port: Port) -> Finding:
    name = port.netdev
    if name is None or root.resolve(f"/sys/class/net/{name}") is None:
        detail = f"its network interface{f' {name}' if name else ''} is not in this namespace"
        fix = "docker run --network host (a pod: hostNetwork: true)"
        return TOPIC.warning("netdev", port.name, detail, fix)
    state = root.text(f"/sys/class/net/{name}/operstate")
    if state in ("down", "lowerlayerdown"):
        fix = f"ip link set dev {name} up"
        return TOPIC.problem("netdev", port.name, f"{name} is {state}, must be up", fix)
    if state is None:
        return TOPIC.unknown("netdev", port.name, f"the state of {name} cannot be read")
    return TOPIC.ok("netdev", port.name, f"{name} is {state}")


def _gbps(port: Port) -> float | None:
    found = re.match(r"([0-9]{1,6}(\.[0-9]{1,3})?) Gb/sec", port.rate or "")
    return float(found.group(1)) if found else None


def _rates(active: list[Port]) -> Iterator[Finding]:
    rates = {port.name: rate for port in active if (rate := _gbps(port)) is not None}
    fastest = max(rates.values(), default=0)
    for name, rate in rates.items():
        if rate < fastest:
            detail = f"{rate:g} Gb/s, where the fastest port has {fastest:g}"
            device = name.split()[0]
            yield TOPIC.info("rate", name, detail, f"leave {device} out, if it is for management")
