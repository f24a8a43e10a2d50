"""Checksums, in C++."""

from pathlib import Path

from ..cxx import build, run

HERE = Path(__file__).parent
THIRD_PARTY = f"-I{HERE.parents[1] / 'third_party'}"


def test_checksums_do_not_depend_on_the_processor(tmp_path):
    sources = ["store/xxh3.cc", "store/xxh3_avx2.cc"]
    result = run(build(HERE / "test_xxh3.cc", sources, tmp_path, THIRD_PARTY))
    assert result.returncode == 0, result.stderr


def test_copied_data_is_hashed(tmp_path):
    sources = ["common/cpu_cache.cc", "common/run_copier.cc", "store/checksum.cc"]
    sources += ["store/xxh3.cc", "store/xxh3_avx2.cc"]
    result = run(build(HERE / "test_checksum.cc", sources, tmp_path, THIRD_PARTY))
    assert result.returncode == 0, result.stderr
