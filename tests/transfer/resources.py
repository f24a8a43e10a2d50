"""What a process holds: descriptors, threads, mappings, memory; to see that it does not grow."""

import os
from dataclasses import dataclass
from pathlib import Path

from .support import eventually

SELF = Path("/proc/self")


@dataclass(frozen=True)
class Held:
    """What this process holds now."""

    num_descriptors: int
    num_threads: int
    num_mappings: int
    resident_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.num_descriptors} descriptors, {self.num_threads} threads, "
            f"{self.num_mappings} mappings, {self.resident_bytes / 1e6:.1f} MB"
        )


def held() -> Held:
    resident_pages = int((SELF / "statm").read_text().split()[1])
    return Held(
        len(os.listdir(SELF / "fd")),
        len(os.listdir(SELF / "task")),
        len((SELF / "maps").read_text().splitlines()),
        resident_pages * os.sysconf("SC_PAGE_SIZE"),
    )


def settled(before: Held) -> bool:
    """Whether there are no more descriptors and threads than before, once ending ones are gone."""
    return eventually(
        lambda: (
            held().num_descriptors <= before.num_descriptors
            and held().num_threads <= before.num_threads
        )
    )


def assert_no_growth(before: Held, after: Held) -> None:
    """Mappings and memory may differ by what the allocator keeps for ended threads."""
    assert after.num_descriptors <= before.num_descriptors
    assert after.num_threads <= before.num_threads
    assert after.num_mappings <= before.num_mappings + 16
    assert after.resident_bytes <= before.resident_bytes + (16 << 20)
