"""The tests of guest/ pass in a guest with four RDMA NICs: one boot for all, as torch is slow."""

import re
import subprocess
import sys

import pytest

from .conftest import IN_GUEST, ROOT


def test_guest_tests_pass(guest_files):
    guest = [IN_GUEST, "--nics", "4", "--numa", "--gpu", "--timeout", "600", "--"]
    # Its import of hypothesis takes ten seconds there.
    without = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    pytest_there = [sys.executable, "-m", "pytest", *without, "-rs", "--durations=3"]
    done = subprocess.run(
        [*guest, *pytest_there, "tests/rdma/guest"], cwd=ROOT, text=True, capture_output=True
    )
    if done.returncode:
        pytest.fail(f"exit status {done.returncode}\n{done.stdout}{done.stderr}", pytrace=False)
    assert re.search(r"\d+ passed", done.stdout)
