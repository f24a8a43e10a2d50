"""radix_sort alone, in C++."""

from pathlib import Path

from ..cxx import build, run

HERE = Path(__file__).parent


def test_radix_sort(tmp_path):
    result = run(build(HERE / "test_radix_sort.cc", [], tmp_path))
    assert result.returncode == 0, result.stderr
