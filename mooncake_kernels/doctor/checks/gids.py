"""Checks of port addresses: GIDs and partition keys."""

from collections.abc import Iterator

from ..._machine_root import MachineRoot
from .. import ports
from ..finding import Finding, Topic
from ..ports import Port

TOPIC = Topic(
    "addresses",
    {
        "gid": "without a RoCE v2 GID of a routable address no connection gets to RTR",
        "pkey": "a limited member of a partition cannot talk to other limited members",
    },
)
_LIMITED = 0x7FFF


def check(root: MachineRoot, all_ports: list[Port]) -> Iterator[Finding]:
    """Check the addresses of active ports."""
    for port in all_ports:
        if not port.is_active:
            continue
        if port.is_roce:
            yield _roce(port)
        elif port.gids:
            yield TOPIC.ok("gid", port.name, f"index {port.gids[0].index}: {port.gids[0].address}")
        else:
            fix = f"rdma link show {port.device}/{port.number}"
            yield TOPIC.problem("gid", port.name, "no GID, must have one of its port", fix)
        if port.link_layer == "InfiniBand":
            yield from _pkey(root, port)


def _roce(port: Port) -> Finding:
    # An old kernel names no types: any entry may be version 2.
    usable = [gid for gid in port.gids if gid.type in ("RoCE v2", "")]
    routable = [gid for gid in usable if gid.kind in ("ipv4", "global")]
    best = next((gid for gid in routable if gid.kind == "ipv4"), next(iter(routable), None))
    if best is not None:
        kind = best.type or "of a type the kernel does not name"
        return TOPIC.ok("gid", port.name, f"index {best.index}: {best.address}, {kind}")
    name = port.netdev or f"INTERFACE (of {port.device})"
    add = f"ip addr add ADDRESS/PREFIX dev {name}"
    if not port.gids:
        return TOPIC.problem("gid", port.name, "no GID: its interface has no address", add)
    if not usable:
        fix = f"update the NIC's firmware and driver, then look: ibv_devinfo -v -d {port.device}"
        detail = f"{len(port.gids)} GIDs, none of them RoCE v2"
        return TOPIC.problem("gid", port.name, detail, fix)
    detail = (
        f"RoCE v2 only at the link-local {usable[0].address}, should have an IPv4 or global one"
    )
    return TOPIC.warning("gid", port.name, detail, add)


def _pkey(root: MachineRoot, port: Port) -> Iterator[Finding]:
    key = root.integer(f"{ports.CLASS}/{port.device}/ports/{port.number}/pkeys/0")
    if key is None:
        return
    if key == _LIMITED:
        fix = "in opensm's partitions.conf: Default=0x7fff, ipoib: ALL=full;"
        detail = f"partition key {key:#06x} is of a limited member, should be 0xffff"
        yield TOPIC.warning("pkey", port.name, detail, fix)
    else:
        yield TOPIC.ok("pkey", port.name, f"{key:#06x}")
