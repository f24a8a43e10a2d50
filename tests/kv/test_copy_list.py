"""Where addresses are, lists of runs and the copy engine, with a fake libcuda.so.1."""

import os
import subprocess
from pathlib import Path

import pytest

from ..conftest import skip
from ..cxx import TESTS, build, run

HERE = Path(__file__).parent
DRIVER = ["kv/copy_engine.cc", "common/cuda_driver.cc", "common/memcpy_batch.cc"]
SOURCES = {
    "test_copy_list": [*DRIVER, "kv/copy_list.cc", "kv/copy_apart.cc",
                       "common/memory_kind.cc"],
    "test_list_runs": [*DRIVER, "kv/list_runs.cc", "kv/copy_blocks.cc", "common/run_copier.cc",
                       "common/cpu_cache.cc"],
}  # fmt: skip


@pytest.fixture(scope="module")
def build_program(tmp_path_factory):
    include = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "include")
    if not (include / "cudaTypedefs.h").is_file():
        skip("cuda", f"there is no cudaTypedefs.h in {include}")
    folder = tmp_path_factory.mktemp("driver")
    fake = HERE / "fake_cuda_driver.cc"
    flags = ["-std=c++17", "-g", "-shared", "-fPIC", f"-I{TESTS}", f"-isystem{include}"]
    subprocess.run(["g++", *flags, fake, "-o", folder / "libcuda.so.1"], check=True)
    return lambda name: build(
        HERE / f"{name}.cc", SOURCES[name], folder, f"-isystem{include}", "-ldl"
    )


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("test_copy_list", []), ("test_copy_list", ["old"]), ("test_list_runs", [])],
)
def test_native_copies_with_a_driver(build_program, name, arguments):
    program = build_program(name)
    result = run(program, *arguments, LD_LIBRARY_PATH=str(program.parent))
    assert result.returncode == 0, result.stderr
