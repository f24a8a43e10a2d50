"""nvcc has nothing to warn of in the CUDA sources, and ptxas does not translate them wrongly."""

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import mooncake_kernels

from .conftest import skip
from .cxx import CSRC, without_sanitizer

NVCC = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin/nvcc")


def test_cuda_sources_compile_without_warnings(tmp_path, soak):
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


def cuobjdump() -> Path | None:
    """The toolkit's disassembler, or that which triton brings along."""
    places = [NVCC.with_name("cuobjdump")]
    if triton := importlib.util.find_spec("triton"):
        places.append(Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump")
    return next((place for place in places if place.is_file()), None)


def test_ptxas_reads_no_byte_of_a_half_by_integer_conversion():
    """See low_half in csrc/common/element.h; it showed only on a GPU."""
    program = cuobjdump()
    if program is None or not torch.ops.mooncake_kernels.has_cuda():
        pytest.skip("no cuobjdump" if program is None else "_ops.so was built without nvcc")
    binary = Path(mooncake_kernels.__file__).with_name("_ops.so")
    said = subprocess.run([program, "-sass", binary], capture_output=True, text=True, check=True)
    assert "F2FP.F16.F32.PACK_AB" in said.stdout
    assert [line for line in said.stdout.splitlines() if "F2I.U8.F16" in line] == []
