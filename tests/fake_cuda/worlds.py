"""Tests that need a separate process, whose CUDA driver is the fake one or that of a real GPU."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from ..conftest import skip
from ..rdma.fake.build import preloading
from .driver import build_driver

ROOT = Path(__file__).parents[2]
PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--import-mode=append"]


def pass_with_a_made_up_driver(folder: str) -> None:
    library = build_driver()
    if library is None:
        skip("cuda", "there is no cudaTypedefs.h to make up a driver with")
    _pass_in("fake_gpu", folder, preloading(library))


def pass_with_a_gpu(folder: str) -> None:
    if not torch.cuda.is_available():
        skip("cuda", "torch finds no CUDA device")
    _pass_in("gpu", folder, os.environ)


def _pass_in(world: str, folder: str, environment: Mapping[str, str]) -> None:
    done = subprocess.run(
        [*PYTEST, "-rs", ROOT / folder],
        env={**environment, "MK_TEST_WORLD": world},
        text=True,
        capture_output=True,
        timeout=1800,
    )
    if done.returncode:
        pytest.fail(f"exit status {done.returncode}\n{done.stdout}{done.stderr}", pytrace=False)
