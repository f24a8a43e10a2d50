"""Checks of the files that libibverbs opens."""

import os
from collections.abc import Iterator, Mapping

from ..._machine_root import MachineRoot
from .. import ports, process
from ..finding import Finding, Topic

TOPIC = Topic(
    "permissions",
    {
        "uverbs": "libibverbs opens it to read and write: without it the device is not usable",
        "rdma_cm": "connections by rdma_cm need it; this package makes its own",
    },
)
_FOLDER = "/dev/infiniband"
_VERBS = "/sys/class/infiniband_verbs"


def check(root: MachineRoot, open_errors: Mapping[str, str]) -> Iterator[Finding]:
    """Check the file of each of the kernel's devices."""
    names = [name for name in root.names(_VERBS) if name.startswith("uverbs")]
    unusable = ports.left_out(root)
    for name in names:
        device = root.text(f"{_VERBS}/{name}/ibdev") or name
        if device in unusable:
            continue
        subject = f"{_FOLDER}/{name} ({device})"
        if root.resolve(f"{_FOLDER}/{name}") is None:
            yield _missing(root, subject)
        elif name in open_errors:
            yield _opened(root, name, subject, open_errors[name])
        else:
            yield _by_mode(root, name, subject)
    if not names and ports.devices(root):
        detail = f"{_VERBS} is missing: the kernel offers no verbs"
        yield TOPIC.problem("uverbs", _FOLDER, detail, "modprobe ib_uverbs")
    if names and root.resolve(f"{_FOLDER}/rdma_cm") is None:
        yield TOPIC.info("rdma_cm", f"{_FOLDER}/rdma_cm", "missing", "modprobe rdma_ucm")


def _missing(root: MachineRoot, subject: str) -> Finding:
    if process.in_container(root):
        detail = "missing: the container was started without it"
        return TOPIC.problem("uverbs", subject, detail, process.DOCKER_RDMA)
    fix = "modprobe ib_uverbs && udevadm trigger --subsystem-match=infiniband_verbs"
    return TOPIC.problem("uverbs", subject, "missing", fix)


def _opened(root: MachineRoot, name: str, subject: str, error: str) -> Finding:
    if not error:
        return TOPIC.ok("uverbs", subject, "opens")
    fix = process.DOCKER_RDMA if process.in_container(root) else _chmod(name)
    return TOPIC.problem("uverbs", subject, f"cannot be opened: {error}", fix)


def _chmod(name: str) -> str:
    rule = 'SUBSYSTEM=="infiniband_verbs", MODE="0666"'
    return f"chmod 666 {_FOLDER}/{name} (for good: {rule} in /etc/udev/rules.d/99-rdma.rules)"


def _by_mode(root: MachineRoot, name: str, subject: str) -> Finding:
    """Judge by owner and mode, if opening shows nothing: for a captured machine."""
    uid, gid = process.ids(root, "Uid"), process.ids(root, "Gid")
    if len(uid) < 2 or len(gid) < 2:
        return TOPIC.unknown("uverbs", subject, "/proc/self/status does not tell the user")
    if process.has_capability(root, process.CAP_DAC_OVERRIDE):
        return TOPIC.ok("uverbs", subject, "this process may open any file")
    try:
        status = os.stat(root.path(root.resolve(f"{_FOLDER}/{name}") or ""))
    except OSError as error:
        return TOPIC.unknown("uverbs", subject, error.strerror or str(error))
    groups = {gid[1], *process.ids(root, "Groups")}
    shift = 6 if status.st_uid == uid[1] else 3 if status.st_gid in groups else 0
    mode = f"mode {status.st_mode & 0o777:o}, owner {status.st_uid}:{status.st_gid}"
    if status.st_mode >> shift & 6 == 6:
        return TOPIC.ok("uverbs", subject, f"{mode}: user {uid[1]} may read and write")
    detail = f"{mode}: user {uid[1]} must be able to read and write"
    fix = process.DOCKER_RDMA if process.in_container(root) else _chmod(name)
    return TOPIC.problem("uverbs", subject, detail, fix)
