"""fault_guard alone, in C++: what it catches, and what it passes on to other handlers."""

from pathlib import Path

from ..cxx import build, run

HERE = Path(__file__).parent

# Without the sanitizer's own handlers of what is passed on.
OPTIONS = "detect_stack_use_after_return=0:handle_segv=0:handle_sigbus=0"


def test_fault_guard(tmp_path):
    program = build(HERE / "test_fault_guard.cc", ["common/fault_guard.cc"], tmp_path, "-pthread")
    result = run(program, ASAN_OPTIONS=OPTIONS)
    assert result.returncode == 0, result.stderr
