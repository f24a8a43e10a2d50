"""Shared by the tests of the transport file: a file of hashed bytes, and page-aligned memory."""

import contextlib
import ctypes
import errno
import os
import sys
from pathlib import Path

import numpy as np

import mooncake_kernels as mk
from mooncake_kernels.transfer import Peer, Region, TransferEngine

from .support import addressed

IO_URING_SETUP = 425  # on every architecture
PAGE = 4096
ROOT = Path(__file__).parents[2]


def environment(**variables: str) -> dict[str, str]:
    """The environment of another Python, with the package under test, then these tests."""
    folders = [*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders), **variables}


def forbid_io_uring() -> None:
    """Let io_uring_setup fail with EPERM in this process and its children, as containers do."""
    load_number = (0x20, 0, 0, 0)
    rules = [load_number, (0x15, 0, 1, IO_URING_SETUP), (0x06, 0, 0, 0x50000 | errno.EPERM)]
    rules.append((0x06, 0, 0, 0x7FFF0000))  # all else is allowed

    class Rule(ctypes.Structure):
        _fields_ = [
            ("code", ctypes.c_uint16),
            ("jt", ctypes.c_uint8),
            ("jf", ctypes.c_uint8),
            ("k", ctypes.c_uint32),
        ]

    class Program(ctypes.Structure):
        _fields_ = [("count", ctypes.c_uint16), ("rules", ctypes.POINTER(Rule))]

    program = Program(len(rules), (Rule * len(rules))(*rules))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, seccomp, by_filter = 38, 22, 2
    assert libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    assert libc.prctl(seccomp, by_filter, ctypes.byref(program)) == 0, os.strerror(
        ctypes.get_errno()
    )


def has_io_uring() -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    ring = libc.syscall(IO_URING_SETUP, 1, ctypes.create_string_buffer(120))
    if ring >= 0:
        os.close(ring)
    return ring >= 0


def open_files(process: int | str = "self") -> list[str]:
    """The targets of a process's descriptors."""
    links = []
    for fd in os.listdir(f"/proc/{process}/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/{process}/fd/{fd}"))
    return links


def paged(num_bytes: int) -> np.ndarray:
    """Page-aligned memory, as transfers past the page cache need."""
    return mk.shared_memory(num_bytes).numpy()


class Pool:
    """An engine, a file, and memory of the same size."""

    def __init__(self, path: Path, num_bytes: int, **options):
        self.path = path
        path.write_bytes(addressed(num_bytes))
        self.engine = TransferEngine(**options)
        self.memory = paged(num_bytes)
        self.memory[:] = 0xEE
        self.region: Region = self.engine.register(self.memory)
        self.peer: Peer = self.engine.open(f"file:{path}")

    def rows(self, places: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """Descriptors of (offset in memory, offset in the file, bytes)."""
        return [(self.region.address + at, offset, size) for at, offset, size in places]

    def content(self) -> np.ndarray:
        return np.frombuffer(self.path.read_bytes(), np.uint8)

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *error: object) -> None:
        self.engine.close()


if __name__ == "__main__":  # python -m tests.transfer.files <command>: without io_uring
    forbid_io_uring()
    os.execvp(sys.argv[1], sys.argv[1:])
