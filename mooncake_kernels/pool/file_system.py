"""The file system that a file is on."""

import os

from .._machine_root import MachineRoot

THIS_MACHINE = MachineRoot()


def file_system_of(path: str, root: MachineRoot = THIS_MACHINE) -> str | None:
    """Return its type, as in ``mount``; None if the kernel's table of mounts does not tell.

    Args:
        path: of the file.
        root: of the table.
    """
    try:
        device = os.stat(path).st_dev
    except OSError:
        return None
    for line in (root.text("/proc/self/mountinfo") or "").splitlines():
        mount, _, source = line.partition(" - ")
        if mount.split()[2:3] == [f"{os.major(device)}:{os.minor(device)}"]:
            return source.split()[0] if source else None
    return None
