"""The packages that the commands of fixes come from: a bare machine has few of them."""

import os
import re
import shutil
from collections.abc import Mapping

PACKAGES = {  # command: Debian's package, Fedora's
    "ethtool": ("ethtool", "ethtool"),
    "ibportstate": ("infiniband-diags", "infiniband-diags"),
    "ibv_devinfo": ("ibverbs-utils", "libibverbs-utils"),
    "ip": ("iproute2", "iproute"),
    "modprobe": ("kmod", "kmod"),
    "rdma": ("iproute2", "iproute"),
    "setpci": ("pciutils", "pciutils"),
    "sysctl": ("procps", "procps-ng"),
    "udevadm": ("udev", "systemd-udev"),
}
_FOLDERS = "/usr/local/sbin:/usr/sbin:/sbin"  # of commands of root, which others have not on PATH


def missing_commands() -> dict[str, str]:
    """Return the commands that this machine lacks, and how to install each."""
    path = f"{os.environ.get('PATH', os.defpath)}:{_FOLDERS}"
    return {
        command: f"{command}: apt install {debian}, or dnf install {fedora}"
        for command, (debian, fedora) in PACKAGES.items()
        if shutil.which(command, path=path) is None
    }


def with_packages(fix: str, missing: Mapping[str, str]) -> str:
    """Add to a fix how to install those of its commands that are missing."""
    needed = [
        install
        for command, install in missing.items()
        if re.search(rf"(^|&& |[;:|(] ?){re.escape(command)} ", fix)
    ]
    return f"{fix} ({'; '.join(needed)})" if needed else fix
