"""Shared by the tests of ``compat.mooncake.store``: a store in a file, hashed memory."""

import contextlib
import itertools
import logging
import os
import re
from pathlib import Path

import numpy as np

from mooncake_serving.compat.mooncake.store import MooncakeDistributedStore

from .support import addressed

CAPACITY = 64 << 20
LOG = "mooncake_serving.compat.mooncake.store"
_numbers = itertools.count()


@contextlib.contextmanager
def pool_file():
    """A path on a memory file system; the file is removed at the end."""
    path = Path(f"/dev/shm/mk-test-compat-{os.getpid()}-{next(_numbers)}")
    try:
        yield str(path)
    finally:
        path.unlink(missing_ok=True)


def set_up(path: str, capacity: int = CAPACITY, **options) -> MooncakeDistributedStore:
    store = MooncakeDistributedStore()
    arguments = ("127.0.0.1", "P2PHANDSHAKE", capacity, 16 << 20, "tcp", "", path)
    assert store.setup(*arguments, **options) == 0
    return store


def settings_of(address: str, capacity: int = 32 << 20, name: str = "127.0.0.1") -> dict:
    """Settings of a member of a cluster, or of a store in a file."""
    return {
        "local_hostname": name,
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": capacity,
        "local_buffer_size": 1 << 20,
        "master_server_addr": address,
    }


class Memory:
    """Registered memory of bytes hashed from their position."""

    def __init__(self, store: MooncakeDistributedStore, num_bytes: int = 1 << 20):
        self.bytes = addressed(num_bytes)
        self.address = self.bytes.ctypes.data
        assert store.register_buffer(self.address, num_bytes) == 0

    def at(self, offset: int, num_bytes: int) -> bytes:
        return self.bytes[offset : offset + num_bytes].tobytes()


def value_of(seed: int, num_bytes: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8).tobytes()


def reasons(caplog, pattern: str) -> None:
    """All records since the last clear are errors of the store, and one of them matches."""
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert errors and all(error.name == LOG for error in errors)
    assert any(re.search(pattern, error.getMessage()) for error in errors), caplog.text
    caplog.clear()
