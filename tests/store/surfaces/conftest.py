"""Pools with a name."""

import os
from pathlib import Path

import pytest

from mooncake_kernels.pool import ObjectPool

from ..cluster.conftest import hosts

__all__ = ["hosts"]

UNIT = 4096


@pytest.fixture
def path(tmp_path_factory):
    """A path for a pool on a memory file system."""
    path = Path("/dev/shm") / f"mk-test-{os.getpid()}-{tmp_path_factory.mktemp('pool').name}"
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def pool(path):
    """A pool of 64 units, with a name."""
    with ObjectPool.create(64 * UNIT, path, num_objects=64) as made:
        yield made
