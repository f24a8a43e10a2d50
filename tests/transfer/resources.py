"""What a process holds: descriptors, threads, mappings, allocations; to see that it does not grow.

Not its resident memory, which depends on how many threads have run at the same moment: malloc keeps
an arena for each.
"""

import ctypes
import gc
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
    num_mappings: int  # of files, and of memory that is shared
    allocated_bytes: int  # by malloc, and not freed; 0 under a sanitizer

    def __str__(self) -> str:
        return (
            f"{self.num_descriptors} descriptors, {self.num_threads} threads, "
            f"{self.num_mappings} mappings, {self.allocated_bytes / 1e6:.1f} MB"
        )


class _Malloc(ctypes.Structure):
    """``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


_mallinfo = ctypes.CDLL(None).mallinfo2
_mallinfo.restype = _Malloc


def held() -> Held:
    gc.collect()
    used = _mallinfo()
    mappings = [line.split(maxsplit=5) for line in (SELF / "maps").read_text().splitlines()]
    return Held(
        len(os.listdir(SELF / "fd")),
        len(os.listdir(SELF / "task")),
        sum(fields[4] != "0" for fields in mappings),
        used.uordblks + used.hblkhd,
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
    """Allocations may differ by what a list of results, or a cache, takes."""
    assert after.num_descriptors <= before.num_descriptors
    assert after.num_threads <= before.num_threads
    assert after.num_mappings <= before.num_mappings
    assert after.allocated_bytes <= before.allocated_bytes + (1 << 20)
