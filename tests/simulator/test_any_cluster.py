"""Any cluster, rules and failures: all requests are served or refused, and nothing is left over."""

from dataclasses import replace
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
    RoundRobin,
    Slo,
)
from mooncake_simulator import (
    Batching,
    CoupledCluster,
    CoupledClusterOptions,
    CoupledOptions,
    Disaggregated,
    DisaggregatedOptions,
    Failure,
    PrefillOptions,
    conductor_of,
)
from mooncake_simulator.machines import A800_NODE, LLAMA3_70B
from mooncake_simulator.traces import TraceProfile, scale_trace, synth_trace

PROFILE = TraceProfile.load(Path(__file__).parent / "conversation.profile.json")
TRACES = [scale_trace(synth_trace(PROFILE, 50, seed=seed), time=0.2) for seed in range(3)]


def machine_of(capacity_tokens, nic_bytes_per_s=A800_NODE.nic_bytes_per_s):
    """A node with just so much memory for KV: prompts have 12,000 tokens in the mean."""
    room = (capacity_tokens + 0.5) * LLAMA3_70B.kv_bytes_per_token
    memory_bytes = (LLAMA3_70B.weight_bytes + room) / A800_NODE.memory_share
    return replace(A800_NODE, memory_bytes=memory_bytes, nic_bytes_per_s=nic_bytes_per_s)


capacities = st.sampled_from([20_000, 60_000, 200_000])


@st.composite
def clusters(draw):
    num_prefill, num_decode = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    instances = st.integers(0, num_prefill + num_decode - 1)
    failures = st.builds(Failure, instances, st.floats(0, 20), st.floats(0, 10))
    return DisaggregatedOptions(
        machine=machine_of(draw(capacities), draw(st.sampled_from([100e9, 3e9]))),
        num_prefill=num_prefill,
        num_decode=num_decode,
        prefill=PrefillOptions(
            chunk_tokens=draw(st.sampled_from([512, 4096, 100_000])),
            group_size=draw(st.integers(1, 3)),
            layer_wise=draw(st.booleans()),
            use_cache=draw(st.booleans()),
        ),
        dram_tokens=draw(st.sampled_from([0, 5_000, 60_000, None])),
        ssd_tokens=draw(st.sampled_from([0, 100_000])),
        eviction=draw(st.sampled_from(["lru", "lfu", "sieve"])),
        max_batch_size=draw(st.sampled_from([1, 5, 256])),
        stream=draw(st.booleans()),
        event_delay_s=draw(st.sampled_from([0.0, 0.5, 20.0])),
        failures=tuple(draw(st.lists(failures, max_size=4))),
    )


either = st.booleans()
policies = st.sampled_from([Random, LoadBalance, LocalCacheAware, KVCacheCentric])
looks = {"needs_room": either, "per_instance": either, "check_again": either}
rules = st.one_of(
    st.builds(AcceptAll, needs_room=either),
    st.builds(Baseline, needs_room=either, pre_select=either),
    st.builds(EarlyRejection, **looks),
    st.builds(PredictiveRejection, **looks, decode_s=st.sampled_from([0.1, 2.0, 30.0])),
)
slos = st.builds(Slo, st.sampled_from([5.0, 300.0]), st.sampled_from([0.03, 1.0]))


def run(options, trace, policy, rule, slo, seed):
    conductor = conductor_of(options, policy=policy(), admission=rule, slo=slo, seed=seed)
    cluster = Disaggregated(options, conductor)
    end = conductor.decoded

    def decoded(request_id):
        job, decision = cluster.jobs[request_id], conductor.reservations.open[request_id]
        if decision.decode is not None and job.num_decode_steps:
            assert job.decode_instance == decision.decode.instance
        end(request_id)

    conductor.decoded = decoded
    return cluster, cluster.run(trace)


def check_everybody_is_served_or_refused(report, trace):
    assert [job.request for job in report.jobs] == list(trace)
    summary = report.summary()
    assert summary["served"] + summary["rejected"] == summary["requests"] == len(trace)
    for job in report.jobs:
        assert (job.finished_s is None) != (job.rejected is None)
        if job.finished_s is not None:
            assert job.arrival_s < job.first_token_s <= job.finished_s
            gaps = job.gaps_s()
            assert len(gaps) == job.request.output_length - 1 and (gaps > 0).all()
            assert abs(gaps.sum() - (job.finished_s - job.first_token_s)) < 1e-6


def check_nothing_is_left(cluster, report):
    for instance in cluster.decode:
        assert instance.peak_tokens <= instance.capacity_tokens
        assert len(instance) == instance.reserved_tokens == 0
    for instance in cluster.prefill:
        assert len(instance) == 0
        for tier in (instance.store.dram, instance.store.ssd):
            assert tier.capacity_blocks is None or len(tier) <= tier.capacity_blocks
    assert all(job.fetch is None for job in report.jobs)
    assert not cluster.streams and not cluster.landed
    state = cluster.conductor.cluster
    for name in ("batch_size", "kv_tokens", "reserved_requests", "reserved_tokens", "num_sending"):
        assert not getattr(state, name).any(), name


@given(clusters(), st.sampled_from(TRACES), policies, rules, slos, st.integers(0, 3))
@settings(max_examples=250, deadline=None)
def test_every_request_is_served_or_rejected_and_nothing_is_left(
    options, trace, policy, rule, slo, seed
):
    cluster, report = run(options, trace, policy, rule, slo, seed)
    check_everybody_is_served_or_refused(report, trace)
    check_nothing_is_left(cluster, report)
    if rule == AcceptAll():
        assert {job.rejected for job in report.jobs} <= {None, "TOO_LONG"}
    sent, received = (
        sum(getattr(n, f"{w}_bytes") for n in cluster.nics) for w in ("sent", "received")
    )
    assert abs(sent - received) <= 1e-6 * max(1.0, sent)
    decoded = [job for job in report.jobs if job.finished_s is not None and job.num_decode_steps]
    least = sum(job.request.input_length for job in decoded) * options.model.kv_bytes_per_token
    streamed = sum(nic.received_bytes for nic in cluster.nics[options.num_prefill :])
    assert streamed >= least * (1 - 1e-6)

    if not options.failures and not options.event_delay_s:
        for request in trace:
            known = cluster.conductor.index.match(request.hash_ids)
            for instance, tokens in zip(cluster.prefill, known, strict=False):
                assert tokens <= instance.store.match(request.hash_ids)[0], "the index knows better"

    capacity = options.machine.kv_capacity_tokens(options.model)
    for job in report.jobs:
        if job.num_kv_tokens > capacity:
            assert job.rejected in ("TOO_LONG", "NO_PREFILL_INSTANCE") and job.gpu_s == 0


@given(clusters(), policies, rules, slos)
@settings(max_examples=8, deadline=None)
def test_equal_runs_have_equal_results(options, policy, rule, slo):
    first, second = (run(options, TRACES[0], policy, rule, slo, 0)[1].summary() for _ in range(2))
    assert first == second


engines = st.builds(
    CoupledOptions,
    batching=st.sampled_from(Batching),
    token_budget=st.sampled_from([128, 512]),
    max_batched_tokens=st.sampled_from([512, 8192]),
    max_batch_size=st.sampled_from([1, 5, 256]),
    use_cache=either,
)
coupled_clusters = st.builds(
    CoupledClusterOptions,
    machine=st.builds(machine_of, capacities),
    num_instances=st.integers(1, 3),
    engine=engines,
)


blind = st.sampled_from([Random, RoundRobin, LoadBalance])


@given(coupled_clusters, st.sampled_from(TRACES), blind, st.integers(0, 3))
@settings(max_examples=20, deadline=None)
def test_coupled_clusters_serve_every_request_they_can_hold(options, trace, policy, seed):
    cluster = CoupledCluster(options, policy(), seed=seed)
    report = cluster.run(trace)
    check_everybody_is_served_or_refused(report, trace)
    for instance in cluster.instances:
        assert instance.peak_tokens <= instance.capacity_tokens
        assert len(instance) == instance.reserved_tokens == 0
    capacity = options.machine.kv_capacity_tokens(options.model)
    for job in report.jobs:
        assert job.rejected == (None if job.num_kv_tokens <= capacity else "TOO_LONG")
