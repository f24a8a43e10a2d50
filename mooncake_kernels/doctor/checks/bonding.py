"""Checks of bonds beneath RDMA devices."""

from collections.abc import Iterator

from ..._machine_root import MachineRoot
from ..finding import Finding, Topic
from ..ports import Port

TOPIC = Topic(
    "bonding",
    {
        "bond_mode": "RoCE over a bond takes active-backup, balance-xor and 802.3ad alone",
        "bond_slave": "a bond with a slave that is down has less bandwidth, and no spare",
    },
)
_MODES = ("active-backup", "balance-xor", "802.3ad")


def check(root: MachineRoot, all_ports: list[Port]) -> Iterator[Finding]:
    """Check each bond that an RDMA device's interface is, or is a slave of."""
    bonds: dict[str, list[str]] = {}
    for port in all_ports:
        bond = _bond_of(root, port.netdev) if port.netdev else None
        if bond:
            bonds.setdefault(bond, []).append(port.device)
    for bond, devices in bonds.items():
        yield _mode(root, bond, ", ".join(dict.fromkeys(devices)))
        for slave in _slaves(root, bond):
            yield _slave(root, bond, slave)


def _bond_of(root: MachineRoot, netdev: str) -> str | None:
    folder = f"/sys/class/net/{netdev}"
    if root.resolve(f"{folder}/bonding"):
        return netdev
    master = root.resolve(f"{folder}/master")
    return master.rsplit("/", 1)[-1] if master and root.resolve(f"{master}/bonding") else None


def _mode(root: MachineRoot, bond: str, devices: str) -> Finding:
    words = (root.text(f"/sys/class/net/{bond}/bonding/mode") or "").split()
    if not words:
        return TOPIC.unknown("bond_mode", bond, "its mode cannot be read")
    if words[0] in _MODES:
        detail = f"{words[0]} over {devices}; one queue pair uses one of its links"
        return TOPIC.ok("bond_mode", bond, detail)
    detail = f"{words[0]} over {devices}, must be one of {', '.join(_MODES)}"
    return TOPIC.problem("bond_mode", bond, detail, _change_mode(root, bond))


def _change_mode(root: MachineRoot, bond: str) -> str:
    """The mode can be set only while the bond is down and has no slaves."""
    slaves = _slaves(root, bond)
    steps = [f"{bond} down"]
    steps += [f"{slave} down nomaster" for slave in slaves]
    steps += [f"{bond} type bond mode 802.3ad"]
    steps += [f"{slave} master {bond}" for slave in slaves]
    steps += [f"{bond} up"]
    return " && ".join(f"ip link set dev {step}" for step in steps) + " (LACP on the switch too)"


def _slaves(root: MachineRoot, bond: str) -> list[str]:
    return (root.text(f"/sys/class/net/{bond}/bonding/slaves") or "").split()


def _slave(root: MachineRoot, bond: str, slave: str) -> Finding:
    subject = f"{slave} of {bond}"
    state = root.text(f"/sys/class/net/{slave}/bonding_slave/mii_status")
    if state is None:
        return TOPIC.unknown("bond_slave", subject, "its state cannot be read")
    if state == "up":
        return TOPIC.ok("bond_slave", subject, "up")
    fix = f"ip link set dev {slave} up"
    return TOPIC.warning("bond_slave", subject, f"{state}, must be up", fix)
