"""``serve bench --simulate``: the simulator with a router's costs, and against a real cluster."""

import dataclasses
import json
import math

import pytest

from mooncake_kernels.errors import InvalidArgument
from mooncake_serving.__main__ import main
from mooncake_serving.conductor import LinearDecode, PolynomialPrefill
from mooncake_serving.router.config import AdmissionConfig
from mooncake_serving.serve.bench.predict import SimulatedCluster, predict
from mooncake_simulator.traces import TraceRequest
from tests.serving.router.support import Engine, RouterServer

# A millisecond a new token, and 10 ms a step for each request in it.
ONE_EACH = SimulatedCluster(
    PolynomialPrefill(0.0, 0.001, 0.0),
    LinearDecode(0.0, 0.010, 0.0),
    ("fitted", "fitted"),
    num_prefill=1,
    num_decode=1,
    capacity_tokens=100_000,
    admission=AdmissionConfig(),
    handover_s=0.0,
)


def requests(*given: tuple[float, int, int, tuple[int, ...]]) -> list[TraceRequest]:
    return [TraceRequest(*one) for one in given]


def test_prompts_wait_for_those_before_them():
    sent = requests((0, 100, 3, (1,)), (20, 200, 1, (2,)), (500, 50, 1, (3,)))
    first, second, third = predict(ONE_EACH, sent, 256)
    assert first.ttft_s == pytest.approx(0.100)
    assert second.ttft_s == pytest.approx(0.280)  # at 300 ms
    assert third.ttft_s == pytest.approx(0.050)
    assert first.itl_s == pytest.approx([0.010, 0.010])
    assert first.latency_s == pytest.approx(0.120) and first.tpot_s == pytest.approx(0.010)
    assert (second.output_len, second.tpot_s) == (1, None)


def test_order_of_answers_is_that_of_requests():
    sent = requests((50, 30, 1, (1,)), (0, 100, 1, (2,)))
    later, first = predict(ONE_EACH, sent, 256)
    assert first.ttft_s == pytest.approx(0.100) and later.ttft_s == pytest.approx(0.080)
    assert later.started_s == pytest.approx(0.050)


def test_blocks_are_of_the_size_that_was_sent():
    sent = requests((0, 32, 1, (1, 2)), (1000, 40, 1, (1, 2, 3)))
    _, second = predict(ONE_EACH, sent, 16)
    assert second.cached_len == 32 and second.ttft_s == pytest.approx(0.008)


def test_what_comes_between_prefill_and_first_token_is_added():
    cluster = dataclasses.replace(ONE_EACH, handover_s=0.005)
    [one] = predict(cluster, requests((0, 100, 2, (1,))), 256)
    assert one.ttft_s == pytest.approx(0.105) and one.latency_s == pytest.approx(0.115)
    assert one.tpot_s == pytest.approx(0.010)


def test_requests_together_are_decoded_together():
    cluster = dataclasses.replace(ONE_EACH, prefill=PolynomialPrefill(0.0, 0.0, 0.0))
    first, *others = predict(cluster, requests(*[(0, 10, 5, (i,)) for i in range(4)]), 16)
    assert first.itl_s == pytest.approx([0.010, 0.040, 0.040, 0.040])
    for one in others:  # they join after its first step
        assert one.itl_s == pytest.approx([0.050, 0.040, 0.040, 0.030])


@pytest.mark.parametrize(
    ("rule", "refused", "wasted"),
    [("accept_all", 0, 0), ("baseline", 3, 3), ("early", 3, 3), ("predictive", 3, 0)],
)
def test_rules_are_those_of_the_router(rule, refused, wasted):
    """Two may decode at once. Four are prefilled before the first decodes, which early ignores."""
    admission = AdmissionConfig(rule=rule, ttft_s=10.0, tbt_s=0.025, decode_s=10.0)
    cluster = dataclasses.replace(ONE_EACH, admission=admission)
    sent = requests(*[(i, 10, 1000, (i,)) for i in range(5)])
    answers = predict(cluster, sent, 16)
    assert sum(one.is_refused for one in answers) == refused
    assert sum(one.is_wasted_prefill for one in answers) == wasted
    assert {one.error for one in answers if one.is_refused} <= {
        "429 overloaded DECODE_LOAD",
        "429 overloaded FORECAST_LOAD",
    }


def test_late_first_token_is_refused_at_arrival():
    admission = AdmissionConfig(rule="early", ttft_s=0.15)
    cluster = dataclasses.replace(ONE_EACH, admission=admission)
    first, second = predict(cluster, requests((0, 100, 1, (1,)), (1, 100, 1, (2,))), 256)
    assert not first.error and second.error == "429 overloaded PREFILL_LOAD"
    assert second.is_refused and not second.is_wasted_prefill


@pytest.fixture(scope="module")
def apart():
    """A router before a prefill and a decode engine, which answer after some milliseconds."""
    engines = {
        "prefill": Engine(is_prefill=True, prefill_s=0.01),
        "decode": Engine(needs_params=True),
    }
    router = RouterServer(
        {
            "connector": "nixl",
            "health_s": 0.1,
            "admission": {"rule": "baseline", "tbt_s": 5.0, "decode_s": 3.0},
            "instance": [
                {"name": role, "role": role, "url": engine.url} for role, engine in engines.items()
            ],
        }
    )
    yield router
    router.close()
    for engine in engines.values():
        engine.close()


def told_by(router: RouterServer) -> tuple[dict, dict]:
    return router.get("/instances"), router.get("/decisions?limit=1000")


def test_cluster_is_what_the_router_tells(apart):
    assert apart.complete([1] * 20).status_code == 200
    cluster = SimulatedCluster.of(*told_by(apart))
    assert (cluster.num_prefill, cluster.num_decode) == (1, 1)
    assert cluster.capacity_tokens == 16_000
    assert cluster.prefill == PolynomialPrefill(0.02, 1e-4, 0.0)
    assert cluster.decode == LinearDecode(0.02, 1e-4, 0.0)
    assert cluster.sources == ("assumed", "assumed")
    assert cluster.admission == AdmissionConfig(
        rule="baseline", ttft_s=math.inf, tbt_s=5.0, decode_s=3.0
    )
    assert json.loads(json.dumps(cluster.as_dict(), allow_nan=False))["admission"] == {
        "rule": "baseline", "ttft_s": None, "tbt_s": 5.0, "decode_s": 3.0,
    }  # fmt: skip


def test_hand_over_is_the_median_that_was_seen(apart):
    instances, _ = told_by(apart)
    seen = [{"prefilled_s": 1.0, "first_byte_s": 1.0 + late} for late in (0.3, 0.1, 0.2)]
    entries = {"decisions": [*seen, {"prefilled_s": 9.0}, {"outcome": "refused"}]}
    assert SimulatedCluster.of(instances, entries).handover_s == pytest.approx(0.2)
    assert SimulatedCluster.of(instances, {"decisions": []}).handover_s == 0.0


def test_engines_that_do_both_are_not_simulated(apart):
    instances, decisions = told_by(apart)
    for one in instances["instances"]:
        one["role"] = "both"
    with pytest.raises(InvalidArgument, match="engines that decode, got both, both"):
        SimulatedCluster.of(instances, decisions)
    with pytest.raises(InvalidArgument, match="must be given with the --url of our router"):
        SimulatedCluster.of({"instances": 3}, decisions)


def test_bench_simulates_what_it_has_sent(apart, capsys, tmp_path):
    path = tmp_path / "run.json"
    load = ["--num-prompts=6", "--request-rate=50", "--random-output-len=4", "--goodput=ttft:9000"]
    url = str(apart.client.base_url)
    arguments = ["--simulate", f"--output-json={path}", *load]
    assert main(["serve", "bench", "--url", url, *arguments]) == 0
    out = capsys.readouterr().out
    assert " measured " in out and " simulated " in out
    told = json.loads(path.read_text())
    simulated = told["simulated"]
    assert (told["completed"], simulated["completed"]) == (6, 6)
    assert simulated["start_times"] == pytest.approx(told["start_times"])
    assert simulated["output_lens"] == [4] * 6 == told["output_lens"]
    assert simulated["good"] == told["good"] == 6
    assert simulated["cluster"]["num_prefill"] == 1
