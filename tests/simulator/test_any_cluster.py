"""Any cluster, any rules, any failures: all are served or refused, and nothing is left over."""

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_serving.conductor import (
    AcceptAll,
    Baseline,
    EarlyRejection,
    KVCacheCentric,
    LoadBalance,
    LocalCacheAware,
    PredictiveRejection,
    Random,
    Slo,
)
from mooncake_serving.simulator import (
    Disaggregated,
    DisaggregatedOptions,
    Failure,
    PrefillOptions,
    conductor_of,
)
from mooncake_serving.simulator.traces import TraceProfile, scale_trace, synth_trace

PROFILE = TraceProfile.load(Path(__file__).parent / "conversation.profile.json")
TRACES = [scale_trace(synth_trace(PROFILE, 50, seed=seed), time=0.2) for seed in range(3)]
NUM_PREFILL, NUM_DECODE = 3, 2

failures = st.builds(
    Failure,
    st.integers(0, NUM_PREFILL + NUM_DECODE - 1),
    st.floats(0, 8),
    st.floats(0, 4),
)
options = st.builds(
    DisaggregatedOptions,
    num_prefill=st.just(NUM_PREFILL),
    num_decode=st.just(NUM_DECODE),
    prefill=st.builds(
        PrefillOptions,
        chunk_tokens=st.sampled_from([512, 4096, 100_000]),
        group_size=st.integers(1, 3),
        layer_wise=st.booleans(),
        use_cache=st.booleans(),
    ),
    dram_tokens=st.sampled_from([0, 5_000, 60_000, None]),
    ssd_tokens=st.sampled_from([0, 100_000]),
    eviction=st.sampled_from(["lru", "lfu", "sieve"]),
    max_batch_size=st.sampled_from([1, 5, 256]),
    stream=st.booleans(),
    event_delay_s=st.sampled_from([0.0, 0.5, 20.0]),
    failures=st.lists(failures, max_size=3).map(tuple),
)
policies = st.sampled_from([Random, LoadBalance, LocalCacheAware, KVCacheCentric])
rules = st.sampled_from([AcceptAll, Baseline, EarlyRejection, PredictiveRejection])


def run(options, trace, policy, rule, seed):
    slo = Slo(ttft_s=5.0, tbt_s=0.03)
    conductor = conductor_of(options, policy=policy(), admission=rule(), slo=slo, seed=seed)
    cluster = Disaggregated(options, conductor)
    return cluster, cluster.run(trace)


@given(options, st.sampled_from(TRACES), policies, rules, st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_everybody_is_served_or_refused_and_nothing_is_left(options, trace, policy, rule, seed):
    cluster, report = run(options, trace, policy, rule, seed)
    for job in report.jobs:
        assert (job.finished_s is None) != (job.rejected is None)
        if job.finished_s is not None:
            assert job.arrival_s < job.first_token_s <= job.finished_s
            gaps = job.gaps_s()
            assert len(gaps) == job.request.output_length - 1
            assert abs(gaps.sum() - (job.finished_s - job.first_token_s)) < 1e-6
    for instance in cluster.decode:
        assert instance.peak_tokens <= instance.capacity_tokens
        assert len(instance) == instance.reserved_tokens == 0
    for instance in cluster.prefill:
        assert len(instance) == 0
        for tier in (instance.store.dram, instance.store.ssd):
            assert tier.capacity_blocks is None or len(tier) <= tier.capacity_blocks
    assert not cluster.fetches and not cluster.streams and not cluster.landed
    sent, received = (
        sum(getattr(n, f"{w}_bytes") for n in cluster.nics) for w in ("sent", "received")
    )
    assert abs(sent - received) <= 1e-6 * max(1.0, sent)
    state = cluster.conductor.cluster
    for name in ("batch_size", "kv_tokens", "reserved_requests", "reserved_tokens", "num_sending"):
        assert not getattr(state, name).any(), name


@given(options, policies, rules)
@settings(max_examples=8, deadline=None)
def test_equal_runs_are_equal(options, policy, rule):
    first, second = (run(options, TRACES[0], policy, rule, 0)[1].summary() for _ in range(2))
    assert first == second
