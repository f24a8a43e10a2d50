"""Checks of the limits of this process: locked memory, files, mappings, shared memory."""

import math
import re
from collections.abc import Collection, Iterator

from ..._machine_root import MachineRoot
from .. import ports, process
from ..finding import Finding, State, Topic
from ..process import human

TOPIC = Topic(
    "limits",
    {
        "memlock": "registered memory is locked: beyond the limit ibv_reg_mr fails with ENOMEM",
        "nofile": "each connection, device and shared segment takes a file: then come EMFILE",
        "address_space": "CUDA reserves addresses for all memory there is: cuInit fails under it",
        "max_map_count": "each mapping counts: a process with many segments gets ENOMEM",
        "shm": "segments and torch's workers share memory there: past its size a store is SIGBUS",
        "pids": "threads count too: past the limit none can be started (EAGAIN)",
    },
)
_MIN_FILES = 4096
_GOOD_FILES = 65536
_MIN_MAPS = 65530
_MIN_SHM_BYTES = 1 << 30
_MIN_PIDS = 4096
_THIS = "this process"


def check(root: MachineRoot, gpus: Collection[str]) -> Iterator[Finding]:
    """Check the limits, which are those of the shell that started the doctor."""
    yield _memlock(root)
    yield _nofile(root)
    yield _address_space(root, gpus)
    yield _max_map_count(root)
    yield _shm(root)
    yield _pids(root)


def _memlock(root: MachineRoot) -> Finding:
    limit = process.limit(root, "Max locked memory")
    if limit is None:
        return TOPIC.unknown("memlock", _THIS, "/proc/self/limits does not tell it")
    soft, hard = limit
    memory = process.memory_bytes(root)
    if soft == math.inf or (memory is not None and soft >= memory):
        return TOPIC.ok("memlock", _THIS, human(soft))
    if process.has_capability(root, process.CAP_IPC_LOCK):
        return TOPIC.ok("memlock", _THIS, f"{human(soft)}, but CAP_IPC_LOCK is above it")
    detail = f"{human(soft)} (hard limit {human(hard)}), must be unlimited"
    if not ports.devices(root):
        return TOPIC.info("memlock", _THIS, detail + " for RDMA")
    return TOPIC.problem("memlock", _THIS, detail, _memlock_fix(root, hard))


def _memlock_fix(root: MachineRoot, hard: float) -> str:
    if process.in_container(root):
        return f"{process.DOCKER_RDMA} (a pod: capabilities.add IPC_LOCK)"
    if hard == math.inf:
        return "ulimit -l unlimited"
    return _raise_hard(root, "memlock", "unlimited", "LimitMEMLOCK=infinity")


def _raise_hard(root: MachineRoot, item: str, value: str, setting: str) -> str:
    who = "root" if process.ids(root, "Uid")[1:2] == [0] else "*"  # * does not include root
    file = f"/etc/security/limits.d/99-{item}.conf"
    line = f"echo '{who} - {item} {value}' | sudo tee {file}"
    return f"{line}, and log in again (a service: {setting} under [Service])"


def _nofile(root: MachineRoot) -> Finding:
    limit = process.limit(root, "Max open files")
    if limit is None:
        return TOPIC.unknown("nofile", _THIS, "/proc/self/limits does not tell it")
    soft, hard = limit
    if soft >= _MIN_FILES:
        return TOPIC.ok("nofile", _THIS, f"{soft:.0f} files" if soft < math.inf else "unlimited")
    fix = f"ulimit -n {_GOOD_FILES}"
    if hard < _GOOD_FILES and process.in_container(root):
        fix = f"docker run --ulimit nofile={_GOOD_FILES}"
    elif hard < _GOOD_FILES:
        fix = _raise_hard(root, "nofile", f"{_GOOD_FILES}", f"LimitNOFILE={_GOOD_FILES}")
    return TOPIC.warning("nofile", _THIS, f"{soft:.0f} files, should be {_MIN_FILES} or more", fix)


def _address_space(root: MachineRoot, gpus: Collection[str]) -> Finding:
    limit = process.limit(root, "Max address space")
    if limit is None:
        return TOPIC.unknown("address_space", _THIS, "/proc/self/limits does not tell it")
    soft, hard = limit
    if soft == math.inf:
        return TOPIC.ok("address_space", _THIS, "unlimited")
    fix = "ulimit -v unlimited"
    if hard < math.inf:
        fix = _raise_hard(root, "as", "unlimited", "LimitAS=infinity")
    state = State.PROBLEM if gpus else State.WARNING
    detail = f"{human(soft)} (hard limit {human(hard)}), must be unlimited"
    return TOPIC.found("address_space", _THIS, state, detail, fix)


def _max_map_count(root: MachineRoot) -> Finding:
    count = root.integer("/proc/sys/vm/max_map_count")
    if count is None:
        return TOPIC.unknown("max_map_count", "kernel", "vm.max_map_count cannot be read")
    if count >= _MIN_MAPS:
        return TOPIC.ok("max_map_count", "kernel", f"{count}")
    fix = "sysctl -w vm.max_map_count=262144"
    detail = f"{count}, should be {_MIN_MAPS} or more"
    return TOPIC.warning("max_map_count", "kernel", detail, fix)


def _shm(root: MachineRoot) -> Finding:
    if root.text("/proc/self/mounts") is None:
        return TOPIC.unknown("shm", "/dev/shm", "/proc/self/mounts cannot be read")
    mount = process.mounted(root, "/dev/shm")
    if mount is None:
        fix = "mount -t tmpfs -o size=50% tmpfs /dev/shm"
        return TOPIC.warning("shm", "/dev/shm", "nothing is mounted there, must be a tmpfs", fix)
    found = re.search(r"(?:^|,)size=([0-9]{1,15})([kmg]?)", mount[1])
    if found:
        size = int(found[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[found[2]]
    else:  # tmpfs defaults to half of the memory
        size = (process.memory_bytes(root) or 0) // 2
    if not size:
        return TOPIC.unknown("shm", "/dev/shm", "its size cannot be read")
    if size >= _MIN_SHM_BYTES:
        return TOPIC.ok("shm", "/dev/shm", human(size))
    fix = "docker run --shm-size 16g"
    if not process.in_container(root):
        fix = "mount -o remount,size=16G /dev/shm"
    return TOPIC.warning("shm", "/dev/shm", f"{human(size)}, should be 1 GiB or more", fix)


def _pids(root: MachineRoot) -> Finding:
    groups = root.text("/proc/self/cgroup")
    if groups is None:
        return TOPIC.unknown("pids", "cgroup", "/proc/self/cgroup cannot be read")
    for line in groups.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers not in ("", "pids"):
            continue
        while True:  # a limit holds for all groups below
            limit = root.integer(f"/sys/fs/cgroup/{controllers}{path}/pids.max")
            if limit is not None and limit < _MIN_PIDS:
                return _few_pids(root, path, limit)
            if not path.strip("/"):
                break
            path = path.rpartition("/")[0]
    return TOPIC.ok("pids", "cgroup", f"no limit below {_MIN_PIDS}")


def _few_pids(root: MachineRoot, path: str, limit: int) -> Finding:
    fix = "docker run --pids-limit -1"
    if not process.in_container(root):
        fix = f"systemctl set-property {path.rpartition('/')[2] or 'UNIT'} TasksMax=infinity"
    detail = f"{limit} in {path or '/'}, should be {_MIN_PIDS} or more"
    return TOPIC.warning("pids", "cgroup", detail, fix)
