"""Pools of each kind."""

import os
from pathlib import Path

import pytest

from mooncake_kernels.pool import ObjectPool

from ..metadata.support import RedisServer

collect_ignore = [] if os.environ.get("MK_TEST_WORLD") in ("gpu", "fake_gpu") else ["gpu"]


@pytest.fixture
def redis(tmp_path):
    """A server of the test's own."""
    server = RedisServer(tmp_path)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def shared_redis(tmp_path_factory):
    """A server for all tests of a file."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture(params=["file", "nameless"])
def pool(request, tmp_path_factory):
    """A pool of 64 units of 4 KiB and 32 objects; a file's is on a memory file system."""
    path = None
    if request.param == "file":
        path = Path("/dev/shm") / f"mk-test-{os.getpid()}-{tmp_path_factory.mktemp('pool').name}"
    with ObjectPool.create(64 * 4096, path, num_objects=32, num_processes=4, num_pins=8) as made:
        yield made
    if path is not None:
        path.unlink()
