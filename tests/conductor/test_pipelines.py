"""Instances that are pipelines, and caches with a slow tier, on cases worked out by hand.

1 ms a token on a whole model, 0.1 ms a token to fetch, blocks of 100 tokens (support.py).
"""

from dataclasses import replace

import numpy as np
import pytest

from mooncake_serving.conductor import (
    InvalidArgument,
    LoadBalance,
    PipelinedPrefill,
    PolynomialPrefill,
    Why,
)

from .support import COSTS, MS, make, request

STAGE = PolynomialPrefill(base_s=0, per_token_s=MS / 4, per_pair_s=0)  # of four
PIPELINE = PipelinedPrefill(STAGE, num_stages=4, chunk_tokens=500)


def test_pipeline_runs_all_chunks_on_one_stage_plus_the_largest_on_others():
    tokens, prefix = [400, 500, 2000, 2000, 2000], [0, 0, 0, 1000, 1900]
    seconds = [0.4, 0.5, 0.5 + 3 * 0.125, 0.25 + 3 * 0.125, 0.1]
    np.testing.assert_allclose(PIPELINE.seconds(tokens, prefix), seconds)
    one = PipelinedPrefill(STAGE, num_stages=1, chunk_tokens=500)
    assert float(one.seconds(2000, 100)) == float(STAGE.seconds(2000, 100))


def test_pipeline_overlaps_consecutive_prompts():
    """800 tokens: 0.2 s on each stage, 0.575 s to the first token; 100 tokens: 0.025 and 0.1 s."""
    conductor = make(1, policy=LoadBalance())
    conductor.costs = conductor.reservations.costs = replace(
        COSTS, prefill=PIPELINE, occupancy=STAGE
    )

    def reserve(number, num_blocks, now_s):
        decision = conductor.decide(request(number, num_blocks, 100 * number), now_s)
        conductor.commit(decision)
        return decision.prefill

    first = reserve(0, 8, 0.0)
    assert (first.prefill_s, first.occupied_s) == pytest.approx((0.575, 0.2))
    assert first.ttft_s == pytest.approx(0.575)
    second = reserve(1, 1, 0.0)
    assert (second.wait_s, second.prefill_s) == pytest.approx((0.2, 0.1))
    assert second.ttft_s == pytest.approx(0.575 + 0.025)  # on the last stage behind the first
    third = reserve(2, 1, 0.3)
    assert third.wait_s == 0
    assert third.ttft_s == pytest.approx(0.6 + 0.025 - 0.3)
    assert reserve(3, 1, 5.0).ttft_s == pytest.approx(0.1)


class SlowTiers:
    """Instance i reuses blocks[i], which take load_s[i] to load."""

    def __init__(self, blocks, load_s):
        self.blocks, self.load_s = np.array(blocks), np.array(load_s, float)

    def lookup(self, request, matched_blocks):
        return np.minimum(self.blocks, matched_blocks), self.load_s


def decide(blocks, load_s, busy_s=(0.0, 0.0), held=(8, 0)):
    conductor = make(2, 1)
    for instance, count in enumerate(held):
        conductor.index.add(instance, request().keys[:count])
        conductor.cluster.free_at_s[instance] = busy_s[instance]
    conductor.tiers = SlowTiers([*blocks, 0], [*load_s, 0])
    return conductor.decide(request(), 0.0).prefill


def test_prefill_ends_no_earlier_than_its_prefix_is_loaded():
    choice = decide([8, 0], [0.5, 0])
    assert choice.instance == 0 and choice.prefix_tokens == 800
    assert choice.prefill_s == choice.ttft_s == choice.occupied_s == pytest.approx(0.5)
    assert decide([8, 0], [0.1, 0]).ttft_s == pytest.approx(0.2)  # during the computation


def test_prefix_not_worth_loading_is_recomputed():
    choice = decide([3, 0], [0, 0])
    assert choice.prefix_tokens == 300 and choice.ttft_s == pytest.approx(0.7)


def test_fetch_takes_the_slower_of_the_nic_and_both_slow_tiers():
    busy = (9.0, 0.0)
    assert decide([8, 0], [0.5, 0], busy).fetch.seconds == pytest.approx(0.5)
    assert decide([8, 0], [0.05, 0], busy).fetch.seconds == pytest.approx(0.08)
    # of the source's 8 blocks 6 are read; the target reads its own 2 meanwhile
    assert decide([8, 2], [0.4, 0.05], busy, (8, 2)).fetch.seconds == pytest.approx(0.3)
    assert decide([8, 2], [0.04, 0.35], busy, (8, 2)).fetch.seconds == pytest.approx(0.35)
    choice = decide([8, 0], [5.0, 0], busy)
    assert choice.fetch is None and choice.reason.why is Why.RECOMPUTE_CHEAPER


@pytest.mark.parametrize(
    "stages, tokens, message",
    [(0, 1, "num_stages must be at least 1, got 0"), (1, 0, "chunk_tokens must be at least 1")],
)
def test_bad_pipelines_are_rejected(stages, tokens, message):
    with pytest.raises(InvalidArgument, match=f"PipelinedPrefill: {message}"):
        PipelinedPrefill(STAGE, stages, tokens)
