"""Checks of the GPUs: their driver, and how much of their memory the PCI bus can address."""

import re
from collections.abc import Collection, Iterator, Mapping

from ..._machine_root import MachineRoot
from .. import pci
from ..finding import Finding, Topic
from ..process import human

TOPIC = Topic(
    "gpu",
    {
        "driver": "without the kernel's driver no program sees the GPU",
        "bar1": "a NIC reaches GPU memory through BAR1: registering more than fits fails",
    },
)
VERSION = "/proc/driver/nvidia/version"
_SMALL_BYTES = 4 << 30  # without resizable BAR it is 256 MiB, with it more than the memory
_MEMORY_FLAG = 0x200  # IORESOURCE_MEM


def driver_version(root: MachineRoot) -> str | None:
    """Return the version of the loaded driver; None if none is loaded."""
    found = re.search(r"NVRM version:.*?\s([0-9]+\.[0-9.]+)\s", (root.text(VERSION) or "") + "\n")
    return found.group(1) if found else None


def has_open_modules(root: MachineRoot) -> bool:
    """Whether the driver's kernel modules are the open ones."""
    return "Open Kernel Module" in (root.text(VERSION) or "")


def check(
    root: MachineRoot, gpus: Collection[str], memory_bytes: Mapping[str, int]
) -> Iterator[Finding]:
    """Check the driver and each GPU's BAR1."""
    version = driver_version(root)
    if version:
        kind = "open" if has_open_modules(root) else "proprietary"
        yield TOPIC.ok("driver", "NVIDIA driver", f"{version}, {kind} kernel modules")
    elif not gpus:
        yield TOPIC.info("driver", "GPU", "no NVIDIA GPU on the PCI bus: host memory only")
    for gpu in gpus:
        if not version:
            yield _without_driver(root, gpu)
        yield _bar1(root, gpu, memory_bytes.get(gpu))


def _without_driver(root: MachineRoot, gpu: str) -> Finding:
    bound = pci.driver_of(root, gpu)
    if bound and bound.startswith("vfio"):
        return TOPIC.info("driver", gpu, f"bound to {bound}: handed to a virtual machine")
    if root.text(VERSION) is not None:
        return TOPIC.unknown("driver", gpu, f"{VERSION} names no version")
    if bound == "nouveau":
        fix = "modprobe -r nouveau && modprobe nvidia"
        return TOPIC.problem("driver", gpu, "bound to nouveau, must be nvidia", fix)
    fix = "modprobe nvidia (not found: apt or dnf install nvidia-open, of NVIDIA's repository)"
    return TOPIC.problem("driver", gpu, f"{VERSION} is missing: no driver is loaded", fix)


def bar1_bytes(root: MachineRoot, gpu: str) -> int | None:
    """Return the size of the largest memory region: NVIDIA's BAR1, whatever its index."""
    sizes = []
    for line in (root.text(f"{pci.DEVICES}/{gpu}/resource") or "").splitlines()[:6]:
        if re.fullmatch("(0x[0-9a-f]{1,16} ?){3}", line):
            start, end, flags = (int(word, 16) for word in line.split())
            if flags & _MEMORY_FLAG and end > start:
                sizes.append(end - start + 1)
    return max(sizes, default=None)


def _bar1(root: MachineRoot, gpu: str, memory: int | None) -> Finding:
    size = bar1_bytes(root, gpu)
    if size is None:
        return TOPIC.unknown("bar1", gpu, f"{pci.DEVICES}/{gpu}/resource names no memory region")
    fix = (
        "switch on Above 4G Decoding and Resizable BAR in the BIOS,"
        f" then look: nvidia-smi -q -d MEMORY -i {gpu}"
    )
    if memory is not None and size < memory:
        detail = f"{human(size)} of BAR1, must be the GPU's {human(memory)}"
        return TOPIC.warning("bar1", gpu, detail, fix)
    if memory is None and size < _SMALL_BYTES:
        detail = f"{human(size)} of BAR1, should be all of the GPU's memory"
        return TOPIC.warning("bar1", gpu, detail, fix)
    known = "" if memory is None else f" for {human(memory)} of memory"
    return TOPIC.ok("bar1", gpu, f"{human(size)} of BAR1{known}")
