"""The backlog of prefills, the fitted costs and the blocks of engines, by themselves."""

import numpy as np
import pytest

from mooncake_serving.conductor import (
    Cluster,
    Conductor,
    Costs,
    NicTransfer,
    PrefixIndex,
    Role,
    Slo,
)
from mooncake_serving.router.fitted_costs import FittedDecode, FittedPrefill
from mooncake_serving.router.known_blocks import KnownBlocks
from mooncake_serving.router.prefills import PrefillBacklog


def test_a_backlog_runs_one_after_the_other():
    backlog = PrefillBacklog(2)
    assert backlog.free_at_s(10.0).tolist() == [10, 10]
    backlog.put("a", 0, 4.0, now_s=10.0)
    backlog.put("b", 0, 2.0, now_s=11.0)
    assert backlog.free_at_s(11.0).tolist() == [16, 11]
    assert backlog.free_at_s(20.0).tolist() == [22, 20]  # a is late, and b still to come
    assert backlog.end("a", 0, now_s=20.0) is False  # b was sent meanwhile
    assert backlog.free_at_s(21.0).tolist() == [22, 21]
    assert backlog.end("b", 0, now_s=22.0) is False
    assert backlog.length(0) == 0 and backlog.free_at_s(23.0).tolist() == [23, 23]


def test_one_that_is_given_up_makes_room():
    backlog = PrefillBacklog(1)
    for name in "abc":
        backlog.put(name, 0, 1.0, now_s=0.0)
    backlog.end("b", 0, now_s=0.5)
    assert backlog.free_at_s(0.5).tolist() == [2]
    assert backlog.end("b", 0, now_s=0.5) is False
    backlog.end("a", 0, now_s=1.0)
    assert backlog.free_at_s(1.0).tolist() == [2]


def test_only_a_prefill_that_was_alone_is_measured():
    backlog = PrefillBacklog(2)
    backlog.put("a", 0, 1.0, now_s=0.0)
    backlog.put("other", 1, 1.0, now_s=0.0)
    assert backlog.end("a", 0, now_s=1.0) is True
    backlog.put("b", 0, 1.0, now_s=1.0)
    assert backlog.end("b", 0, now_s=2.0) is True


def test_the_backlog_agrees_with_a_simulation():
    """Of any order of arrivals and ends; predicted times that are true give the true end."""
    rng = np.random.default_rng(0)
    backlog, queue, now_s, free_s = PrefillBacklog(1), [], 0.0, 0.0
    for number in range(300):
        now_s += rng.exponential(1.0)
        while queue and queue[0][1] <= now_s:
            name, end_s = queue.pop(0)
            backlog.end(name, 0, now_s=end_s)
        assert backlog.free_at_s(now_s)[0] == pytest.approx(max(free_s, now_s))
        seconds = rng.exponential(0.9)
        backlog.put(number, 0, seconds, now_s)
        free_s = max(free_s, now_s) + seconds
        queue.append((number, free_s))


def test_a_prefill_model_is_fitted_in_spite_of_disturbed_samples():
    rng, fitted = np.random.default_rng(1), FittedPrefill((0.02, 1e-4, 0.0))
    for _ in range(200):
        tokens = int(rng.integers(100, 8000))
        prefix = int(rng.integers(0, tokens))
        pairs = (tokens**2 - prefix**2) / 2
        seconds = 0.05 + 2e-4 * (tokens - prefix) + 1e-8 * pairs
        fitted.observe(tokens, prefix, seconds * (10 if rng.random() < 0.05 else 1))
    fitted.refit()
    told = fitted.as_dict()
    assert told["source"] == "fitted" and told["num_samples"] == 200
    assert told["base_s"] == pytest.approx(0.05, rel=0.01)
    assert told["per_token_s"] == pytest.approx(2e-4, rel=0.01)
    assert told["per_pair_s"] == pytest.approx(1e-8, rel=0.01)
    assert told["median_error"] < 0.01


def test_samples_that_are_alike_scale_what_is_assumed():
    fitted = FittedDecode((0.02, 0.0, 0.0))
    for _ in range(7):
        fitted.observe(4, 1000, 0.05)
    fitted.refit()
    assert fitted.as_dict()["source"] == "assumed"  # too few
    fitted.observe(4, 1000, 0.05)
    fitted.refit()
    assert fitted.as_dict()["source"] == "scaled"
    assert float(fitted.seconds(4, 1000)) == pytest.approx(0.05)


def test_what_was_sent_last_is_assumed_to_be_held():
    cluster = Cluster([Role.BOTH])
    costs = Costs(FittedPrefill((1, 0, 0)), FittedDecode((1, 0, 0)), NicTransfer(1, 1))
    conductor = Conductor(cluster, PrefixIndex(1), costs, Slo(1, 1))
    blocks = KnownBlocks(conductor, 0, block_size=16, max_assumed=4)

    def held(*names: int) -> int:
        return int(conductor.index.match(names)[0])

    def send(*names: int) -> None:
        blocks.assume(names, held(*names))
        conductor.index.add(0, names)

    send(1, 2)
    send(11, 12)
    send(1, 2)  # is used again
    send(21, 22)
    assert [held(1, 2), held(11, 12), held(21, 22)] == [2, 0, 2]
    blocks.forget()
    assert [held(1, 2), held(21, 22)] == [0, 0]
