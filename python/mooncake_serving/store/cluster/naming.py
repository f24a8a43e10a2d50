"""Names of hosts and pools that are the same in all processes of a machine, and unique to it."""

import os
import socket
from pathlib import Path


def boot_id() -> str:
    """Linux's id of this boot of the machine, the same in containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def host_name() -> str:
    """Name of the machine, unique even if two machines have the same host name."""
    return f"{socket.gethostname()}-{boot_id()[:8]}"


def pool_name(path: str) -> str:
    """Name of the pool in a file, whatever path leads to it."""
    file = os.stat(path)
    return f"{boot_id()}-{file.st_dev:x}-{file.st_ino:x}"
