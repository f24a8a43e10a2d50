"""What files say about this process: its limits and rights, and whether it is in a container."""

import math
import re

from .._machine_root import MachineRoot

CAP_DAC_OVERRIDE = 1
CAP_IPC_LOCK = 14
DOCKER_RDMA = "docker run --device /dev/infiniband --cap-add IPC_LOCK --ulimit memlock=-1"


def limit(root: MachineRoot, name: str) -> tuple[float, float] | None:
    """Return a limit (soft, hard), infinite if there is none; None if it cannot be read."""
    found = re.search(rf"^{name} +(\w+) +(\w+)", root.text("/proc/self/limits") or "", re.M)
    if not found:
        return None
    soft, hard = (_number(word) for word in found.groups())
    return None if soft is None or hard is None else (soft, hard)


def _number(word: str) -> float | None:
    if word == "unlimited":
        return math.inf
    return int(word) if re.fullmatch("[0-9]{1,20}", word) else None


def status(root: MachineRoot, name: str) -> list[str]:
    """Return the words of one line of /proc/self/status."""
    found = re.search(rf"^{name}:(.*)", root.text("/proc/self/status") or "", re.M)
    return found.group(1).split() if found else []


def has_capability(root: MachineRoot, bit: int) -> bool:
    """Whether this process has the capability on the machine, not just in a user namespace."""
    words = status(root, "CapEff")
    users = (root.text("/proc/self/uid_map") or "0 0 4294967295").split()
    is_first_namespace = users == ["0", "0", "4294967295"]
    if not is_first_namespace or not words or not re.fullmatch("[0-9a-f]{1,16}", words[0]):
        return False
    return bool(int(words[0], 16) >> bit & 1)


def ids(root: MachineRoot, name: str) -> list[int]:
    """Return numbers of a line of /proc/self/status: "Uid" and "Gid" (the effective is [1])."""
    return [int(word) for word in status(root, name) if re.fullmatch("[0-9]{1,10}", word)]


def mounted(root: MachineRoot, folder: str) -> tuple[str, str] | None:
    """Return (file system, options) of the last mount at a folder; None if there is none."""
    for line in reversed((root.text("/proc/self/mounts") or "").splitlines()):
        fields = line.split()
        if len(fields) >= 4 and fields[1] == folder:
            return fields[2], fields[3]
    return None


def in_container(root: MachineRoot) -> bool:
    """Whether this looks like a container; the fix is then an option of its launcher."""
    marks = ("/.dockerenv", "/run/.containerenv", "/var/run/secrets/kubernetes.io")
    if any(root.resolve(mark) for mark in marks):
        return True
    _, layers = mounted(root, "/") or ("", "")  # an overlay's name where its layers are
    told = f"{root.text('/proc/1/cgroup')} {layers}"
    return bool(re.search("docker|kubepods|containers|containerd|libpod|lxc", told))


def memory_bytes(root: MachineRoot, name: str = "MemTotal") -> int | None:
    """Return a line of /proc/meminfo, given in kB, in bytes."""
    found = re.search(rf"^{name}: *([0-9]{{1,18}}) kB", root.text("/proc/meminfo") or "", re.M)
    return int(found.group(1)) * 1024 if found else None


def human(num_bytes: float) -> str:
    """Format a size: 8 MiB, 1.5 TiB, unlimited."""
    if num_bytes == math.inf:
        return "unlimited"
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"
