"""Parts of csrc/common alone, in C++."""

from pathlib import Path

import pytest

from ..cxx import build, run

# Without the sanitizer's own handlers of what fault_guard passes on to other handlers.
ASAN = "detect_stack_use_after_return=0:handle_segv=0:handle_sigbus=0"
SOURCES = {
    "copy_bytes": [],
    "fault_guard": ["common/fault_guard.cc"],
    "radix_sort": [],
    "run_copier": ["common/run_copier.cc", "common/cpu_cache.cc"],
    "sieve": [],
}


@pytest.mark.parametrize("name", SOURCES)
def test_native_part(tmp_path, name):
    source = Path(__file__).with_name(f"test_{name}.cc")
    result = run(build(source, SOURCES[name], tmp_path, "-pthread"), ASAN_OPTIONS=ASAN)
    assert result.returncode == 0, result.stderr
