"""The tests of fake/ pass in a process whose libibverbs is fake."""

import os
import subprocess
import sys

import pytest

from .conftest import ROOT
from .fake.build import build_driver, preloading


def test_fake_verbs_tests_pass():
    driver = build_driver()
    environment = preloading(driver) if driver else os.environ
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", "tests/rdma/fake"],
        cwd=ROOT,
        env={**environment, "MK_TEST_WORLD": "fake"},
        text=True,
        capture_output=True,
    )
    if done.returncode:
        pytest.fail(f"exit status {done.returncode}\n{done.stdout}{done.stderr}", pytrace=False)
