"""nvcc has nothing to warn of in the CUDA sources."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from .conftest import skip
from .cxx import CSRC, without_sanitizer

NVCC = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin/nvcc")


def test_no_warnings(tmp_path, soak):
    if not soak:
        pytest.skip("with --soak")  # for it takes a minute
    nvcc = NVCC if NVCC.is_file() else shutil.which("nvcc")
    if nvcc is None:
        skip("cuda", "there is no nvcc")
    command = [nvcc, "-std=c++17", "-arch=sm_80", f"-I{CSRC}", "-Werror=all-warnings", "-cuda"]
    for source in sorted(CSRC.rglob("*.cu")):
        done = subprocess.run(
            [*command, source, "-o", tmp_path / "out"],
            env=without_sanitizer(),
            text=True,
            capture_output=True,
        )
        assert done.returncode == 0, done.stderr[:4000]
