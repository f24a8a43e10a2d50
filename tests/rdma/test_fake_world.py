"""The tests of fake/ pass in a process whose libibverbs is a stand-in."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT

HERE = Path(__file__).parent


@pytest.mark.skipif(not list(HERE.glob("fake/test_*.py")), reason="tests/rdma/fake has no tests")
def test_the_fake_world_passes_its_tests():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", "tests/rdma/fake"],
        cwd=ROOT,
        env={**os.environ, "MK_TEST_WORLD": "fake"},
        text=True,
        capture_output=True,
    )
    if done.returncode:
        pytest.fail(f"exit status {done.returncode}\n{done.stdout}{done.stderr}", pytrace=False)
