"""Checks of huge pages and overcommit."""

import re
from collections.abc import Iterator

from ..._machine_root import MachineRoot
from .. import process
from ..finding import Finding, Topic

TOPIC = Topic(
    "memory",
    {
        "huge_pages": "without reserved ones hugetlb segments cannot be made",
        "thp": "small pages make registration slow, and fill the NIC's translation tables",
        "thp_shmem": "shared segments then lie on small pages, with the same effect",
        "overcommit": "strict accounting refuses large pools that are reserved and not yet used",
    },
)
_THP = "/sys/kernel/mm/transparent_hugepage"


def check(root: MachineRoot) -> Iterator[Finding]:
    """Check how the kernel allocates memory."""
    yield _huge_pages(root)
    yield _thp(root, "thp", "enabled", "madvise")
    yield _thp(root, "thp_shmem", "shmem_enabled", "advise")
    mode = root.integer("/proc/sys/vm/overcommit_memory")
    if mode is None:
        yield TOPIC.unknown("overcommit", "kernel", "vm.overcommit_memory cannot be read")
    elif mode == 2:
        fix = "sysctl -w vm.overcommit_memory=0"
        yield TOPIC.warning("overcommit", "kernel", "2 (strict), should be 0 or 1", fix)
    else:
        yield TOPIC.ok("overcommit", "kernel", f"{mode}")


def _huge_pages(root: MachineRoot) -> Finding:
    text = root.text("/proc/meminfo") or ""
    counts = [re.search(rf"^HugePages_{name}: *([0-9]{{1,12}})$", text, re.M)
              for name in ("Total", "Free")]  # fmt: skip
    size = process.memory_bytes(root, "Hugepagesize")
    if not all(counts) or size is None:
        return TOPIC.unknown("huge_pages", "kernel", "/proc/meminfo does not tell them")
    total, free = (int(count[1]) for count in counts if count)
    detail = f"{free} of {total} free, {process.human(size)} each"
    if total:
        return TOPIC.ok("huge_pages", "kernel", detail)
    return TOPIC.info("huge_pages", "kernel", detail, "sysctl -w vm.nr_hugepages=NUMBER")


def _thp(root: MachineRoot, check: str, file: str, wanted: str) -> Finding:
    text = root.text(f"{_THP}/{file}") or ""
    chosen = re.search(r"\[([a-z_+]{1,20})\]", text)
    if not chosen:
        return TOPIC.unknown(check, "kernel", f"{_THP}/{file} cannot be read")
    if chosen[1] not in ("never", "deny"):
        return TOPIC.ok(check, "kernel", chosen[1])
    detail = f"{chosen[1]}, may be {wanted}"
    return TOPIC.info(check, "kernel", detail, f"echo {wanted} > {_THP}/{file}")
