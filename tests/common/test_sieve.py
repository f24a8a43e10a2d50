"""SIEVE alone, in C++."""

from pathlib import Path

from ..cxx import build, run


def test_sieve(tmp_path):
    result = run(build(Path(__file__).with_suffix(".cc"), [], tmp_path))
    assert result.returncode == 0, result.stderr
