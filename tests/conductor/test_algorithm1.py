"""Algorithm 1: cases worked out by hand, and any case against the loop of the docstring.

1 ms a token to compute, 0.1 ms a token to fetch, blocks of 100 tokens (support.py).
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_serving.conductor import (
    AcceptAll,
    InvalidArgument,
    KVCacheCentric,
    LocalCacheAware,
    Role,
    RoundRobin,
    Why,
)

from .support import BLOCK, make, request


def choose(conductor, num_blocks=10, now_s=0.0):
    return conductor.decide(request(num_blocks=num_blocks), now_s).prefill


def test_idle_cache_holder_is_chosen():
    conductor = make(3)
    conductor.index.add(1, request().keys[:8])
    choice = choose(conductor)
    assert (choice.instance, choice.local_tokens, choice.prefix_tokens) == (1, 800, 800)
    assert choice.fetch is None
    assert choice.ttft_s == pytest.approx(0.2)
    assert choice.reason.why is Why.LOCAL_CACHE


def test_prefix_is_copied_from_a_busy_holder():
    """Holder: waits 1 s, computes 200. Other: fetches 800 in 0.08 s, computes 200."""
    conductor = make(2)
    conductor.index.add(1, request().keys[:8])
    conductor.cluster.free_at_s[1] = 1.0
    choice = choose(conductor)
    assert choice.instance == 0 and choice.prefix_tokens == 800 and choice.local_tokens == 0
    fetch = choice.fetch
    assert (fetch.source, fetch.target, fetch.first_block, fetch.num_blocks) == (1, 0, 0, 8)
    assert fetch.num_tokens == 800 and fetch.seconds == pytest.approx(0.08)
    assert choice.ttft_s == pytest.approx(0.08 + 0.2)
    assert choice.reason.why is Why.FETCH
    assert "fetches 800 tokens from instance 1 in 0.080 s" in str(choice.reason)


def test_only_missing_blocks_are_fetched():
    conductor = make(2)
    conductor.index.add(0, request().keys[:3])
    conductor.index.add(1, request().keys[:8])
    conductor.cluster.free_at_s[1] = 1.0
    choice = choose(conductor)
    assert choice.instance == 0 and choice.local_tokens == 300 and choice.prefix_tokens == 800
    assert (choice.fetch.first_block, choice.fetch.num_blocks) == (3, 5)
    assert choice.ttft_s == pytest.approx(0.05 + 0.2)


def test_sufficient_local_prefix_skips_the_fetch():
    """400 * 2 is not less than 800: by the threshold instance 0 computes the other 600."""
    conductor = make(2)
    conductor.index.add(0, request().keys[:4])
    conductor.index.add(1, request().keys[:8])
    conductor.cluster.free_at_s[1] = 1.0
    choice = choose(conductor)
    assert choice.instance == 0 and choice.fetch is None
    assert choice.ttft_s == pytest.approx(0.6)
    assert choice.reason.why is Why.RECOMPUTE_BALANCED
    conductor.policy = KVCacheCentric(balancing_threshold=1.9)
    assert choose(conductor).fetch.num_blocks == 4


def test_congested_source_favors_recomputing():
    """Ten others send for 5 s: a fetch takes 0.08 + min(5, 10 * 0.08) = 0.88 s, to compute 0.8."""
    conductor = make(2)
    conductor.index.add(1, request().keys[:8])
    conductor.cluster.free_at_s[1] = 9.0
    conductor.cluster.sending_until_s[1] = 5.0
    conductor.cluster.num_sending[1] = 10
    choice = choose(conductor)
    assert choice.instance == 0 and choice.fetch is None
    assert choice.ttft_s == pytest.approx(1.0)
    assert choice.reason.why is Why.RECOMPUTE_CHEAPER
    conductor.policy = KVCacheCentric(recompute_if_cheaper=False)  # as it is printed
    choice = choose(conductor)
    assert choice.fetch.seconds == pytest.approx(0.88) and choice.ttft_s == pytest.approx(1.08)


def test_least_loaded_source_is_fetched_from():
    conductor = make(4)
    for holder in (1, 2):
        conductor.index.add(holder, request().keys[:8])
        conductor.cluster.free_at_s[holder] = 9.0
    conductor.cluster.sending_until_s[1] = 0.5
    assert choose(conductor).fetch.source == 2


def test_blocks_not_yet_computed_are_not_fetched():
    """Instance 0 holds 2 blocks, and is to compute 8 more, when its queue of 5 s is over."""
    conductor = make(2)
    conductor.index.add(0, request().keys[:2])
    conductor.cluster.free_at_s[:2] = 5.0, 9.0
    first = conductor.decide(request(1), 0.0)
    assert first.prefill.instance == 0
    conductor.commit(first)
    conductor.cluster.free_at_s[1] = 0.0
    choice = choose(conductor)
    assert choice.instance == 1 and choice.fetch.num_blocks == 2
    assert choice.ttft_s == pytest.approx(0.02 + 0.8)
    conductor.cluster.free_at_s[:2] = 5.0, 9.0
    behind = choose(conductor)
    assert (behind.instance, behind.local_tokens) == (0, 999), "computed by then, on instance 0"
    conductor.cluster.free_at_s[:2] = 9.0, 0.0
    conductor.prefilled(1, 5.8)
    assert choose(conductor, now_s=5.8).fetch.num_blocks == 10


def test_queued_request_reuses_blocks_of_the_one_ahead():
    """Request 2 reuses what request 1 will have computed; both blocks are sendable in turn."""
    conductor = make(2)
    conductor.cluster.free_at_s[1] = 9.0
    conductor.commit(conductor.decide(request(1, 6), 0.0))
    conductor.commit(conductor.decide(request(2, 10), 0.0))
    keys = request().keys

    def sendable():
        return conductor.reservations.sendable(keys, conductor.index.match(keys)).tolist()

    assert conductor.index.match(keys).tolist() == [10, 0, 0] and sendable() == [0, 0, 0]
    conductor.prefilled(1, 0.6)
    assert sendable() == [6, 0, 0]
    conductor.prefilled(2, 1.0)
    assert sendable() == [10, 0, 0] and not conductor.reservations.uncomputed


def test_block_is_sendable_only_where_it_has_been_computed():
    conductor = make(3, policy=RoundRobin())
    for number in range(3):
        conductor.commit(conductor.decide(request(number), 0.0))
    keys = request().keys
    matched = conductor.index.match(keys)
    conductor.prefilled(1, 1.0)
    assert conductor.reservations.sendable(keys, matched).tolist() == [0, 10, 0, 0]
    assert matched.tolist() == [10, 10, 10, 0]
    conductor.failed(2)
    conductor.decoded(0)
    assert not conductor.reservations.uncomputed


def test_fetch_overlaps_with_the_queue():
    conductor = make(2, policy=KVCacheCentric(overlap_fetch=True))
    conductor.index.add(1, request().keys[:8])
    conductor.cluster.free_at_s[:2] = 0.05, 1.0
    assert choose(conductor).ttft_s == pytest.approx(max(0.08, 0.05) + 0.2)


def test_kv_of_a_decode_instance_is_fetched_too():
    conductor = make(1, 1)
    conductor.index.add(1, request().keys[:8])
    assert choose(conductor).fetch.source == 1
    conductor.cluster.up[1] = False
    conductor.admission = AcceptAll()
    assert choose(conductor).fetch is None, "it is down"


def test_the_last_token_is_always_computed():
    conductor = make(1)
    conductor.index.add(0, request().keys)
    choice = choose(conductor)
    assert choice.prefix_tokens == 999 and choice.prefill_s == pytest.approx(0.001)


def test_a_hot_prefix_spreads():
    """Nobody predicts it: a busy holder is copied from, until all can serve the prefix."""
    conductor = make(4, admission=AcceptAll())
    conductor.index.add(0, request().keys)
    for number in range(1000):
        conductor.commit(conductor.decide(request(number), now_s=0.0))
    assert conductor.index.holders(9) == [0, 1, 2, 3]
    waits = conductor.cluster.free_at_s[:4]
    assert waits.max() - waits.min() < 0.1


@given(
    local=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    busy=st.lists(st.integers(0, 2000), min_size=6, max_size=6),
    sending=st.lists(st.integers(0, 3), min_size=6, max_size=6),
    down=st.integers(0, 6),
    threshold=st.sampled_from([1, 1.5, 2, 4]),
    cheaper=st.booleans(),
    overlap=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_choice_matches_the_documented_loop(
    local, busy, sending, down, threshold, cheaper, overlap
):
    n, blocks = len(local), 12
    conductor = make(n, policy=KVCacheCentric(threshold, cheaper, overlap), admission=AcceptAll())
    cluster, asked = conductor.cluster, request(num_blocks=blocks)
    for i, count in enumerate(local):
        conductor.index.add(i, asked.keys[:count])
        cluster.free_at_s[i] = busy[i] * 1e-3
        cluster.num_sending[i], cluster.sending_until_s[i] = sending[i], sending[i] * 0.4
    if down < n - 1:
        cluster.up[down] = False

    up = [i for i in range(n) if cluster.up[i]]
    have = {i: min(local[i] * BLOCK, asked.num_tokens - 1) for i in up}
    best = max(have.values())
    source = min((i for i in up if have[i] == best), key=lambda i: (sending[i], i))
    ttft = {}
    for i in up:
        wait = busy[i] * 1e-3
        alone = wait + (asked.num_tokens - have[i]) * 1e-3
        own = (best - have[i]) * 1e-4
        fetch = own + min(sending[source] * 0.4, sending[source] * own)
        begin = max(fetch, wait) if overlap else fetch + wait
        fetched = begin + (asked.num_tokens - best) * 1e-3
        far = best > threshold * have[i]
        ttft[i] = (min(alone, fetched) if cheaper else fetched) if far else alone
    choice = conductor.decide(asked, 0.0).prefill
    assert f"TTFT, {choice.ttft_s:.3f} s" in str(choice.reason)
    assert choice.ttft_s == pytest.approx(min(ttft.values()))
    assert ttft[choice.instance] == pytest.approx(choice.ttft_s)
    if choice.fetch:
        assert choice.prefix_tokens == best and have[choice.fetch.source] == best


def test_fetching_is_never_worse_than_local_caches_alone():
    rng = np.random.default_rng(0)
    for _ in range(200):
        conductor = make(5, admission=AcceptAll())
        for i in range(5):
            conductor.index.add(i, request().keys[: rng.integers(0, 11)])
        conductor.cluster.free_at_s[:5] = rng.uniform(0, 2, 5)
        ours = choose(conductor).ttft_s
        conductor.policy = LocalCacheAware()
        assert ours <= choose(conductor).ttft_s + 1e-12


def test_bad_threshold_is_rejected():
    with pytest.raises(InvalidArgument, match="balancing_threshold must be at least 1, got 0.5"):
        KVCacheCentric(0.5)


def test_decode_role_is_not_chosen_for_prefill():
    conductor = make(2, 1)
    conductor.cluster.role[0] = Role.DECODE
    assert choose(conductor).instance == 1
