"""The CUDA device code, compiled for the CPU with the sanitizers on, and run as fibers."""

import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
SOURCES = {
    "test_emulator": [],
    "test_copy_blocks": ["kv/copy_blocks.cc", "kv/copy_run.cc"],
}


def build(name: str, folder: Path) -> Path:
    program = folder / name
    files = [HERE / f"{name}.cc", *(CSRC / source for source in SOURCES[name])]
    flags = ["-O1", "-g", "-std=c++17", "-Wall", "-Wno-unknown-pragmas", "-Wno-attributes"]
    flags += ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    command = ["g++", *flags, f"-I{CSRC}", f"-I{HERE}", *files, "-o", program]
    subprocess.run(command, check=True)
    return program


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess:
    # Address sanitizer's own fake stacks and fibers' stacks do not know of each other.
    env = {"ASAN_OPTIONS": "detect_stack_use_after_return=0"}
    return subprocess.run([program, *arguments], capture_output=True, text=True, env=env)


@pytest.mark.parametrize("name", SOURCES)
def test_device_code(name, tmp_path):
    result = run(build(name, tmp_path))
    assert result.returncode == 0, result.stderr


def test_a_barrier_that_not_all_threads_reach_aborts(tmp_path):
    result = run(build("test_emulator", tmp_path), "diverge")
    assert result.returncode != 0
    assert "__syncthreads is not reached by every thread" in result.stderr
