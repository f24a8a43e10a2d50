"""copy_bytes alone, in C++."""

from pathlib import Path

from ..cxx import build, run

HERE = Path(__file__).parent


def test_copy_bytes(tmp_path):
    result = run(build(HERE / "test_copy_bytes.cc", [], tmp_path))
    assert result.returncode == 0, result.stderr
