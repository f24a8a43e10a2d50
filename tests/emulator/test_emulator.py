"""The CUDA device code, compiled for the CPU with the sanitizers, its threads run as fibers."""

from pathlib import Path

import pytest

from ..cxx import build, run

HERE = Path(__file__).parent
SOURCES = {
    "test_emulator": [],
    "test_copy_batch": ["kv/copy_batch.cc", "common/run_copier.cc", "common/cpu_cache.cc"],
    "test_copy_bulk": [],
    "test_merge_attention": ["attention/merge_attention.cc", "common/element_rows.cc"],
    "test_copy_blocks": ["kv/copy_blocks.cc", "common/run_copier.cc", "common/cpu_cache.cc"],
    "test_transform_blocks": [
        *("kv/transform_blocks.cc", "common/element_rows.cc"),
        *("common/run_copier.cc", "common/cpu_cache.cc"),
    ],
    "test_ready_flags": ["kv/ready_flags.cc"],
    "test_mask_rows": ["mask/mask_rows.cc"],
    "test_block_map": ["mask/block_map.cc"],
    "test_packed_mask": ["mask/packed_mask.cc"],
    "test_pack_signs": ["similarity/pack_signs.cc"],
    "test_hamming_match": ["similarity/hamming_match.cc"],
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", SOURCES)
def test_device_code_runs_under_the_emulator(name, tmp_path):
    result = run(build(HERE / f"{name}.cc", SOURCES[name], tmp_path))
    assert result.returncode == 0, result.stderr


def test_divergent_barrier_aborts(tmp_path):
    result = run(build(HERE / "test_emulator.cc", [], tmp_path), "diverge")
    assert result.returncode != 0
    assert "__syncthreads is not reached by every thread" in result.stderr
