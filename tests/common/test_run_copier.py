"""Runs that are streamed past the cache, as whole copies do only when they are large."""

from pathlib import Path

from ..cxx import build, run


def test_run_copier(tmp_path):
    sources = ["common/run_copier.cc", "common/cpu_cache.cc"]
    result = run(build(Path(__file__).with_suffix(".cc"), sources, tmp_path))
    assert result.returncode == 0, result.stderr
