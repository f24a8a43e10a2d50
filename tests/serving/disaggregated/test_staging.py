"""StagingPool: rows are adjacent, never given out twice, and merge again when freed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mooncake_kernels as mk
from mooncake_serving.engine.disaggregated.staging import StagingPool


def pool(num_blocks, num_cache_blocks=6):
    cache = torch.arange(num_cache_blocks * 8, dtype=torch.float32).view(num_cache_blocks, 2, 4)
    return StagingPool(mk.KVView([cache], "block token dim"), num_blocks)


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(1, 6)), max_size=40))
@settings(deadline=None)
def test_allocated_rows_never_overlap(steps):
    staging, held = pool(12), {}
    for is_free, size in steps:
        if is_free and held:
            first = sorted(held)[size % len(held)]
            staging.free(first, held.pop(first))
        elif not is_free:
            first = staging.allocate(size)
            taken = {row for start, length in held.items() for row in range(start, start + length)}
            if first is None:
                free = [row not in taken for row in range(12)]
                runs = [all(free[i : i + size]) for i in range(12 - size + 1)]
                assert not any(runs), "there was room"
            else:
                assert taken.isdisjoint(range(first, first + size))
                assert first + size <= 12
                held[first] = size
    for first, length in held.items():
        staging.free(first, length)
    assert staging.allocate(12) == 0, "all of it is one piece again"


def test_staging_gathers_and_scatters_rows():
    staging = pool(4)
    first = staging.allocate(2)
    rows = staging.gather([5, 1], first)
    assert torch.equal(rows[:, 0, 0, 0], staging.view.tensors[0][[5, 1]])
    staging.scatter(first, [0, 2])
    assert torch.equal(staging.view.tensors[0][[0, 2]], staging.view.tensors[0][[5, 1]])


def test_pool_of_zero_blocks_is_rejected():
    with pytest.raises(ValueError, match="num_blocks must be positive, got 0"):
        pool(0)
