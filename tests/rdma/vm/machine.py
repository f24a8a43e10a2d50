"""qemu's command line: the guest's processors, memory, PCIe tree, shares and ports."""

import argparse
from pathlib import Path

APPEND = (
    "console=ttyS0 quiet panic=-1 oops=panic mitigations=off apparmor=0 nokaslr"
    " random.trust_cpu=on no_timer_check tsc=reliable cryptomgr.notests"
)


def mac(nic: int) -> str:
    """Return the address by which the guest identifies a NIC."""
    return f"52:54:00:77:00:{nic:02x}"


def command_line(options: argparse.Namespace, kernel: Path, control: Path, outputs: dict) -> list:
    """Return the arguments that start the guest.

    Args:
        options: those of in_guest.
        kernel: the folder of the kernel.
        control: the folder through which runner and guest talk; it holds initrd and console.
        outputs: name of a virtio port to the file descriptor that takes its output.
    """
    return [
        "qemu-system-x86_64",
        *("-accel", "tcg,thread=multi,tb-size=512"),
        # TCG runs "rep movsb" a byte at a time: without ERMS bulk copies are twice as fast.
        *("-cpu", "max,-erms"),
        *("-machine", "q35,smbus=off,sata=off,usb=off", "-nodefaults", "-no-user-config"),
        *("-smp", str(options.smp), "-m", str(options.mem), "-display", "none", "-no-reboot"),
        *("-kernel", str(kernel / "vmlinux"), "-initrd", str(control / "initrd")),
        *("-append", APPEND, "-serial", f"file:{control / 'console'}"),
        *(nodes(options) if options.numa else ()),
        *devices(options),
        *shares(options, control),
        *("-device", "virtio-serial-pci,bus=pcie.0"),
        *ports(outputs),
        *options.qemu,
    ]


def nodes(options: argparse.Namespace) -> list[str]:
    """Two NUMA nodes, each with half of the processors and memory and a PCIe host bridge."""
    words = []
    half = options.smp // 2
    for node, cpus in enumerate((f"0-{half - 1}", f"{half}-{options.smp - 1}")):
        words += ["-object", f"memory-backend-ram,id=mem{node},size={options.mem // 2}M"]
        words += ["-numa", f"node,nodeid={node},cpus={cpus},memdev=mem{node}"]
        bridge = f"id=pxb{node},bus=pcie.0,bus_nr={64 + 64 * node},numa_node={node}"
        words += ["-device", f"pxb-pcie,{bridge}"]
    return words


def devices(options: argparse.Namespace) -> list[str]:
    """The NICs and the GPU, each behind a root port of its own or in a switch.

    The first NIC of each host bridge is in a switch, which the GPU shares: so there is a NIC on
    the GPU's switch, one on its host bridge and, with --numa, one on the other node.
    """
    nodes = [nic * 2 // options.nics if options.numa else 0 for nic in range(options.nics)]
    cards = [(f"nic{nic}", node, virtio_net(nic)) for nic, node in enumerate(nodes)]
    if options.gpu:  # all that topology sees of one: a display adapter with a BAR
        cards.append(("gpu", 0, ["-device", "bochs-display,bus=gpu,vgamem=64M"]))
    words, switches = [], set()
    for slot, (name, node, card) in enumerate(cards, start=1):
        bridge = f"pxb{node}" if options.numa else "pcie.0"
        port = f"id={name},chassis={slot},slot={slot}"
        if node in switches and name != "gpu":
            words += ["-device", f"pcie-root-port,bus={bridge},{port}", *card]
            continue
        if node not in switches:
            switches.add(node)
            words += ["-device", f"pcie-root-port,id=root{node},bus={bridge},chassis={100 + node}"]
            words += ["-device", f"x3130-upstream,id=switch{node},bus=root{node}"]
        words += ["-device", f"xio3130-downstream,bus=switch{node},{port}", *card]
    return words


def virtio_net(nic: int) -> list[str]:
    """A NIC. No frame leaves the guest, see wire.py: its backend is a dead end."""
    card = f"virtio-net-pci,netdev=net{nic},mac={mac(nic)},bus=nic{nic},romfile=,host_mtu=9000"
    speed = "speed=100000,duplex=full"  # what sysfs says; rxe complains of a NIC that has none
    return ["-netdev", f"hubport,id=net{nic},hubid=0", "-device", f"{card},{speed}"]


def shares(options: argparse.Namespace, control: Path) -> list[str]:
    """The host's files, read-only, the control folder and the folder of --rw, over 9p."""
    folders = {"root": Path("/"), "control": control}
    if options.rw:
        folders["rw"] = options.rw.resolve()
    words = []
    for tag, folder in folders.items():
        path = str(folder).replace(",", ",,")
        mode = ",readonly=on" if tag == "root" else ""
        words += ["-fsdev", f"local,id={tag},path={path},security_model=none,multidevs=remap{mode}"]
        words += ["-device", f"virtio-9p-pci,bus=pcie.0,fsdev={tag},mount_tag={tag}"]
    return words


def ports(outputs: dict[str, int]) -> list[str]:
    """A virtio port for each output, so that stdout and stderr stay separate and binary."""
    words = []
    for number, (name, descriptor) in enumerate(outputs.items()):
        words += ["-add-fd", f"fd={descriptor},set={number}"]
        words += ["-chardev", f"file,id={name},path=/dev/fdset/{number},append=on"]
        words += ["-device", f"virtserialport,chardev={name},name={name}"]
    return words
