"""Runs that are streamed past the cache, which whole copies do only when they are large."""

from pathlib import Path

from ..cxx import build, run


def test_copy_runs(tmp_path):
    sources = ["kv/copy_runs.cc", "common/cpu_cache.cc"]
    result = run(build(Path(__file__).with_suffix(".cc"), sources, tmp_path))
    assert result.returncode == 0, result.stderr
