"""The baselines that Algorithm 1 is compared with."""

from collections import Counter

import pytest

from mooncake_serving.conductor import (
    AcceptAll,
    LoadBalance,
    LocalCacheAware,
    Random,
    RoundRobin,
    Why,
)

from .support import make, request


def chosen(policy, count, seed=0, prepare=lambda conductor: None):
    conductor = make(4, policy=policy, admission=AcceptAll(), seed=seed)
    prepare(conductor)
    return [conductor.decide(request(i), 0.0).prefill for i in range(count)]


def test_random_is_uniform_and_seeded():
    one, same, other = (
        [choice.instance for choice in chosen(Random(), 400, seed)] for seed in (1, 1, 2)
    )
    assert one == same and one != other
    assert all(60 < count < 140 for count in Counter(one).values())


def test_round_robin_skips_instances_that_are_down():
    assert [choice.instance for choice in chosen(RoundRobin(), 6)] == [0, 1, 2, 3, 0, 1]

    def one_down(conductor):
        conductor.cluster.up[1] = False

    assert [c.instance for c in chosen(RoundRobin(), 5, prepare=one_down)] == [0, 2, 3, 0, 2]


def test_load_balance_ignores_caches():
    def prepare(conductor):
        conductor.cluster.free_at_s[:4] = 0.4, 0.2, 0.1, 0.3
        conductor.index.add(1, request().keys)

    (choice,) = chosen(LoadBalance(), 1, prepare=prepare)
    assert choice.instance == 2 and choice.reason.why is Why.SHORTEST_QUEUE
    assert choice.ttft_s == pytest.approx(0.1 + 1.0)


def test_cache_aware_weighs_its_own_cache_against_its_queue():
    def prepare(conductor):
        conductor.cluster.free_at_s[:4] = 0.0, 0.7, 2.0, 0.0
        conductor.index.add(1, request().keys[:8])
        conductor.index.add(2, request().keys)

    (choice,) = chosen(LocalCacheAware(), 1, prepare=prepare)
    assert choice.instance == 1 and choice.fetch is None
    assert choice.ttft_s == pytest.approx(0.7 + 0.2)
