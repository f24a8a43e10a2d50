"""Names of hosts and pools that all processes of a machine agree upon, and others do not have."""

import os
import socket
from pathlib import Path


def boot_id() -> str:
    """What Linux calls this boot of the machine, also in containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def host_name() -> str:
    """The machine: two of them may have one host name."""
    return f"{socket.gethostname()}-{boot_id()[:8]}"


def pool_name(path: str) -> str:
    """The pool in a file, whatever the path to it is."""
    file = os.stat(path)
    return f"{boot_id()}-{file.st_dev:x}-{file.st_ino:x}"
