"""Shared by the tests of payloads that are sent without a copy: whether they are."""

import ctypes
import os
import platform
import re
import resource
import sys

import pytest

from .files import has_io_uring, open_files

KERNEL = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
needs_lending = pytest.mark.skipif(
    KERNEL < (6, 2) or not has_io_uring(), reason="no io_uring that tells what it copies"
)


def lends(process: int | str = "self") -> bool:
    """Whether a connection of the process lends memory to the kernel."""
    return any("[io_uring]" in link for link in open_files(process))


def forbid_locked_memory() -> None:
    """Let nothing be locked in memory by what this process executes, nor by its children."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
    drop_from_bounding_set, ipc_lock = 24, 14  # without privileges it fails, and need not succeed
    ctypes.CDLL(None).prctl(drop_from_bounding_set, ipc_lock, 0, 0, 0)


if __name__ == "__main__":  # python -m tests.transfer.lent <command>: without locked memory
    forbid_locked_memory()
    os.execvp(sys.argv[1], sys.argv[1:])
