from pathlib import Path

from ..cxx import build, run

SOURCES = ["kv/copy_blocks.cc", "common/run_copier.cc", "common/cpu_cache.cc"]


def test_parts_of_a_copy(tmp_path):
    program = build(Path(__file__).with_suffix(".cc"), SOURCES, tmp_path)
    done = run(program)
    assert done.returncode == 0, done.stderr
