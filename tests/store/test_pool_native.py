"""A pool and its parts alone, in C++: it loses nothing whenever a process that uses it dies."""

import os
import sys
from pathlib import Path

import pytest

from ..cxx import CSRC, build, run

pytestmark = pytest.mark.thorough
HERE = Path(__file__).parent
SOURCES = [f"store/{file.name}" for file in sorted((CSRC / "store").glob("*.cc"))]
SOURCES += [
    f"common/{name}.cc"
    for name in ("cpu_cache", "cuda_context", "cuda_driver", "device_memory", "fault_guard",
                 "memcpy_batch", "page_lock", "process_id", "run_copier", "shared_memory",
                 "stream_copy")
]  # fmt: skip
INCLUDE = f"-I{CSRC.parent / 'third_party'}"


XXH3 = ["store/xxh3.cc", "store/xxh3_avx2.cc"]
PARTS = {
    "allocator": ["store/allocator.cc"],
    "checksum": ["common/cpu_cache.cc", "common/run_copier.cc", "store/checksum.cc", *XXH3],
    "pool_counts": SOURCES,
    "xxh3": XXH3,
}


@pytest.mark.parametrize("name", PARTS)
def test_native_part(tmp_path, name):
    result = run(build(HERE / f"test_{name}.cc", PARTS[name], tmp_path, INCLUDE))
    assert result.returncode == 0, result.stderr[:2000]


def test_killed_between_any_two_instructions(tmp_path, soak):
    # Without sanitizers: it is their instructions that would be stepped through.
    program = build(HERE / "test_pool_steps.cc", SOURCES, tmp_path, INCLUDE, "-fno-sanitize=all")
    seed = int.from_bytes(os.urandom(4), "little")
    result = run(program, str(seed), "10000" if soak else "40")
    if result.returncode == 77:
        pytest.skip("ptrace is forbidden here")
    sys.stdout.write(result.stdout)
    assert result.returncode == 0, f"seed {seed}: {result.stderr[:2000]}"


@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_threads(tmp_path, sanitizers, soak):
    if sanitizers != "thread" and not soak:
        pytest.skip("with --soak")
    flags = ["-fno-sanitize=all", f"-fsanitize={sanitizers}"]
    if sanitizers != "thread":
        flags += ["-fno-sanitize-recover=undefined"]
    program = build(HERE / "test_pool_threads.cc", SOURCES, tmp_path, INCLUDE, *flags)
    result = run(program)
    assert result.returncode == 0, result.stderr[:4000]


def test_robust_mutex(tmp_path, soak):
    program = build(HERE / "test_robust_mutex.cc", ["store/robust_mutex.cc"], tmp_path)
    for arguments in [(), ("stopped",)] if soak else [()]:  # which takes the limit, 10 s
        result = run(program, *arguments)
        assert result.returncode == 0, result.stderr[:2000]


def test_calls_time_out_while_a_stopped_process_holds_the_pool(tmp_path, soak):
    if not soak:
        pytest.skip("with --soak")  # for it takes the limit three times
    program = build(HERE / "test_pool_stopped.cc", SOURCES, tmp_path, INCLUDE)
    result = run(program)
    assert result.returncode == 0, result.stderr[:2000]
