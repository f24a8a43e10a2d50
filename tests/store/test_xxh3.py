"""The vectors of checksums, in C++."""

from pathlib import Path

from ..cxx import build, run

HERE = Path(__file__).parent


def test_the_values_do_not_depend_on_the_processor(tmp_path):
    sources = ["store/xxh3.cc", "store/xxh3_avx2.cc"]
    third_party = f"-I{HERE.parents[1] / 'third_party'}"
    result = run(build(HERE / "test_xxh3.cc", sources, tmp_path, third_party))
    assert result.returncode == 0, result.stderr
