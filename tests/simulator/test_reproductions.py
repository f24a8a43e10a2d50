"""The orders that the papers report, where a small trace suffices to see them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mooncake_serving.conductor import InvalidArgument
from mooncake_simulator import plot
from mooncake_simulator.hit_rate import replay
from mooncake_simulator.machines import A800_NODE, LLAMA3_70B
from mooncake_simulator.pooling import _Pool, serve_pooled
from mooncake_simulator.reproductions import (
    REPRODUCTIONS,
    Curve,
    Outcome,
    Row,
    Setup,
    arxiv_datasets,
    as_lines,
    clusters,
    infinite_llm,
)
from mooncake_simulator.reproductions.arxiv_layer_wise import store_latency_s
from mooncake_simulator.reproductions.fast25_sweeps import RATIOS, _falls
from mooncake_simulator.reproductions.made_up_datasets import (
    ARXIV_SUMMARIZATION,
    L_EVAL,
    SIMULATED,
    make,
)
from mooncake_simulator.reproductions.made_up_toolagent import like_toolagent
from mooncake_simulator.reproductions.workloads import SYNTHETIC, Workload, synthetic
from mooncake_simulator.step_cost import StepCost
from mooncake_simulator.traces import (
    TraceProfile,
    TraceRequest,
    scale_trace,
    synth_trace,
    trace_stats,
)

FOLDER = Path(__file__).parent
PROFILE = TraceProfile.load(FOLDER / "conversation.profile.json")
# Made by TraceProfile.of from the released file, all of its 3,993 requests.
LIKE_SYNTHETIC = synthetic(
    Setup([], "", synthetic_profile=TraceProfile.load(FOLDER / "synthetic.profile.json"))
).trace
CONVERSATION = Setup(scale_trace(synth_trace(PROFILE, 300, seed=0), time=0.5), "made up")


def claims(name, setup=CONVERSATION):
    outcome = REPRODUCTIONS[name](setup)
    assert outcome.rows and all(np.isfinite(row.ours) for row in outcome.rows)
    return {claim.what: claim.holds for claim in outcome.claims}


@pytest.mark.parametrize(
    "name",
    ["sarathi-tiles", "sarathi-pd-peak", "sarathi-serve-table4", "arxiv-fig7"],
)
def test_all_claims_of_the_papers_hold(name):
    assert all(claims(name, Setup([], "")).values())


def test_breakdown_accounts_for_time_after_the_prefill():
    outcome = REPRODUCTIONS["fast25-fig14"](Setup([], ""))
    assert all(claim.holds for claim in outcome.claims)
    ours = {row.what: row.ours for row in outcome.rows}
    kv_bytes = 131072 * 80 * 2 * 2 * 1024  # tokens, layers, k and v, bytes, hidden
    behind_s = ours["128k: transfer"] + ours["128k: load to HBM"]
    assert behind_s == pytest.approx(kv_bytes / 100e9 + kv_bytes / 128e9)
    before, after = (
        ours[f"128k, {name}: queue and prefill"] for name in ("nothing cached", "95 % cached")
    )
    assert ours["128k: less TTFT, one part after the other"] == pytest.approx(
        100 * (1 - (after + behind_s) / (before + behind_s))
    )
    assert ours["128k: less TTFT as it is served"] == pytest.approx(100 * (1 - after / before))


def test_best_ratio_is_reported_as_fitted():
    few = replace(CONVERSATION, released={"synthetic": CONVERSATION.trace})
    outcome = REPRODUCTIONS["fast25-fig15"](few)
    assert [claim.what for claim in outcome.claims if "fitted" in claim.what] == [
        "the best is 8P + 8D, fitted"
    ]
    assert any("fitted: a step costs 40 ms" in remark for remark in outcome.remarks)
    tbt_ms = {row.what: row.ours for row in outcome.rows if "TBT" in row.what}
    for p, d in RATIOS:  # what a step costs is in every gap
        at = f"{p}P + {d}D: mean TBT"
        assert tbt_ms[f"fitted, {at}"] > tbt_ms[f"as assumed, {at}"] + 29


@pytest.mark.parametrize("name", ["fast25-fig5", "arxiv-fig8", "arxiv-policies"])
def test_ties_do_not_satisfy_an_order(name):
    alone = Setup([TraceRequest(0.0, 1000, 5, (0, 1))], "one request")
    assert not any(claims(name, alone).values())


@pytest.mark.parametrize(
    "values, falls",
    [
        ([3, 2, 1], True),
        ([3, 1, 1.01], True),
        ([3, 1, 1.02], False),
        ([1, 1, 1], False),
        ([1, 1.01], False),
    ],
)
def test_constant_values_do_not_count_as_falling(values, falls):
    assert _falls(values) == falls


def test_constructed_longest_context_has_no_published_figure(monkeypatch):
    monkeypatch.setattr(infinite_llm, "NUM_REQUESTS", 800)
    monkeypatch.setattr(infinite_llm, "MAX_TOKENS", (60_000,))
    outcome = REPRODUCTIONS["infinite-llm"](Setup([], ""))
    longest = [row for row in outcome.rows if "longest context" in row.what]
    assert [(row.ours, row.published) for row in longest] == [(32, None), (16, None), (8, None)]
    assert not any("context" in claim.what for claim in outcome.claims)


def test_each_workload_has_its_own_published_hit_rates():
    few = [TraceRequest(0.0, 1024, 1, (0, 1)), TraceRequest(1.0, 1024, 1, (0, 2))]
    released = {"synthetic": few, "toolagent": few * 2}
    outcome = REPRODUCTIONS["fast25-fig9"](replace(CONVERSATION, released=released))
    published = {row.what: row.published for row in outcome.rows}
    assert published == {
        "made up: without a limit": 0.40,
        "made up: LRU at 3 million tokens, of that": 41.0,
        "made up: LRU at 50 million, of that": 100.0,
        "synthetic: without a limit": 0.66,
        "synthetic: LRU at 3 million tokens, of that": 46.0,
        "tool&agent: without a limit": 0.59,
        "tool&agent: LRU at 3 million tokens, of that": 75.0,
        "tool&agent, its second half: LRU, 500 blocks": 0.363,
        "tool&agent, its second half: LRU, 2,000 blocks": 0.372,
        "tool&agent, its second half: LRU, 6,000 blocks": 0.432,
        "tool&agent, its second half: LRU, 20,000 blocks": 0.547,
        "tool&agent, its second half: without a limit": 0.591,
    }
    by_workload = outcome.panels[1]
    assert by_workload.y_label == "hit rate, LRU"
    assert [curve.label for curve in by_workload.curves] == ["made up", "tool&agent", "synthetic"]
    assert list(by_workload.curves[2].y) == [0.25] * 8, "512 of 2,048 tokens"
    for kind, count, name in (
        ("conversation trace of 12,031", 300, "made up"),
        ("synthetic trace of 3,993", 2, "synthetic"),
        ("toolagent trace of 23,608", 4, "tool&agent"),
    ):
        assert (
            f"the published figures are of FAST'25's {kind} requests, ours are of {count}: {name}"
        ) in outcome.remarks


@pytest.mark.parametrize(
    "kind, count", [("conversation", 12_031), ("synthetic", 3_993), ("toolagent", 23_608)]
)
def test_trace_of_the_published_length_has_no_remark(kind, count):
    request = TraceRequest(0.0, 1, 1)
    assert Workload(kind, [request] * count, "theirs").remarks == []
    assert len(Workload(kind, [request] * (count - 1), "another").remarks) == 1


@pytest.mark.parametrize(
    "name", [name for name in REPRODUCTIONS if name.startswith("fast25-") and "-fig14" not in name]
)
def test_figures_of_another_trace_have_a_remark(name):
    requests = [TraceRequest(1e3 * i, 1024, 5, (0, i)) for i in range(1, 5)]
    others = {"synthetic": requests, "toolagent": requests}
    outcome = REPRODUCTIONS[name](Setup(requests, "another", released=others))
    assert any("ours are of 4: " in remark for remark in outcome.remarks)
    lines = as_lines(name, outcome)
    assert [line["remark"] for line in lines if "remark" in line] == list(outcome.remarks)


@pytest.mark.parametrize(
    "name",
    [
        "arxiv-policies",
        "fast25-fig1",
        "fast25-fig7",
        "fast25-fig9",
        "fast25-fig11",
        "fast25-fig13",
        "fast25-global-cache",
        "sarathi-pd-peak",
        "staleness",
    ],
)
def test_progress_counts_the_parts_of_each_simulation(name):
    """The number of parts that is told before a simulation is how many are done after it."""
    told, done, totals = [], [], set()

    def on_simulation(text, total, num_parts):
        told.append(num_parts)
        done.append(0)
        totals.add(total)

    def on_progress():
        done[-1] += 1

    requests = [TraceRequest(1e3 * i, 1024, 5, (0, i)) for i in range(1, 8)]
    released = {"synthetic": requests[:3], "toolagent": requests[:5]}
    REPRODUCTIONS[name](
        Setup(requests, "few", on_simulation, on_progress, released=released),
    )
    assert done == told and totals == {len(told)}


def test_trace_with_no_servable_request_is_rejected():
    setup = Setup([TraceRequest(0.0, 10_000_000, 1)], "too long for any instance")
    with pytest.raises(ValueError, match="that the cluster can serve, got none served of 1"):
        clusters.serve_coupled(setup, clusters.VLLM["vLLM"])


def test_nonfinite_figures_are_null_in_json():
    outcome = Outcome("", [Row("a", float("inf")), Row("b", float("nan")), Row("c", 1.5)])
    title, *lines = as_lines("any", replace(outcome, title="of what"))
    assert title == {"reproduction": "any", "title": "of what"}
    assert [line["ours"] for line in lines] == [None, None, 1.5]


def test_an_axis_has_one_unit():
    curves = [Curve("a", [1], [2], "s"), Curve("b", [1], [3], "%"), Curve("c", [1], [4])]
    outcome = Outcome("", [], curves=curves, x_label="tokens", y_label="s")
    assert [(panel.y_label, len(panel.curves)) for panel in outcome.panels] == [("s", 2), ("%", 1)]
    rows = [Row("a", 1, 2, "s"), Row("b", 14, 13, "%"), Row("c", 3, 4, "s")]
    axes = plot._bars(rows).axes
    assert [axis.get_xlabel() for axis in axes] == ["s", "%"]
    names = [[label.get_text() for label in axis.get_yticklabels()] for axis in axes]
    assert names == [["a", "c"], ["b"]]
    assert [len(axis.patches) for axis in axes] == [4, 2], "ours, and published"


def test_tile_costs_are_near_the_measured_ones():
    outcome = REPRODUCTIONS["sarathi-tiles"](CONVERSATION)
    for row in outcome.rows:
        assert row.ours == pytest.approx(row.published, rel=0.06)


def test_mooncake_serves_more_requests_in_time_and_with_less_prefill():
    found = claims("fast25-fig1")
    assert found["Mooncake serves more at every limit"]
    assert found["prefill GPU time: Mooncake < prefix caching < vLLM < chunked prefill"]


def test_generated_synthetic_trace_has_the_published_figures():
    stats = trace_stats(LIKE_SYNTHETIC)
    assert stats.input.mean == pytest.approx(15325, abs=1)
    assert stats.output.mean == pytest.approx(149, abs=1)
    assert (stats.num_requests, stats.num_blocks) == (3993, 121_877)
    assert stats.num_unique_blocks == 43_924 and stats.max_hit_rate == pytest.approx(
        0.651, abs=1e-3
    )
    assert stats.requests_per_s == pytest.approx(3.91, rel=0.05)
    for capacity, published in ((1e6, 0.142), (3e6, 0.315), (1e7, 0.577)):
        hit_rate = replay(LIKE_SYNTHETIC, capacity).hit_rate
        assert hit_rate == pytest.approx(published, abs=0.015)


def test_without_the_synthetic_trace_and_its_profile_nothing_is_made_up():
    with pytest.raises(InvalidArgument, match="must have that trace or its profile, got neither"):
        REPRODUCTIONS["fast25-fig7"](CONVERSATION)


def test_generated_tool_and_agent_trace_has_the_published_figures():
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
def test_generated_datasets_have_the_published_averages(dataset, cached):
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


def test_mooncake_gains_more_on_a_cacheable_dataset(monkeypatch):
    monkeypatch.setattr(arxiv_datasets, "NUM_REQUESTS", 120)
    rates = arxiv_datasets._highest_rates(CONVERSATION, L_EVAL, arxiv_datasets._mean_gap)
    assert rates["Mooncake 3P + 1D"] > rates["vLLM prefix caching"] > rates["vLLM"] > 0
    gain = arxiv_datasets._gain(rates, "vLLM")
    assert gain == pytest.approx(100 * (rates["Mooncake 3P + 1D"] / rates["vLLM"] - 1))


def test_early_rejection_wastes_no_prefill_and_rejects_fewer():
    # Long enough to settle: at first no one has been decoded for t_d yet.
    overloaded = Setup(scale_trace(synth_trace(PROFILE, 2000, seed=0), time=0.6), "made up")
    rows = {row.what: row.ours for row in REPRODUCTIONS["arxiv-overload"](overloaded).rows}
    baseline, early, prediction = (
        rows[f"{rule}: refused"] for rule in ("baseline", "early rejection", "with prediction")
    )
    assert baseline > max(early, prediction)  # which of these is less depends on the trace
    assert min(early, prediction) > 0
    assert rows["baseline: prefill wasted on refused ones"] > 0
    for rule in ("early rejection", "with prediction"):
        assert rows[f"{rule}: prefill wasted on refused ones"] == 0


def test_copies_are_counted_while_blocks_are_hot():
    setup = replace(CONVERSATION, released={SYNTHETIC: LIKE_SYNTHETIC[:50]})
    rows = {row.what: row.ours for row in REPRODUCTIONS["fast25-fig11"](setup).rows}
    assert rows["copies of the hottest block, at its most"] == 8
    most = rows["copies of the 100 hottest, at their most, mean"]
    assert rows["the 100 hottest, at the end of the trace"] <= most <= 8
    assert rows["copies of the 1,000 hottest, at their most, mean"] <= most


def test_a_global_cache_hits_more_in_each_workload():
    others = {"synthetic": LIKE_SYNTHETIC[:400], "toolagent": like_toolagent(0, 400)}
    found = claims("fast25-global-cache", replace(CONVERSATION, released=others))
    assert len(found) == 9
    assert all(holds for what, holds in found.items() if "too" not in what)


def test_store_latency_is_the_last_layer_or_the_backlog_of_the_link():
    assert store_latency_s(8.0, 4.0, 1) == 4
    assert store_latency_s(8.0, 4.0, 4) == 1, "one layer"
    assert store_latency_s(8.0, 16.0, 4) == 2 + 16 - 8, "it begins with the second layer"


COST = StepCost(LLAMA3_70B, A800_NODE)


def test_pooled_memory_serves_requests_no_single_instance_could():
    requests = [TraceRequest(0.0, 150_000, 20)] + [TraceRequest(0.0, 2_000, 20)] * 10
    alone, together = (
        serve_pooled(COST, requests, num_instances=4, capacity_tokens=60_000, pooled=pooled)
        for pooled in (False, True)
    )
    assert (alone.refused, together.refused) == (1, 0)
    assert alone.tokens == pytest.approx(10 * 20) and together.tokens == pytest.approx(11 * 20)


def test_instances_without_lending_take_their_own_step_time():
    requests = [TraceRequest(0.0, 30_000, 100)] * 4
    result = serve_pooled(
        COST, requests, num_instances=2, capacity_tokens=61_000, pooled=False, period_s=0.001
    )
    step_s = COST.decode_s(2, 2 * 30_100)
    assert result.seconds == pytest.approx(100 * step_s, rel=0.01)


@pytest.mark.parametrize("num_others, borrows", [(0, True), (20, False)])
def test_memory_is_borrowed_only_if_both_instances_together_gain(num_others, borrows):
    """A lender that decodes many short requests would lose more than the borrower gains."""
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


def test_throughput_counts_only_time_with_every_queue_nonempty():
    requests = [TraceRequest(0.0, 30_000, 100)] * 40
    result = serve_pooled(
        COST, requests, num_instances=2, capacity_tokens=61_000, pooled=False, period_s=0.01
    )
    per_s = 2 * 2 / COST.decode_s(2, 2 * 30_100)
    assert result.saturated_tokens_per_s == pytest.approx(per_s, rel=0.01)
    assert 0 < result.saturated_s < result.seconds
