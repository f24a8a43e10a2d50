"""The orders that the papers report, where a small trace is enough to see them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mooncake_serving.simulator.hit_rate import replay
from mooncake_serving.simulator.machines import A800_NODE, LLAMA3_70B
from mooncake_serving.simulator.pooling import _Pool, serve_pooled
from mooncake_serving.simulator.reproductions import (
    REPRODUCTIONS,
    Setup,
    arxiv_datasets,
)
from mooncake_serving.simulator.reproductions.arxiv_layer_wise import store_latency_s
from mooncake_serving.simulator.reproductions.made_up_datasets import (
    ARXIV_SUMMARIZATION,
    L_EVAL,
    SIMULATED,
    make,
)
from mooncake_serving.simulator.reproductions.made_up_toolagent import like_toolagent
from mooncake_serving.simulator.reproductions.workloads import like_synthetic
from mooncake_serving.simulator.step_cost import StepCost
from mooncake_serving.simulator.traces import (
    TraceProfile,
    TraceRequest,
    scale_trace,
    synth_trace,
    trace_stats,
)

PROFILE = TraceProfile.load(Path(__file__).parent / "conversation.profile.json")
CONVERSATION = Setup(scale_trace(synth_trace(PROFILE, 300, seed=0), time=0.5), "made up")


def claims(name, setup=CONVERSATION):
    outcome = REPRODUCTIONS[name](setup)
    assert outcome.rows and all(np.isfinite(row.ours) for row in outcome.rows)
    return {claim.what: claim.holds for claim in outcome.claims}


@pytest.mark.parametrize(
    "name",
    ["sarathi-tiles", "sarathi-pd-peak", "sarathi-serve-table4", "fast25-fig14", "arxiv-fig7"],
)
def test_every_claim_of_these_papers_is_found(name):
    assert all(claims(name, Setup([], "")).values())


def test_tile_costs_are_near_the_measured_ones():
    outcome = REPRODUCTIONS["sarathi-tiles"](CONVERSATION)
    for row in outcome.rows:
        assert row.ours == pytest.approx(row.published, rel=0.06)


def test_mooncake_serves_more_requests_in_time_and_with_less_prefill():
    found = claims("fast25-fig1")
    assert found["Mooncake serves more at every limit"]
    assert found["prefill GPU time: Mooncake < prefix caching < vLLM < chunked prefill"]


def test_the_made_up_synthetic_trace_has_the_published_figures():
    stats = trace_stats(like_synthetic(0))
    assert stats.input.mean == pytest.approx(15325, abs=1)
    assert stats.output.mean == pytest.approx(149, abs=1)
    assert (stats.num_requests, stats.num_blocks) == (3993, 121_877)
    assert stats.num_unique_blocks == 43_924 and stats.max_hit_rate == pytest.approx(
        0.651, abs=1e-3
    )
    assert stats.requests_per_s == pytest.approx(3.91, rel=0.05)
    for capacity, published in ((1e6, 0.142), (3e6, 0.315), (1e7, 0.577)):
        hit_rate = replay(like_synthetic(0), capacity).hit_rate
        assert hit_rate == pytest.approx(published, abs=0.015)


def test_the_made_up_tool_and_agent_trace_has_the_published_figures():
    requests = like_toolagent(0)
    assert len(requests) == 23_608 and requests[-1].timestamp_ms == pytest.approx(3.6e6, rel=0.03)
    assert np.mean([r.input_length for r in requests]) == pytest.approx(8596, rel=0.02)
    assert np.mean([r.output_length for r in requests]) == pytest.approx(182, rel=0.02)
    assert len({key for r in requests for key in r.hash_ids}) == pytest.approx(183_166, rel=0.02)
    for blocks, published in ((500, 0.363), (6000, 0.432), (float("inf"), 0.591)):
        assert replay(requests, 512 * blocks).hit_rate == pytest.approx(published, abs=0.03)


@pytest.mark.parametrize(
    "dataset, cached", [(ARXIV_SUMMARIZATION, 0.0), (L_EVAL, 0.8), (SIMULATED[16], 0.5)]
)
def test_made_up_datasets_have_the_published_averages(dataset, cached):
    requests = make(dataset, 2.0, 2000, seed=1)
    tokens = [r.input_length for r in requests]
    assert np.mean(tokens) == pytest.approx(dataset.input_tokens, rel=0.05)
    outputs = [r.output_length for r in requests]
    assert np.mean(outputs) == pytest.approx(dataset.output_tokens, rel=0.05)
    assert requests[-1].timestamp_ms == pytest.approx(1e6, rel=0.1), "2,000 at 2 a second"
    assert replay(requests, float("inf")).hit_rate == pytest.approx(cached, abs=0.02)
    starts = {r.hash_ids[0]: r.hash_ids for r in requests}
    for request in requests:
        other = starts[request.hash_ids[0]]
        common = sum(a == b for a, b in zip(request.hash_ids, other, strict=False))
        assert set(request.hash_ids) & set(other) == set(request.hash_ids[:common])


def test_mooncake_serves_more_of_a_dataset_that_can_be_cached(monkeypatch):
    monkeypatch.setattr(arxiv_datasets, "NUM_REQUESTS", 120)
    rates = arxiv_datasets._highest_rates(CONVERSATION, L_EVAL, arxiv_datasets._mean_gap)
    assert rates["Mooncake 3P + 1D"] > rates["vLLM prefix caching"] > rates["vLLM"] > 0
    gain = arxiv_datasets._gain(rates, "vLLM")
    assert gain == pytest.approx(100 * (rates["Mooncake 3P + 1D"] / rates["vLLM"] - 1))


def test_early_rejection_wastes_no_prefill_and_refuses_fewer_and_prediction_even_fewer():
    # Long enough to settle: at first nobody has been decoded for t_d yet.
    overloaded = Setup(scale_trace(synth_trace(PROFILE, 2000, seed=0), time=0.6), "made up")
    rows = {row.what: row.ours for row in REPRODUCTIONS["arxiv-overload"](overloaded).rows}
    baseline, early, prediction = (
        rows[f"{rule}: refused"] for rule in ("baseline", "early rejection", "with prediction")
    )
    assert baseline > early > prediction > 0
    assert rows["baseline: prefill wasted on refused ones"] > 0
    for rule in ("early rejection", "with prediction"):
        assert rows[f"{rule}: prefill wasted on refused ones"] == 0


def test_copies_are_counted_while_blocks_are_hot():
    setup = replace(CONVERSATION, released={"synthetic": like_synthetic(0)[:50]})
    rows = {row.what: row.ours for row in REPRODUCTIONS["fast25-fig11"](setup).rows}
    assert rows["copies of the hottest block, at its most"] == 8
    most = rows["copies of the 100 hottest, at their most, mean"]
    assert rows["the 100 hottest, at the end of the trace"] <= most <= 8
    assert rows["copies of the 1,000 hottest, at their most, mean"] <= most


def test_a_global_cache_hits_more_in_each_workload():
    others = {"synthetic": like_synthetic(0)[:400], "toolagent": like_toolagent(0, 400)}
    found = claims("fast25-global-cache", replace(CONVERSATION, released=others))
    assert len(found) == 9
    assert all(holds for what, holds in found.items() if "too" not in what)


def test_what_is_left_to_store_is_the_last_layer_or_what_the_link_is_behind():
    assert store_latency_s(8.0, 4.0, 1) == 4
    assert store_latency_s(8.0, 4.0, 4) == 1, "one layer"
    assert store_latency_s(8.0, 16.0, 4) == 2 + 16 - 8, "it begins with the second layer"


COST = StepCost(LLAMA3_70B, A800_NODE)


def test_pooled_memory_serves_what_no_instance_could():
    requests = [TraceRequest(0.0, 150_000, 20)] + [TraceRequest(0.0, 2_000, 20)] * 10
    alone, together = (
        serve_pooled(COST, requests, num_instances=4, capacity_tokens=60_000, pooled=pooled)
        for pooled in (False, True)
    )
    assert (alone.refused, together.refused) == (1, 0)
    assert alone.tokens == pytest.approx(10 * 20) and together.tokens == pytest.approx(11 * 20)


def test_instances_that_do_not_lend_take_the_time_of_their_own_steps():
    requests = [TraceRequest(0.0, 30_000, 100)] * 4
    result = serve_pooled(
        COST, requests, num_instances=2, capacity_tokens=61_000, pooled=False, period_s=0.001
    )
    step_s = COST.decode_s(2, 2 * 30_100)
    assert result.seconds == pytest.approx(100 * step_s, rel=0.01)


@pytest.mark.parametrize("num_others, borrows", [(0, True), (20, False)])
def test_memory_is_borrowed_only_where_both_together_are_faster_by_it(num_others, borrows):
    """A creditor that decodes many short requests would lose more than the debtor gains."""
    attention_bound = StepCost(LLAMA3_70B, replace(A800_NODE, step_s=0.0, flops_per_s=1e18))
    pool = _Pool(attention_bound, 2, 600_000, 64)
    pool.instances[0].waiting.extend([TraceRequest(0.0, 450_000, 200)] * 2)
    pool.instances[1].waiting.extend([TraceRequest(0.0, 1_000, 200)] * num_others)
    pool.admit(borrow=False)
    assert [len(instance.running) for instance in pool.instances] == [1, num_others]
    pool.admit(borrow=True)
    assert len(pool.instances[0].running) == 1 + borrows
    assert pool.instances[1].lent_tokens == (300_400 if borrows else 0)
    pool.decode(1e6)
    assert all(not i.running and i.lent_tokens == 0 for i in pool.instances), "all is given back"


def test_throughput_is_that_of_the_time_in_which_all_have_requests_waiting():
    requests = [TraceRequest(0.0, 30_000, 100)] * 40
    result = serve_pooled(
        COST, requests, num_instances=2, capacity_tokens=61_000, pooled=False, period_s=0.01
    )
    per_s = 2 * 2 / COST.decode_s(2, 2 * 30_100)
    assert result.saturated_tokens_per_s == pytest.approx(per_s, rel=0.01)
    assert 0 < result.saturated_s < result.seconds
