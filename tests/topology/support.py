"""The captured machines, and how to make the sysfs of one."""

import dataclasses
import tempfile
from pathlib import Path

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.topology import Nic, PciNode, System, Topology

MACHINES = Path(__file__).parent.parent / "machines"
NAMES = sorted(path.stem for path in MACHINES.glob("*.json"))
SHARED = Path(__file__).parents[3] / "shared/data/topology"  # next to a checkout, on some machines

NODE_TYPES = {
    "iWARP: its queue pairs connect by rdma_cm alone": "4: RNIC",
    "node type usNIC UDP: it has no RC queue pairs": "6: usNIC UDP",
    "node type unspecified: it has no RC queue pairs": "7: unspecified",
}


def machine(name: str) -> Topology:
    return Topology.from_json(MACHINES / f"{name}.json")


def shared(name: str) -> Path | None:
    """A cloud's own file, if it exists next to this checkout."""
    path = SHARED / name
    return path if path.is_file() else None


def names(nics) -> list[str]:
    return [nic.name for nic in nics]


def as_sysfs_tells(system: System) -> System:
    """Without NVLinks, which only NVML reports."""
    gpus = tuple(dataclasses.replace(gpu, nvlinks=()) for gpu in system.gpus)
    return dataclasses.replace(system, gpus=gpus)


def write(root: Path, name: str, text: str | int) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def link(root: Path, name: str, target: str) -> None:
    """Make a link as sysfs has them: relative, from one absolute name to another."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    up = "../" * name.count("/")
    path.symlink_to(up + target)


def write_sysfs(system: System, root: Path) -> Path:
    """Make the files under a root that the kernel would show for a machine; return the root."""
    (root / "sys/class/infiniband").mkdir(parents=True)
    for node in system.numa:
        write(root, f"sys/devices/system/node/node{node.id}/cpulist", node.cpus)
    folders = {node.address: _folder(system, node) for node in system.pci}
    gpus = {gpu.pci for gpu in system.gpus}
    for node in system.pci:
        _write_device(root, folders[node.address], node, "0x10de" if node.address in gpus else "")
        link(root, f"sys/bus/pci/devices/{node.address}", folders[node.address])
    for gpu in system.gpus:
        text = f"Model: \t\t {gpu.name}\nIRQ:   \t\t 90\nGPU UUID: \t {gpu.uuid}"
        write(root, f"proc/driver/nvidia/gpus/{gpu.pci}/information", text)
    routes = []
    for nic in system.nics:
        _write_nic(root, folders[nic.pci] if nic.pci else "sys/devices/virtual", nic)
        routes += nic.netdevs[:1] if nic.has_default_route else ()
    write_routes(root, routes)
    return root


def write_routes(root: Path, interfaces: list[str]) -> None:
    head = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT"
    lines = [
        f"{name}\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\t0\t0" for name in interfaces
    ]
    local = "eth9\t0000000A\t00000000\t0001\t0\t0\t100\t000000FF\t0\t0\t0"
    write(root, "proc/net/route", "\n".join([head, *lines, local]))


def _folder(system: System, node: PciNode) -> str:
    parents = {other.address: other for other in system.pci}
    parts = [node.address]
    while node.parent is not None:
        node = parents[node.parent]
        parts.insert(0, node.address)
    return "/".join(["sys/devices", node.host_bridge, *parts])


def _write_device(root: Path, folder: str, node: PciNode, vendor: str) -> None:
    write(root, f"{folder}/class", f"0x{node.pci_class:06x}")
    write(root, f"{folder}/vendor", vendor or "0x15b3")
    write(root, f"{folder}/numa_node", node.numa)
    write(root, f"{folder}/max_link_speed", f"{node.gt_per_s} GT/s PCIe")
    write(root, f"{folder}/current_link_speed", "2.5 GT/s PCIe")  # asleep
    write(root, f"{folder}/current_link_width", node.width)
    write(root, f"{folder}/max_link_width", node.width)


def _write_nic(root: Path, folder: str, nic: Nic) -> None:
    device = f"{folder}/infiniband/{nic.name}"
    base = f"{device}/ports/{nic.port}"
    if nic.unusable:
        write(root, f"{device}/node_type", NODE_TYPES[nic.unusable])
    if nic.is_vf:
        (root / f"{folder}/physfn").mkdir()
    states = {"ACTIVE": 4, "DOWN": 1, "INIT": 2}
    if nic.state:
        write(root, f"{base}/state", f"{states[nic.state]}: {nic.state}")
    if nic.gbit_per_s is not None:
        write(root, f"{base}/rate", f"{nic.gbit_per_s:g} Gb/sec (4X NDR)")
    if nic.link_layer:
        write(root, f"{base}/link_layer", nic.link_layer)
    if nic.has_gid is not None:
        zero = "0000:0000:0000:0000:0000:0000:0000:0000"
        write(root, f"{base}/gids/0", zero)
        write(root, f"{base}/gids/1", f"fe80{zero[4:]}" if nic.has_gid else zero)
    for netdev in nic.netdevs:
        if netdev.startswith("bond"):
            bond = f"sys/devices/virtual/net/{netdev}"
            (root / bond).mkdir(parents=True)
            link(root, f"sys/class/net/{netdev}", bond)
            slaves = [other for other in nic.netdevs if other != netdev]
            write(root, f"{bond}/bonding/slaves", " ".join(slaves))
            for slave in slaves:
                link(root, f"{folder}/net/{slave}/master", bond)
        else:
            (root / f"{folder}/net/{netdev}").mkdir(parents=True, exist_ok=True)
            link(root, f"sys/class/net/{netdev}", f"{folder}/net/{netdev}")
    link(root, f"{device}/device", folder)
    link(root, f"sys/class/infiniband/{nic.name}", device)


def check_or_refused(read):
    """Whatever can be read can also be used, written, and read again."""
    try:
        topology = read()
    except InvalidArgument:
        return
    for location in topology.locations:
        assert set(topology.choose_nics(location)) <= set(topology.nics)
        assert len(topology.explain(location).splitlines()) == max(1, len(topology.nics))
    for text in (topology.to_mooncake_json(), topology.matrix(), topology.tree()):
        assert text.endswith("\n")
    topology.to_svg()
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
        file.write(topology.to_json())
        file.flush()
        assert Topology.from_json(file.name) == topology
