"""Limits of the process, its open files, and the kernel's memory."""

import pytest

from mooncake_kernels.doctor import Here, State

from .machine import LIMITS, MEMINFO, Disk

SMALL = LIMITS.replace("memory         unlimited            unlimited", "memory 8388608 8388608")
SOFT = LIMITS.replace("memory         unlimited            unlimited", "memory 8388608 unlimited")
DOCKER = (
    "overlay / overlay rw,lowerdir=/var/lib/docker/x 0 0\n"
    "tmpfs /dev/shm tmpfs rw,size=528379904k 0 0\n"
)
ROOT = "Uid: 0 0 0 0\nGid: 0 0 0 0\nGroups:\nCapEff: 00000000a80425fb\n"  # no IPC_LOCK
THP = "/sys/kernel/mm/transparent_hugepage"


@pytest.mark.parametrize(
    "changes, check, state, detail, fix",
    [
        ({"/proc/self/limits": SOFT}, "memlock", State.PROBLEM,
         "8 MiB (hard limit unlimited), must be unlimited", "ulimit -l unlimited"),
        ({"/proc/self/limits": SMALL}, "memlock", State.PROBLEM, "8 MiB (hard limit 8 MiB)",
         "echo '* - memlock unlimited' | sudo tee /etc/security/limits.d/99-memlock.conf"),
        ({"/proc/self/limits": SMALL, "/proc/self/status": ROOT}, "memlock", State.PROBLEM,
         "8 MiB", "LimitMEMLOCK=infinity"),
        ({"/proc/self/limits": SMALL, "/proc/self/status": ROOT}, "memlock", State.PROBLEM,
         "8 MiB", "echo 'root - memlock unlimited'"),
        ({"/proc/self/limits": SMALL, "/proc/self/mounts": DOCKER}, "memlock", State.PROBLEM,
         "8 MiB", "--cap-add IPC_LOCK --ulimit memlock=-1"),
        ({"/proc/self/limits": LIMITS.replace("65536   ", "1024    ")}, "nofile", State.WARNING,
         "1024 files, should be 4096", "ulimit -n 65536"),
        ({"/proc/self/limits": LIMITS.replace("65536   ", "1024    ").replace("1048576", "4000")},
         "nofile", State.WARNING, "1024 files", "/etc/security/limits.d/99-nofile.conf"),
        ({"/proc/self/limits": LIMITS.replace("space         unlimited ", "space 1073741824 ")},
         "address_space", State.PROBLEM, "1 GiB (hard limit unlimited), must be unlimited",
         "ulimit -v unlimited"),
        ({"/proc/self/limits": LIMITS.replace("space         unlimited            unlimited ",
          "space 1073741824 1073741824 ")}, "address_space", State.PROBLEM,
         "1 GiB (hard limit 1 GiB)",
         "echo '* - as unlimited' | sudo tee /etc/security/limits.d/99-as.conf"),
        ({"/proc/sys/vm/max_map_count": "4096\n"}, "max_map_count", State.WARNING, "4096, should",
         "sysctl -w vm.max_map_count=262144"),
        ({"/proc/self/mounts": "tmpfs /dev/shm tmpfs rw,size=65536k 0 0\n"}, "shm", State.WARNING,
         "64 MiB, should be 1 GiB", "mount -o remount,size=16G /dev/shm"),
        ({"/proc/self/mounts": "shm /dev/shm tmpfs rw,size=65536k 0 0\n", "/.dockerenv": ""},
         "shm", State.WARNING, "64 MiB", "docker run --shm-size 16g"),
        ({"/proc/self/mounts": "/dev/sda1 / ext4 rw 0 0\n"}, "shm", State.WARNING, "nothing",
         "mount -t tmpfs"),
        ({"/sys/fs/cgroup/user.slice/pids.max": "512\n"}, "pids", State.WARNING,
         "512 in /user.slice", "systemctl set-property user.slice TasksMax=infinity"),
        ({"/proc/self/cgroup": "0::/user.slice/user-1000.slice/session-2.scope\n",
          "/sys/fs/cgroup/user.slice/user-1000.slice/session-2.scope/pids.max": "max\n",
          "/sys/fs/cgroup/user.slice/user-1000.slice/pids.max": "512\n"}, "pids", State.WARNING,
         "512 in /user.slice/user-1000.slice", "set-property user-1000.slice TasksMax=infinity"),
        ({"/proc/self/cgroup": "0::/a/b\n", "/.dockerenv": "", "/sys/fs/cgroup/pids.max": "9\n"},
         "pids", State.WARNING, "9 in /, should", "docker run --pids-limit -1"),
        ({"/proc/self/cgroup": "4:pids:/docker/1f\n", "/.dockerenv": "",
          "/sys/fs/cgroup/pids/docker/1f/pids.max": "100\n"}, "pids", State.WARNING,
         "100 in /docker/1f", "docker run --pids-limit -1"),
        ({"/proc/sys/vm/overcommit_memory": "2\n"}, "overcommit", State.WARNING, "2 (strict)",
         "sysctl -w vm.overcommit_memory=0"),
    ],
)  # fmt: skip
def test_each_exceeded_limit_is_reported(machine, changes, check, state, detail, fix):
    machine.files |= changes
    (finding,) = machine.bad()
    assert (finding.check, finding.state) == (check, state)
    assert detail in finding.detail
    assert fix in finding.fix


@pytest.mark.parametrize(
    "changes, check, detail",
    [
        ({"/proc/self/limits": SMALL.replace("8388608", str(1 << 41))}, "memlock", "2 TiB"),
        ({"/proc/self/limits": SMALL,
          "/proc/self/status": "CapEff:\t000001ffffffffff\n"}, "memlock", "CAP_IPC_LOCK"),
        ({"/proc/self/mounts": "tmpfs /dev/shm tmpfs rw 0 0\n"}, "shm", "503.9 GiB"),
        ({"/proc/self/mounts": "tmpfs /dev/shm tmpfs rw,size=2g 0 0\n"}, "shm", "2 GiB"),
    ],
)  # fmt: skip
def test_sufficient_limits_are_ok(machine, changes, check, detail):
    machine.files |= changes
    (finding,) = machine.findings(check)
    assert finding.state is State.OK and detail in finding.detail


def test_unreadable_limit_is_unknown(machine):
    machine.remove("/proc/self")
    found = {finding.check: finding.state for finding in machine.findings("limits")}
    unread = {"memlock", "nofile", "address_space", "shm", "pids"}
    assert {check for check, state in found.items() if state is State.UNKNOWN} == unread


def test_user_namespace_capability_does_not_lift_memlock(machine):
    machine.files |= {
        "/proc/self/limits": SMALL,
        "/proc/self/status": "CapEff:\t000001ffffffffff\n",
        "/proc/self/uid_map": "0 1000 1\n",
    }
    assert [finding.check for finding in machine.bad()] == ["memlock"]


def test_memlock_limit_is_only_info_without_rdma(machine):
    machine.files["/proc/self/limits"] = SMALL
    machine.remove("/sys/class/infiniband")
    (finding,) = machine.findings("memlock")
    assert finding.state is State.INFO


@pytest.mark.parametrize("in_container", [False, True])
def test_missing_device_file_is_a_problem(machine, in_container):
    machine.remove("/dev/infiniband/uverbs3")
    if in_container:
        machine.files["/run/.containerenv"] = ""
    (finding,) = machine.bad()
    assert finding.state is State.PROBLEM
    assert finding.subject == "/dev/infiniband/uverbs3 (mlx5_3)"
    wanted = "docker run --device /dev/infiniband" if in_container else "modprobe ib_uverbs"
    assert finding.fix.startswith(wanted)


def test_unopenable_device_file_is_a_problem(machine):
    errors = machine.here.open_errors | {"uverbs3": "Operation not permitted"}
    machine.here = Here(open_errors=errors)
    (finding,) = machine.bad()
    assert finding.detail == "cannot be opened: Operation not permitted"
    assert finding.fix.startswith("chmod 666 /dev/infiniband/uverbs3")


def test_missing_uverbs_module_is_a_problem(machine):
    machine.remove("/sys/class/infiniband_verbs")
    (finding,) = machine.bad()
    assert finding.check == "uverbs" and finding.fix == "modprobe ib_uverbs"


def test_missing_rdma_cm_is_only_info(machine):
    machine.remove("/dev/infiniband/rdma_cm")
    (finding,) = machine.findings("rdma_cm")
    assert finding.state is State.INFO and finding.fix == "modprobe rdma_ucm"


@pytest.mark.parametrize(
    "mode, groups, state",
    [(0o666, "7", State.OK), (0o660, "7", State.PROBLEM), (0o660, "GROUP", State.OK),
     (0o606, "GROUP", State.PROBLEM), (0o644, "7", State.PROBLEM)],
)  # fmt: skip
def test_device_file_mode_is_checked_on_a_captured_machine(machine, tmp_path, mode, groups, state):
    machine.here, machine.disk = Here(), Disk(tmp_path)  # it is changed by hand
    root = machine.root()
    file = root.path("/dev/infiniband/uverbs3")
    owner = file.stat()
    file.chmod(mode)
    status = f"Uid: 0 {owner.st_uid + 1}\nGid: 0 {owner.st_gid + 1}\nGroups: {groups}\n"
    text = status.replace("GROUP", str(owner.st_gid)) + "CapEff: 0\n"
    root.path("/proc/self/status").write_text(text)
    from mooncake_kernels.doctor import examine

    (finding,) = [
        f for f in examine(root, machine.here, frozenset(["uverbs"])) if "uverbs3" in f.subject
    ]
    assert finding.state is state
    assert f"mode {mode:o}, owner {owner.st_uid}:{owner.st_gid}" in finding.detail


@pytest.mark.parametrize(
    "name, content, check, fix",
    [
        ("/proc/meminfo", MEMINFO.replace("1024", "0"), "huge_pages", "sysctl -w vm.nr_hugepages"),
        (f"{THP}/enabled", "always madvise [never]", "thp", f"echo madvise > {THP}/enabled"),
        (f"{THP}/shmem_enabled", "always advise [deny]", "thp_shmem", f"> {THP}/shmem_enabled"),
    ],
)
def test_suboptimal_memory_settings_are_info(machine, name, content, check, fix):
    machine.files[name] = content
    (finding,) = machine.findings(check)
    assert finding.state is State.INFO and fix in finding.fix


@pytest.mark.parametrize(
    "changes, fix",
    [
        ({"/proc/1/cgroup": "0::/kubepods.slice/pod1\n"}, "docker run"),
        ({"/var/run/secrets/kubernetes.io/token": ""}, "docker run"),
        ({"/proc/self/mounts": "root / overlay rw,lowerdir=/rofs,upperdir=/cow 0 0\n"}, "echo"),
    ],
)
def test_container_runtime_is_detected(machine, changes, fix):
    machine.files |= changes | {"/proc/self/limits": SMALL}
    (finding,) = machine.findings("memlock")
    assert finding.fix.startswith(fix)
