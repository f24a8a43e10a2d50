"""Whole clusters: nothing is lost, no instance exceeds its memory, every run is the same."""

from dataclasses import replace
from pathlib import Path

import pytest

from mooncake_serving.conductor import (
    AcceptAll,
    Baseline,
    Conductor,
    EarlyRejection,
    InvalidArgument,
    KVCacheCentric,
    LocalCacheAware,
    PredictiveRejection,
    Random,
    Slo,
    Why,
)
from mooncake_simulator import (
    CoupledCluster,
    CoupledClusterOptions,
    Disaggregated,
    DisaggregatedOptions,
    Failure,
    Report,
    conductor_of,
)
from mooncake_simulator.coupled_options import Batching, CoupledOptions
from mooncake_simulator.job import Job
from mooncake_simulator.machines import A800_NODE, GPT3_175B
from mooncake_simulator.prefill import PrefillOptions
from mooncake_simulator.traces import (
    TraceProfile,
    TraceRequest,
    scale_trace,
    synth_trace,
    trace_stats,
    unshared,
)

from .test_any_cluster import check_everybody_is_served_or_refused, check_nothing_is_left

PROFILE = TraceProfile.load(Path(__file__).parent / "conversation.profile.json")
TRACE = scale_trace(synth_trace(PROFILE, 400, seed=3), time=0.25)
ONE_GPU = replace(A800_NODE, name="one GPU", memory_bytes=80e9)
SMALL = DisaggregatedOptions(num_prefill=4, num_decode=3, dram_tokens=400_000)


def serve(options=SMALL, trace=TRACE, **conductor):
    cluster = Disaggregated(options, conductor_of(options, **conductor))
    return cluster, cluster.run(trace)


def test_requests_and_bytes_are_conserved():
    cluster, report = serve()
    check_everybody_is_served_or_refused(report, TRACE)
    check_nothing_is_left(cluster, report)
    per_token = SMALL.model.kv_bytes_per_token
    streamed = sum(j.request.input_length for j in report.jobs if j.request.output_length > 1)
    fetched = sum(job.fetched_tokens for job in report.jobs)
    assert report.sent_bytes == pytest.approx((streamed + fetched) * per_token)
    received = sum(nic.received_bytes for nic in cluster.nics)
    assert received == pytest.approx(report.sent_bytes)
    assert fetched > 0


def test_seed_determines_the_run():
    def times(seed):
        return [job.finished_s for job in serve(policy=Random(), seed=seed)[1].jobs]

    assert times(5) == times(5) != times(6)


def test_index_matches_stores_if_events_are_not_delayed():
    cluster, _ = serve()
    for request in TRACE:
        held = [node.store.match(request.hash_ids)[0] for node in cluster.prefill]
        index = cluster.conductor.index.match(request.hash_ids)
        assert index[: SMALL.num_prefill].tolist() == held


@pytest.mark.parametrize("kind", [PrefillOptions, CoupledOptions])
def test_block_size_cannot_be_set_per_component(kind):
    """Another size in one place alone would count tokens that no cache holds."""
    with pytest.raises(TypeError, match="block_tokens"):
        kind(block_tokens=4096)


def test_hit_rate_is_bounded_by_an_unlimited_cache():
    limit = trace_stats(TRACE).max_hit_rate
    ample = DisaggregatedOptions(num_prefill=1, num_decode=3, dram_tokens=None)
    assert 0 < serve(ample)[1].hit_rate <= limit
    engine = CoupledOptions(use_cache=True)
    coupled = CoupledCluster(CoupledClusterOptions(num_instances=2, engine=engine))
    assert 0 < coupled.run(TRACE).hit_rate <= limit


def test_more_cache_saves_prefill_and_an_ssd_counts_as_cache():
    def gpu_s(**options):
        return serve(DisaggregatedOptions(num_prefill=4, num_decode=3, **options))[1].prefill_gpu_s

    none = gpu_s(prefill=PrefillOptions(use_cache=False))
    little, with_ssd, much = (
        gpu_s(dram_tokens=30_000),
        gpu_s(dram_tokens=30_000, ssd_tokens=10**7),
        gpu_s(dram_tokens=None),
    )
    assert max(much, with_ssd) < little < none


@pytest.mark.parametrize("failed", [0, 5])
def test_requests_of_a_failed_instance_are_served_by_others(failed):
    options = DisaggregatedOptions(
        num_prefill=4, num_decode=3, failures=(Failure(failed, 8.0, 10.0), Failure(1, 9.0, 5.0))
    )
    cluster, report = serve(options)
    check_everybody_is_served_or_refused(report, TRACE)
    check_nothing_is_left(cluster, report)
    assert sum(job.restarts for job in report.jobs) > 0
    assert all(job.rejected is None for job in report.jobs)


@pytest.mark.parametrize("failed", [(0,), (1,), (0, 1)], ids=["prefill", "decode", "both"])
@pytest.mark.parametrize("rule", [AcceptAll(), EarlyRejection()], ids=["all", "early"])
def test_arrivals_without_an_instance_wait_if_all_are_accepted(failed, rule):
    """The second request is being prefilled when an instance fails, and the third one arrives."""
    failures = tuple(Failure(instance, 5.0, 10.0 + instance) for instance in failed)
    options = DisaggregatedOptions(num_prefill=1, num_decode=1, failures=failures)
    trace = list(unshared([TraceRequest(1e3 * at, 8192, 20, ()) for at in (0, 4.9, 6, 30)]))
    cluster, report = serve(options, trace, admission=rule)
    check_everybody_is_served_or_refused(report, trace)
    check_nothing_is_left(cluster, report)
    assert not cluster._waiting
    if rule == AcceptAll():
        assert [job.rejected for job in report.jobs] == [None] * 4
        back_s = 15.0 + max(failed)
        assert all(job.first_token_s > back_s for job in report.jobs[1:3])
    else:
        why = "NO_PREFILL_INSTANCE" if 0 in failed else "NO_DECODE_INSTANCE"
        assert [job.rejected for job in report.jobs] == [None, why, why, None]


def test_restarted_request_is_judged_from_its_arrival():
    trace = [TraceRequest(0.0, 40_000, 2, ()), TraceRequest(0.1, 40_000, 2, ())]

    def run(ttft_s):
        options = DisaggregatedOptions(
            num_prefill=2, num_decode=1, failures=(Failure(0, 6.5, 100.0),)
        )
        conductor = conductor_of(options, admission=EarlyRejection(), slo=Slo(ttft_s, 0.1))
        return Disaggregated(options, conductor).run(trace).jobs

    anew = next(job for job in run(30.0) if job.restarts)
    assert 12 < anew.ttft_s < 30
    refused = next(job for job in run(12.0) if job.restarts)
    assert refused.rejected and refused.decision.reason.why is Why.PREFILL_LOAD


def test_overlapping_failures_last_until_the_later_recovery(monkeypatch):
    recovered = []
    bring_back = Conductor.recovered

    def note(self, instance):
        recovered.append(instance)
        bring_back(self, instance)

    monkeypatch.setattr(Conductor, "recovered", note)
    failures = (Failure(0, 1.0, 50.0), Failure(0, 2.0, 1.0), Failure(1, 1.0, 2.0))
    serve(DisaggregatedOptions(num_prefill=4, num_decode=3, failures=failures))
    assert recovered == [1, 0]


@pytest.mark.parametrize("rule", [Baseline(), EarlyRejection(), PredictiveRejection(decode_s=5.0)])
def test_rejected_request_has_a_reason_and_leaves_nothing(rule):
    slo = Slo(ttft_s=1.5, tbt_s=0.024)
    cluster, report = serve(admission=rule, slo=slo)
    check_everybody_is_served_or_refused(report, TRACE)
    check_nothing_is_left(cluster, report)
    rejected = {job.rejected for job in report.jobs if job.rejected}
    assert rejected and rejected <= {
        "PREFILL_LOAD", "DECODE_LOAD", "NO_DECODE_ROOM", "FORECAST_LOAD"
    }  # fmt: skip
    late = [job for job in report.jobs if job.rejected and job.first_token_s is not None]
    if type(rule) is Baseline:
        assert late  # it looks at TBT only after the prefill
    assert report.ttft_s.max() < serve(policy=KVCacheCentric())[1].ttft_s.max()


def test_shared_cache_hits_more_than_local_caches():
    ample = DisaggregatedOptions(num_prefill=4, num_decode=3)
    trace = scale_trace(TRACE, time=4.0)  # prompts wait for each other's prefill less
    shared = serve(ample, trace, policy=KVCacheCentric(balancing_threshold=1.0))[1]
    local = serve(ample, trace, policy=LocalCacheAware())[1]
    by_chance = serve(ample, trace, policy=Random())[1]
    assert shared.hit_rate > local.hit_rate > by_chance.hit_rate


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_decode": 0}, "num_decode must be at least 1.* got 0"),
        ({"num_prefill": -1}, "num_prefill must be at least 1.* got -1"),
        ({"num_prefill": 1.5}, "DisaggregatedOptions: num_prefill must be an integer, got 1.5"),
        ({"num_decode": True}, "num_decode must be an integer, got True"),
        ({"max_batch_size": 0}, "max_batch_size must be at least 1, got 0"),
        ({"dram_tokens": 3e6}, "dram_tokens must be an integer, got 3000000.0"),
        ({"ssd_tokens": False}, "ssd_tokens must be an integer, got False"),
        ({"event_delay_s": True}, "event_delay_s must be at least 0, got True"),
        ({"model": GPT3_175B, "machine": ONE_GPU}, "must fit into 72 GB of one GPU, got GPT-3"),
        ({"eviction": "foo"}, "eviction must be one of lru, fifo, .*, sieve, got 'foo'"),
        ({"eviction": "belady"}, "eviction must be one of lru, .*, sieve, got 'belady'"),
        ({"failures": (Failure(16, 0.0, 1.0),)}, "failures must be of instances 0 to 15"),
        ({"failures": (1,)}, "DisaggregatedOptions: failures must be a Failure, got 1"),
        ({"prefill": None}, "prefill must be a PrefillOptions, got None"),
        ({"machine": None}, "DisaggregatedOptions: machine must be a Machine, got None"),
        (
            {"prefill": PrefillOptions(group_size=81)},
            "prefill.group_size must be at most 80, the layers of LLaMA3-70B, got 81",
        ),
    ],
)
def test_bad_cluster_options_are_rejected(options, message):
    with pytest.raises(InvalidArgument, match=message):
        DisaggregatedOptions(**options)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: Failure(1.5, 0.0, 1.0), "Failure: instance must be an integer, got 1.5"),
        (lambda: Failure(0, "a", 1), "Failure: at_s must be at least 0, got 'a'"),
        (lambda: Failure(0, 0.0, float("inf")), "Failure: down_s must be at least 0, got inf"),
        (lambda: CoupledOptions(batching="chunked"), "batching must be a Batching, got 'chunked'"),
        (
            lambda: CoupledClusterOptions(engine=None),
            "CoupledClusterOptions: engine must be a CoupledOptions, got None",
        ),
        (
            lambda: CoupledClusterOptions(machine=None),
            "CoupledClusterOptions: machine must be a Machine, got None",
        ),
        (lambda: PrefillOptions(chunk_tokens=0.5), "chunk_tokens must be an integer, got 0.5"),
        (lambda: CoupledOptions(token_budget=0), "token_budget must be at least 1, got 0"),
        (
            lambda: CoupledClusterOptions(num_instances=True),
            "CoupledClusterOptions: num_instances must be an integer, got True",
        ),
    ],
)
def test_bad_component_options_are_rejected(call, message):
    with pytest.raises(InvalidArgument, match=message):
        call()


@pytest.mark.parametrize("policy", [KVCacheCentric(), LocalCacheAware()], ids=repr)
def test_coupled_cluster_rejects_cache_aware_policies(policy):
    with pytest.raises(
        InvalidArgument, match=r"policy must be one that needs no caches, got \w+\("
    ):
        CoupledCluster(CoupledClusterOptions(), policy)


def test_pipeline_may_have_a_node_for_each_layer():
    options = DisaggregatedOptions(
        num_prefill=1, num_decode=1, prefill=PrefillOptions(group_size=80)
    )
    assert len(serve(options, TRACE[:3])[1].ttft_s) == 3


@pytest.mark.parametrize(
    "roles, message",
    [
        ((3, 2), "over 2 prefill, then 3 decode instances, got 3 and 2 of 5"),
        ((1, 1), "over 2 prefill, then 3 decode instances, got 1 and 1 of 2"),
        ((2, 4), "over 2 prefill, then 3 decode instances, got 2 and 4 of 6"),
    ],
)
def test_conductor_of_another_cluster_is_rejected(roles, message):
    options = DisaggregatedOptions(num_prefill=2, num_decode=3)
    other = conductor_of(DisaggregatedOptions(num_prefill=roles[0], num_decode=roles[1]))
    with pytest.raises(InvalidArgument, match=f"Disaggregated: conductor must be {message}"):
        Disaggregated(options, other)


def a_cluster(kind):
    if kind is CoupledCluster:
        return CoupledCluster(CoupledClusterOptions(num_instances=1))
    options = DisaggregatedOptions(num_prefill=1, num_decode=1)
    return Disaggregated(options, conductor_of(options))


@pytest.mark.parametrize("kind", [Disaggregated, CoupledCluster])
@pytest.mark.parametrize(
    "times_ms, message",
    [
        ((0, 9000, 5000, 1), "got request 2 at 5000 ms after 9000 ms"),
        ((-1,), "the first at 0 ms or later, got request 0 at -1 ms after 0 ms"),
        ((0, float("nan")), "got request 1 at nan ms after 0 ms"),
    ],
)
def test_requests_out_of_order_are_rejected(kind, times_ms, message):
    cluster = a_cluster(kind)
    with pytest.raises(
        InvalidArgument, match=rf"{kind.__name__}.run: requests must be .*{message}"
    ):
        cluster.run([TraceRequest(at_ms, 600, 3) for at_ms in times_ms])
    assert cluster.jobs == [] and cluster.run([TraceRequest(0, 600, 3)]).summary()["served"] == 1


@pytest.mark.parametrize("kind", [Disaggregated, CoupledCluster])
@pytest.mark.parametrize("trace", [[], [TraceRequest(5, 600, 3)]], ids=["empty", "one request"])
def test_a_cluster_runs_once(kind, trace):
    cluster = a_cluster(kind)
    cluster.run(trace)
    with pytest.raises(InvalidArgument, match="run: a cluster must run once, got a second trace"):
        cluster.run(trace)


def with_one_too_long(capacity_tokens):
    """Small requests at one moment, and a prompt and an output of which each is just too long."""
    lengths = [(600, 20), (capacity_tokens, 1), (capacity_tokens - 599, 600), *[(600, 20)] * 5]
    return list(unshared([TraceRequest(0, *both, ()) for both in lengths]))


RULES = [
    AcceptAll(),
    Baseline(),
    Baseline(pre_select=True),
    EarlyRejection(),
    PredictiveRejection(),
]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_what_fits_nowhere_is_refused_and_holds_up_no_other(rule):
    options = DisaggregatedOptions(num_prefill=1, num_decode=1)
    trace = with_one_too_long(options.machine.kv_capacity_tokens(options.model))
    cluster, report = serve(options, trace, admission=rule)
    check_everybody_is_served_or_refused(report, trace)
    check_nothing_is_left(cluster, report)
    assert [job.rejected for job in report.jobs] == [None, "TOO_LONG", "TOO_LONG"] + [None] * 5
    summary = report.summary()
    assert (summary["requests"], summary["served"], summary["rejected"]) == (8, 6, 2)


@pytest.mark.parametrize("engine", Batching, ids=lambda batching: batching.value)
def test_what_fits_into_no_coupled_instance_is_refused_and_holds_up_no_other(engine):
    options = CoupledClusterOptions(num_instances=2, engine=CoupledOptions(batching=engine))
    trace = with_one_too_long(options.machine.kv_capacity_tokens(options.model))
    done = []
    report = CoupledCluster(options, on_progress=lambda: done.append(1)).run(trace)
    assert [job.rejected for job in report.jobs] == [None, "TOO_LONG", "TOO_LONG"] + [None] * 5
    assert len(report.ttft_s) == 6 and len(done) == len(trace)


@pytest.mark.parametrize(
    "options",
    [
        {"failures": (Failure(0, 10.0, 5000.0),)},
        {"dram_tokens": 2048, "event_delay_s": 5000.0},
    ],
    ids=["a late recovery", "late events"],
)
def test_a_run_ends_with_its_last_token(options):
    options = DisaggregatedOptions(num_prefill=2, num_decode=1, **options)
    trace = list(unshared([TraceRequest(1e3 * at, 4096, 5, ()) for at in (3, 4, 5, 20)]))
    cluster, report = serve(options, trace)
    assert cluster.clock.now > 5000  # something happens later
    last_s = max(job.finished_s for job in report.jobs)
    assert report.simulated_s == report.summary()["simulated_s"] == last_s - 3 < 60


def test_a_run_without_tokens_takes_no_time():
    capacity = SMALL.machine.kv_capacity_tokens(SMALL.model)
    for trace in ([], list(unshared([TraceRequest(1e3, capacity, 1, ())]))):
        report = serve(trace=trace)[1]
        assert report.simulated_s == 0.0
        times = {
            name: value for name, value in report.summary().items() if name[:3] in ("ttf", "tbt")
        }
        assert len(times) == 8 and set(times.values()) == {None}, "no one was served in 0 s"


def test_request_that_just_fits_is_served():
    options = DisaggregatedOptions(num_prefill=1, num_decode=1)
    capacity = options.machine.kv_capacity_tokens(options.model)
    trace = list(unshared([TraceRequest(0, capacity - 9, 9, ())]))
    cluster, report = serve(options, trace)
    check_everybody_is_served_or_refused(report, trace)
    check_nothing_is_left(cluster, report)
    coupled = CoupledCluster(CoupledClusterOptions(num_instances=1)).run(trace)
    assert len(report.ttft_s) == len(coupled.ttft_s) == 1


def test_report_rejects_an_unfinished_request():
    job = Job(0, TRACE[0], 0.0)
    with pytest.raises(InvalidArgument, match="served or refused, each of 1, got 0 and 0"):
        Report([job], 1)


@pytest.mark.parametrize(
    "leaves_at_s, num_sent, num_stored",
    [(None, 6, 16), (0.5, 10, 16), (1.001, 6, 16)],
    ids=["nothing leaves", "before the fetch", "during it"],
)
def test_fetch_brings_only_the_missing_blocks(leaves_at_s, num_sent, num_stored):
    """The target is believed to hold the first 4 of 10 blocks, and loses them; 16 are asked for."""
    options = DisaggregatedOptions(num_prefill=2, num_decode=1)
    keys = tuple(range(16))
    conductor = conductor_of(options, policy=KVCacheCentric(balancing_threshold=1.0))
    cluster = Disaggregated(options, conductor)
    conductor.cluster.free_at_s[0] = 1e3  # so that it is prefilled at the other one
    for instance, count in ((0, 10), (1, 4)):
        cluster.prefill[instance].store.insert(keys[:count])
        conductor.index.add(instance, keys[:count])
    if leaves_at_s is not None:
        cluster.clock.at(leaves_at_s, cluster.prefill[1].store.clear)
    (job,) = cluster.run([TraceRequest(1000, 16 * 512, 1, keys)]).jobs
    assert job.prefill_instance == 1
    sent = num_sent * 512 * options.model.kv_bytes_per_token
    assert cluster.nics[0].sent_bytes == pytest.approx(sent)
    assert job.prefix_tokens == (0 if leaves_at_s == 1.001 else 10 * 512)
    assert cluster.prefill[1].store.match(keys)[0] == num_stored


@pytest.mark.parametrize("nic_bytes_per_s", [100e9, 1e9], ids=["landed", "on its way"])
def test_kv_is_sent_again_if_decode_moves_elsewhere(nic_bytes_per_s):
    machine = replace(A800_NODE, nic_bytes_per_s=nic_bytes_per_s)
    options = DisaggregatedOptions(machine=machine, num_prefill=1, num_decode=2)
    trace = [TraceRequest(0, 8192, 10, tuple(range(16)))]
    cluster = Disaggregated(options, conductor_of(options, admission=EarlyRejection()))

    def fill():  # more is decoded at the chosen instance than was foreseen
        cluster.conductor.cluster.kv_tokens[1] += cluster.decode[0].capacity_tokens

    cluster.clock.at(0.01, fill)
    (job,) = cluster.run(trace).jobs
    assert job.decode_instance == 2 and job.finished_s is not None
    num_bytes = 8192 * options.model.kv_bytes_per_token
    first = min(num_bytes, job.first_token_s * nic_bytes_per_s)
    assert [nic.received_bytes for nic in cluster.nics] == pytest.approx([0, first, num_bytes])
    assert cluster.nics[0].sent_bytes == pytest.approx(first + num_bytes)
    assert job.gaps_s()[0] > num_bytes / nic_bytes_per_s
    assert not cluster.streams and not cluster.landed and not cluster.decode[0].peak_tokens
