"""Checks of NUMA: nodes, where devices are, and pages moved by the kernel."""

from collections.abc import Iterator, Mapping

from ..._machine_root import MachineRoot
from .. import pci
from ..finding import Finding, Topic

TOPIC = Topic(
    "numa",
    {
        "nodes": "memory on the other node costs bandwidth: buffers and NIC should share one",
        "numa_balancing": "pages that the kernel samples and moves fault in the middle of a copy",
        "numa_node": "without a device's node, which memory and NIC are near is unknown",
    },
)
_NODES = "/sys/devices/system/node"


def check(root: MachineRoot, gpus: Mapping[str, str], nics: Mapping[str, str]) -> Iterator[Finding]:
    """Check the nodes; on a machine with one, nothing can be wrong."""
    nodes = [name[4:] for name in root.names(_NODES) if name[:4] == "node" and name[4:].isdigit()]
    if not nodes:
        yield TOPIC.unknown("nodes", "machine", f"{_NODES} cannot be read")
        return
    yield TOPIC.ok("nodes", "machine", f"{len(nodes)} NUMA node{'s' if len(nodes) > 1 else ''}")
    if len(nodes) == 1:
        return
    yield _balancing(root)
    for address, subject in {**gpus, **nics}.items():
        yield _node(root, address, subject)


def _balancing(root: MachineRoot) -> Finding:
    value = root.integer("/proc/sys/kernel/numa_balancing")
    if value is None:  # a kernel built without it
        return TOPIC.ok("numa_balancing", "kernel", "not in this kernel")
    if not value:
        return TOPIC.ok("numa_balancing", "kernel", "off")
    fix = "sysctl -w kernel.numa_balancing=0"
    return TOPIC.warning("numa_balancing", "kernel", f"{value}, should be 0", fix)


def _node(root: MachineRoot, address: str, subject: str) -> Finding:
    file = f"{pci.DEVICES}/{address}/numa_node"
    node = root.integer(file)
    if node is None:
        return TOPIC.unknown("numa_node", subject, f"{file} cannot be read")
    if node >= 0:
        return TOPIC.ok("numa_node", subject, f"node {node}")
    detail = "-1: the BIOS does not say on which node it is"
    return TOPIC.warning("numa_node", subject, detail, f"echo NODE > {file} (until reboot)")
