"""The tests of gpu/ pass in a process whose libcuda is a stand-in, and in one with a real GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ..conftest import skip
from ..rdma.fake.build import CUDA_INCLUDE

ROOT = Path(__file__).parents[2]
PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--import-mode=append"]


def run_in(world: str) -> None:
    done = subprocess.run(
        [*PYTEST, "-rs", ROOT / "tests/transfer/gpu"],
        env={**os.environ, "MK_TEST_WORLD": world},
        text=True,
        capture_output=True,
        timeout=600,
    )
    if done.returncode:
        pytest.fail(f"exit status {done.returncode}\n{done.stdout}{done.stderr}", pytrace=False)


def test_with_a_made_up_driver():
    if not (CUDA_INCLUDE / "cudaTypedefs.h").is_file():
        skip("cuda", "there is no cudaTypedefs.h to make up a driver with")
    run_in("fake_gpu")


def test_with_a_gpu():
    if not torch.cuda.is_available():
        skip("cuda", "torch finds no CUDA device")
    run_in("gpu")
