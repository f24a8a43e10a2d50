"""Where addresses are and the copy engine, with a libcuda.so.1 that is made up."""

import os
import subprocess
from pathlib import Path

import pytest

from ..conftest import skip
from ..cxx import TESTS, build, run

HERE = Path(__file__).parent
SOURCES = ["kv/copy_list.cc", "kv/copy_engine.cc", "common/memory_kind.cc", "common/cuda_driver.cc"]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    include = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "include")
    if not (include / "cudaTypedefs.h").is_file():
        skip("cuda", f"there is no cudaTypedefs.h in {include}")
    folder = tmp_path_factory.mktemp("driver")
    fake = HERE / "fake_cuda_driver.cc"
    flags = ["-std=c++17", "-g", "-shared", "-fPIC", f"-I{TESTS}", f"-isystem{include}"]
    subprocess.run(["g++", *flags, fake, "-o", folder / "libcuda.so.1"], check=True)
    return build(HERE / "test_copy_list.cc", SOURCES, folder, f"-isystem{include}", "-ldl")


@pytest.mark.parametrize("arguments", [[], ["old"]])
def test_copy_list(program, arguments):
    result = run(program, *arguments, LD_LIBRARY_PATH=str(program.parent))
    assert result.returncode == 0, result.stderr
