"""The allocator alone, in C++."""

from pathlib import Path

from ..cxx import build, run

HERE = Path(__file__).parent


def test_allocator(tmp_path):
    result = run(build(HERE / "test_allocator.cc", ["store/allocator.cc"], tmp_path))
    assert result.returncode == 0, result.stderr
