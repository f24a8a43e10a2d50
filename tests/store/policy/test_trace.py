"""Prompts that share prefixes, in a store: LRU to the last block, and no policy above the bound."""

import numpy as np
import pytest

from mooncake_kernels.pool import ObjectPool
from mooncake_serving.store import Store, belady, largest_first, length_aware, lfu, lru, sieve

from .oracles import LruOracle

UNIT = 64
NUM_BLOCKS = 60


def prompts(count: int = 600) -> list[list[int]]:
    """Conversations: each goes on where it was, with more blocks, or begins with one of 3 heads."""
    rng = np.random.default_rng(7)
    chains, fresh = [[head] for head in range(3)], 3
    for _ in range(count):
        begun = chains[int(rng.integers(max(0, len(chains) - 30), len(chains)))]
        if rng.random() < 0.4:
            begun = begun[:1]
        more = int(rng.integers(1, 6))
        chains.append(begun + list(range(fresh, fresh + more)))
        fresh += more
    return chains


def replay(policy, at_once: float) -> list[int]:
    """How many blocks each prompt found."""
    found = []
    pool = ObjectPool.create(NUM_BLOCKS * UNIT, alignment=UNIT, num_objects=NUM_BLOCKS)
    with Store(pool, eviction=policy, evict_ratio=at_once) as store:
        for keys in prompts():
            num_found = store.match_prefix(keys)
            store.get_each(keys[:num_found])
            rest = keys[num_found:]
            store.put_each(rest, [b"1"] * len(rest), position=num_found)
            found.append(num_found)
    return found


@pytest.mark.parametrize("at_once", [0.0, 0.1])
def test_lru_matches_an_ordered_dict(at_once):
    oracle, expected = LruOracle(), []
    for keys in prompts():
        held = [key in oracle for key in keys]
        num_found = held.index(False) if False in held else len(keys)
        for key in reversed(keys[:num_found]):
            oracle.use(key)
        new = []
        for key in keys[num_found:]:
            if key in oracle:
                continue
            if len(oracle) == NUM_BLOCKS:
                for _ in range(max(1, round(at_once * NUM_BLOCKS))):
                    oracle.evict()
            oracle.setdefault(key)
            new.append(key)
        for key in reversed(new):  # of what was put together the tail goes first
            if key in oracle:
                oracle.use(key)
        expected.append(num_found)
    assert replay(lru, at_once) == expected
    assert 500 < sum(expected) < sum(map(len, prompts())) - 500


@pytest.mark.parametrize("policy", [lru, sieve, lfu, length_aware, largest_first])
def test_no_policy_beats_belady(policy):
    bound = belady(np.concatenate(prompts()), NUM_BLOCKS).sum()
    assert 500 < sum(replay(policy, 0.1)) < bound
