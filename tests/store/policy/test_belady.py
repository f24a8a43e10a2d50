"""The bound, against every possible choice, and against what policies reach."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_kernels.errors import InvalidArgument
from mooncake_serving.store import belady

from .oracles import LruOracle, most_hits


@settings(deadline=None, max_examples=150)
@given(accesses=st.lists(st.integers(0, 5), max_size=14), capacity=st.integers(0, 4))
def test_belady_is_optimal(accesses, capacity):
    found = belady(accesses, capacity)
    assert len(found) == len(accesses)
    assert found.sum() == most_hits(accesses, capacity)


def test_lru_finds_less():
    rng = np.random.default_rng(1)
    accesses = ((rng.zipf(1.3, 5000) + np.arange(5000) // 50) % 300).tolist()
    cache, hits = LruOracle(), 0
    for key in accesses:
        if key in cache:
            hits += 1
        elif len(cache) == 60:
            cache.evict()
        cache[key] = None
        cache.use(key)
    assert 1000 < hits < belady(accesses, 60).sum()


def test_edge_cases():
    accesses = [1, 2, 1, 3, 2, 1]
    assert belady(accesses, 3).tolist() == [False, False, True, False, True, True]
    assert not belady(accesses, 0).any() and belady([], 3).shape == (0,)
    with pytest.raises(InvalidArgument, match="capacity must be at least 0, got -1"):
        belady(accesses, -1)
