"""What each policy evicts next, against oracles."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import ObjectPool
from mooncake_serving.store import LengthAware, Lfu, largest_first, lru, sieve

from .oracles import AgedOracle, LruOracle

UNIT = 64
STEPS = st.lists(st.tuples(st.integers(0, 15), st.booleans()), min_size=30, max_size=120)


def small_pool() -> ObjectPool:
    return ObjectPool.create(256 * UNIT, alignment=UNIT, num_objects=64)


def put(pool: ObjectPool, key: int, num_bytes: int = 1, **options) -> None:
    pool.put_from((key, 0), bytes(num_bytes), checksum=False, **options)


def use(pool: ObjectPool, key: int) -> None:
    pool.pin((key, 0)).close()


def victim(pool: ObjectPool, policy) -> int:
    [[key, _]] = policy(pool, 1).keys.tolist()
    return key


@settings(deadline=None, max_examples=40)
@given(steps=STEPS, half_life=st.sampled_from([0.5, 1.0, 3.0, 1000.0]))
def test_lfu_evicts_the_least_valuable(steps, half_life):
    oracle, policy = AgedOracle(half_life), Lfu(half_life)
    with small_pool() as pool:
        for key, evicts in steps:
            if key in oracle.known:
                use(pool, key)
                oracle.use(key)
            else:
                put(pool, key)
                oracle.add(key)
            if evicts and len(oracle.known) > 5:
                assert oracle.evict(victim(pool, policy))


@settings(deadline=None, max_examples=40)
@given(steps=STEPS, attention=st.sampled_from([math.inf, 10.0]), data=st.data())
def test_length_aware_evicts_what_saves_least(steps, attention, data):
    oracle, policy = AgedOracle(2.0), LengthAware(2.0, depth=7, attention=attention)
    with small_pool() as pool:
        for key, evicts in steps:
            if key in oracle.known:
                use(pool, key)
                oracle.use(key)
            else:
                position = data.draw(st.integers(0, 40))
                num_bytes = data.draw(st.sampled_from([50, 64, 200]))
                put(pool, key, num_bytes, position=position)
                cost, reach = 1 + position / attention, 1 / (1 + position / 7)
                oracle.add(key, cost * reach / num_bytes)
            if evicts and len(oracle.known) > 5:
                assert oracle.evict(victim(pool, policy))


@settings(deadline=None, max_examples=40)
@given(steps=STEPS)
def test_lfu_with_a_tiny_half_life_is_lru(steps):
    oracle, forgetful = LruOracle(), Lfu(half_life=1e-6)
    with small_pool() as pool, small_pool() as other:
        for key, evicts in steps:
            for each in (pool, other):
                (use if key in oracle else put)(each, key)
            oracle[key] = None
            oracle.use(key)
            if evicts and len(oracle) > 5:
                assert victim(pool, forgetful) == victim(other, lru) == oracle.evict()


def test_tail_of_a_prompt_is_evicted_before_its_head():
    with small_pool() as pool:
        for i in range(10):
            put(pool, i, position=i)
        evicted = LengthAware(depth=4)(pool, 4 * UNIT)
        assert sorted(evicted.keys[:, 0].tolist()) == [6, 7, 8, 9]


POLICIES = [Lfu(), LengthAware(), largest_first]


@pytest.mark.parametrize("policy", [lru, sieve, *POLICIES])
def test_pinned_and_hard_stay_and_soft_goes_last(policy):
    with small_pool() as pool:
        for i in range(20):
            put(pool, i, retention="soft" if i < 5 else "normal")
        pool.retain((6, 0), "hard")
        with pool.pin((0, 0)), pool.pin((7, 0)), pool.begin((50, 0), UNIT) as writing:
            # The first round of SIEVE takes the mark off what was just read.
            normal = policy(pool, 13 * UNIT)
            assert sorted(normal.keys[:, 0].tolist()) == [5, *range(8, 20)]
            assert normal.num_bytes == 13 * UNIT
            soft = policy(pool, 1 << 40)
            assert sorted(soft.keys[:, 0].tolist()) == [1, 2, 3, 4] and soft.num_bytes == 4 * UNIT
            assert len(policy(pool, 1 << 40).keys) == 0
            writing.abort()
        assert sorted(policy(pool, 1 << 40).keys[:, 0].tolist()) == [0, 7]
        assert pool.objects().keys.tolist() == [[6, 0]]
        assert pool.retain((6, 0), "normal") and not pool.retain((5, 0), "hard")
        assert policy(pool, 1).keys.tolist() == [[6, 0]] and pool.stats().num_ready == 0


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_no_more_is_evicted_than_requested(data):
    """Also where what would go first is being read."""
    policy = data.draw(st.sampled_from(POLICIES))
    sizes = data.draw(st.lists(st.integers(1, 5 * UNIT), min_size=1, max_size=30))
    read = data.draw(st.sets(st.integers(0, len(sizes) - 1)))
    wanted = data.draw(st.integers(0, 100 * UNIT))
    with small_pool() as pool:
        for key, size in enumerate(sizes):
            put(pool, key, size)
        pins = [pool.pin((key, 0)) for key in read]
        taken = {key: -(-size // UNIT) * UNIT for key, size in enumerate(sizes)}
        free = pool.stats().free_bytes
        evicted = policy(pool, wanted)
        gone = [taken[key] for key in evicted.keys[:, 0].tolist()]
        assert evicted.num_bytes == sum(gone) == pool.stats().free_bytes - free
        can_go = sum(size for key, size in taken.items() if key not in read)
        assert evicted.num_bytes >= min(wanted, can_go)
        assert not gone or sum(gone[:-1]) < wanted
        assert not read & set(evicted.keys[:, 0].tolist())
        del pins


@pytest.mark.parametrize(
    "policy, name, value",
    [
        (Lfu, "half_life", 0),
        (Lfu, "half_life", np.inf),
        (Lfu, "half_life", "long"),
        (LengthAware, "half_life", -1),
        (LengthAware, "depth", None),
        (LengthAware, "depth", 0),
        (LengthAware, "attention", float("nan")),
    ],
)
def test_wrong_options(policy, name, value):
    with pytest.raises(
        InvalidArgument, match=f"{policy.__name__}: {name} must be (above 0|finite)"
    ):
        policy(**{name: value})
