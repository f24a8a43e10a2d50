"""The conductor's predictions for the simulated machine, against what then happens."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mooncake_serving.conductor import EarlyRejection, KVCacheCentric, Slo
from mooncake_simulator import (
    Disaggregated,
    DisaggregatedOptions,
    PrefillOptions,
    conductor_of,
    fit_costs,
)
from mooncake_simulator.machines import A800_NODE, A6000, LLAMA3_70B, LLAMA_13B
from mooncake_simulator.stages import pass_stages
from mooncake_simulator.step_cost import StepCost
from mooncake_simulator.traces import TraceProfile, TraceRequest, scale_trace, synth_trace

PROFILE = TraceProfile.load(Path(__file__).parent / "conversation.profile.json")
COST = StepCost(LLAMA3_70B, A800_NODE)


def test_step_cost_docstring_figures_are_current():
    cost = StepCost(LLAMA_13B, A6000)
    ms = [1e3 * cost.mixed_s([(num_tokens, 0)]) for num_tokens in (128, 256, 257)]
    assert ms == pytest.approx([52.3, 71.3, 94.4], abs=0.05)
    said = "{:.0f}, {:.0f} and {:.0f} ms for 128, 256 and 257 tokens".format(*ms)
    assert said in " ".join(StepCost.__doc__.split())


def test_decode_step_cost_matches_the_prediction():
    sizes = np.arange(1, 600)
    for tokens in (1, 1000, 16_384):
        predicted = fit_costs(LLAMA3_70B, A800_NODE, 4096).decode.seconds(sizes, sizes * tokens)
        steps = [COST.decode_s(size, size * tokens) for size in sizes.tolist()]
        assert predicted == pytest.approx(steps, rel=1e-12)


def test_decode_batches_stay_within_the_objective():
    """A step of 129 requests takes a third longer than one of 128; the objective is between."""
    options = DisaggregatedOptions(num_decode=1)
    slo = Slo(30, 0.039)
    conductor = conductor_of(options, admission=EarlyRejection(), slo=slo)
    trace = [TraceRequest(20.0 * i, 256, 400, (i,)) for i in range(1000)]
    report = Disaggregated(options, conductor).run(trace)
    assert 128 <= len(report.ttft_s) < len(trace)
    assert report.num_effective(slo.ttft_s, slo.tbt_s) == len(report.tbt_s)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("chunk_tokens", [1024, 4096, 32_768])
def test_single_prefill_takes_the_predicted_time(stages, chunk_tokens):
    costs = fit_costs(LLAMA3_70B, A800_NODE, chunk_tokens, stages)
    for num_tokens in (512, 3000, 20_000, 32_768, 100_000):
        for prefix in (0, num_tokens // 2):
            chunks = COST.chunks_s(num_tokens, prefix, chunk_tokens)
            ends = pass_stages([0.0] * stages, 0.0, chunks)
            predicted = float(costs.prefill.seconds(num_tokens, prefix))
            assert predicted == pytest.approx(ends[-1], rel=0.2)
            occupied = float(costs.occupancy.seconds(num_tokens, prefix))
            assert occupied == pytest.approx(ends[0], rel=0.2)


def predict_and_run(options, trace, policy=None):
    """Return all jobs, and the TTFT that the conductor predicted of each."""
    conductor = conductor_of(options, policy=policy)
    commit, predicted = conductor.commit, {}

    def note(decision):
        predicted[decision.request.request_id] = decision.prefill.ttft_s
        commit(decision)

    conductor.commit = note
    jobs = Disaggregated(options, conductor).run(trace).jobs
    return jobs, [predicted[job.job_id] for job in jobs]


@pytest.mark.parametrize(
    "options",
    [
        {"num_prefill": 4},
        {"num_prefill": 1, "prefill": PrefillOptions(group_size=4)},
        {"num_prefill": 4, "prefill": PrefillOptions(group_size=4)},
        {"num_prefill": 2, "prefill": PrefillOptions(group_size=2, chunk_tokens=16_384)},
        {"num_prefill": 4, "dram_tokens": 30_000, "ssd_tokens": 10**7},
    ],
    ids=["plain", "one group", "four groups", "large chunks", "ssd"],
)
def test_ttft_is_close_to_the_prediction(options):
    options = DisaggregatedOptions(num_decode=3, **options)
    trace = scale_trace(synth_trace(PROFILE, 400, seed=3), time=1.0)
    jobs, predicted = predict_and_run(options, trace)
    ttft_s = np.array([job.ttft_s for job in jobs])
    low, median, high = np.quantile(ttft_s / predicted, (0.1, 0.5, 0.9))
    assert low > 0.95 and median == pytest.approx(1, abs=0.05) and high < 1.15


def test_ttft_never_exceeds_the_prediction_by_much():
    options = DisaggregatedOptions(num_decode=3)
    jobs, predicted = predict_and_run(options, synth_trace(PROFILE, 600, seed=3))
    assert sum(job.fetched_tokens > 0 for job in jobs) > 100
    assert max(job.ttft_s - p for job, p in zip(jobs, predicted, strict=True)) < 0.5


def test_fetching_prompt_is_not_overtaken_by_a_later_one():
    """One prompt fetches 15 ms worth of KV when one of half a minute arrives behind it."""
    options = DisaggregatedOptions(num_prefill=2, num_decode=1)
    conductor = conductor_of(options, policy=KVCacheCentric(balancing_threshold=1.0))
    cluster = Disaggregated(options, conductor)
    conductor.cluster.free_at_s[0] = 1e3  # so that both are prefilled at the other one
    keys = tuple(range(9))
    cluster.prefill[0].store.insert(keys)
    conductor.index.add(0, keys)
    trace = [TraceRequest(0, 9 * 512 + 100, 1, keys), TraceRequest(0, 100_000, 1, ())]
    first, second = cluster.run(trace).jobs
    assert first.prefill_instance == second.prefill_instance == 1
    assert first.fetched_tokens == 9 * 512
    fetch_s = 9 * 512 * LLAMA3_70B.kv_bytes_per_token / A800_NODE.nic_bytes_per_s
    assert fetch_s < first.ttft_s < 0.2 and second.ttft_s > 20
    assert first.ttft_s == pytest.approx(first.decision.prefill.ttft_s, abs=0.05)


@pytest.mark.parametrize("recompute", [False, True], ids=["fetched", "recomputed"])
def test_fetch_is_delayed_by_kv_streaming_to_decode(recompute):
    """Instance 0 sends 100 blocks to be decoded when instance 1 needs 40 that only 0 has.

    To fetch them takes 2.2 s alone, to recompute them 2.9 s, and to fetch them during the stream
    4.5 s.
    """
    machine = replace(A800_NODE, nic_bytes_per_s=3e9)
    options = DisaggregatedOptions(num_prefill=2, num_decode=2, machine=machine)
    trace = [
        TraceRequest(0, 40 * 512, 1, tuple(range(40))),
        TraceRequest(20_000, 100 * 512, 2, tuple(range(1000, 1100))),
        TraceRequest(20_001, 40 * 512, 1, tuple(range(40))),
    ]
    policy = KVCacheCentric(recompute_if_cheaper=recompute)
    jobs, predicted = predict_and_run(options, trace, policy=policy)
    assert [job.prefill_instance for job in jobs] == [0, 0, 1]
    assert jobs[2].fetched_tokens == (0 if recompute else 40 * 512)
    assert jobs[2].ttft_s == pytest.approx(predicted[2], rel=0.05)


def test_fetches_over_slow_nics_take_about_the_predicted_time():
    """Were streams not counted, they would be late by 1.1 s in the mean."""
    options = DisaggregatedOptions(machine=replace(A800_NODE, nic_bytes_per_s=3e9))
    jobs, predicted = predict_and_run(options, synth_trace(PROFILE, 1000, seed=1))
    late_s = [job.ttft_s - p for job, p in zip(jobs, predicted, strict=True) if job.fetched_tokens]
    assert len(late_s) > 20 and np.mean(late_s) < 0.5
