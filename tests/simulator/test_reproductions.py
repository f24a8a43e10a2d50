"""The orders that the papers report, where a small trace is enough to see them."""

from pathlib import Path

import numpy as np
import pytest

from mooncake_serving.simulator.hit_rate import replay
from mooncake_serving.simulator.machines import A800_NODE, LLAMA3_70B
from mooncake_serving.simulator.pooling import serve_pooled
from mooncake_serving.simulator.reproductions import REPRODUCTIONS, Setup
from mooncake_serving.simulator.reproductions.made_up import like_synthetic
from mooncake_serving.simulator.step_cost import StepCost
from mooncake_serving.simulator.traces import TraceProfile, TraceRequest, scale_trace, synth_trace

PROFILE = TraceProfile.load(Path(__file__).parent / "conversation.profile.json")
CONVERSATION = Setup(scale_trace(synth_trace(PROFILE, 300, seed=0), time=0.5), "made up")


def claims(name, setup=CONVERSATION):
    outcome = REPRODUCTIONS[name](setup)
    assert outcome.rows and all(np.isfinite(row.ours) for row in outcome.rows)
    return {claim.what: claim.holds for claim in outcome.claims}


@pytest.mark.parametrize(
    "name", ["sarathi-tiles", "sarathi-pd-peak", "sarathi-serve-table4", "fast25-fig14"]
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
    requests = like_synthetic(0)
    assert np.mean([r.input_length for r in requests]) == pytest.approx(15325, rel=0.08)
    assert np.mean([r.output_length for r in requests]) == pytest.approx(149, rel=0.1)
    for capacity, published in ((3e6, 0.315), (float("inf"), 0.651)):
        assert replay(requests, capacity).hit_rate == pytest.approx(published, abs=0.03)


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
