"""Worlds: tests of guest/ and fake/ make sense only where MK_TEST_WORLD names their folder.

A parent test starts that world, runs pytest on the folder in it and asserts its exit status:
test_in_guest.py a guest with RDMA NICs, test_fake_world.py a process with a fake libibverbs.
"""

import os
import subprocess
from pathlib import Path

import pytest

from ..conftest import skip

ROOT = Path(__file__).parents[2]
IN_GUEST = ROOT / "tests" / "rdma" / "in_guest"

collect_ignore = [name for name in ("guest", "fake") if os.environ.get("MK_TEST_WORLD") != name]


@pytest.fixture(scope="session")
def guest_files() -> None:
    """Skip, with the runner's message, if something that a guest needs is missing."""
    done = subprocess.run([IN_GUEST, "--prepare"], text=True, capture_output=True)
    if done.returncode:
        skip("rdma", done.stderr.strip())
