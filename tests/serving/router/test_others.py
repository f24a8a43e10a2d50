"""What engines do for others than this router, by their metrics."""

import threading

import pytest

from mooncake_serving.conductor import Cluster, Role
from mooncake_serving.router.others import EngineLoad, OthersLoad, read_load
from tests.serving.router.support import BLOCK, COUPLED, RouterServer
from tests.serving.router.test_placing import SLOW, prefill_of
from tests.waiting import eventually

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="llama"} 3.0
vllm:num_requests_running{engine="1",model_name="llama"} 1.0
vllm:num_requests_waiting{engine="0",model_name="llama"} 2.0
vllm:num_requests_waiting{engine="1",model_name="llama"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="llama",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="llama"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="llama"} 0.25
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="1000"} 1.0
vllm:request_success_total{engine="0"} 1e+06
"""
SGLANG = """\
sglang:num_running_reqs{model_name="llama",pp_rank="0",priority="",tp_rank="0"} 4.0
sglang:num_running_reqs{model_name="llama",pp_rank="0",priority="1",tp_rank="0"} 3.0
sglang:num_running_reqs{model_name="llama",pp_rank="0",priority="",tp_rank="1"} 4.0
sglang:num_queue_reqs{model_name="llama",pp_rank="0",tp_rank="0"} 1.0
sglang:num_decode_prealloc_queue_reqs{model_name="llama",tp_rank="0"} 2.0
sglang:num_decode_transfer_queue_reqs{model_name="llama",tp_rank="0"} 5.0
sglang:token_usage{model_name="llama",pp_rank="0",tp_rank="0"} 0.125
sglang:max_total_num_tokens{model_name="llama",pp_rank="0",tp_rank="0"} 65536.0
sglang:max_total_num_tokens_swa{model_name="llama",pp_rank="0",tp_rank="0"} 5.0
"""
RANKS = """\
sglang:num_running_reqs{dp_rank="0",tp_rank="0"} 4.0
sglang:num_running_reqs{dp_rank="1",tp_rank="1"} 2.0 1700000000000
sglang:token_usage{dp_rank="0",tp_rank="0"} 0.5
sglang:token_usage{dp_rank="1",tp_rank="1"} 1.0
"""


@pytest.mark.parametrize(
    "page, load",
    [
        (VLLM, EngineLoad(running=4, waiting=2, usage=0.375, capacity_tokens=32_000)),
        (SGLANG, EngineLoad(running=4, waiting=8, usage=0.125, capacity_tokens=65_536)),
        (RANKS, EngineLoad(running=6, usage=0.75)),
        ("vllm:gpu_cache_usage_perc 0.5\nvllm:num_requests_running 1\n", EngineLoad(1, 0, 0.5)),
        ("vllm:num_requests_running NaN\nvllm:num_requests_waiting -1\n", None),
        ("vllm:num_requests_running 1e400\nvllm:num_requests_running e\n", None),
        ('vllm:cache_config_info{block_size="x",num_gpu_blocks="None"} 1.0', EngineLoad()),
        ('vllm:cache_config_info{block_size="²",num_gpu_blocks="²"} 1.0', EngineLoad()),
        (f'vllm:cache_config_info{{block_size="1",num_gpu_blocks="{"9" * 5000}"}} 1', EngineLoad()),
        ("python_info 1.0\n", None),
        ("", None),
    ],
)
def test_pages_of_metrics(page, load):
    assert read_load(page) == load


@pytest.fixture
def others():
    return OthersLoad(Cluster([Role.BOTH] * 2))


def told(others: OthersLoad, number: int, *, only_prefills: bool = False, **load) -> list[int]:
    told = EngineLoad(capacity_tokens=1000, **load)
    others.reported(number, told, 0.0, only_prefills=only_prefills)
    cluster = others._cluster
    counts = (others.running, others.waiting, cluster.batch_size, cluster.kv_tokens)
    return [int(count[number]) for count in counts]


def test_what_is_not_our_own_is_others(others):
    assert told(others, 0, running=4, waiting=2, usage=0.5) == [4, 2, 4, 500]
    others.moved((), (0,))
    others.moved((), (0,))
    others.moved((), (0, 1))
    # Half of what is there is ours: of what runs, of what waits, and of the memory.
    assert told(others, 0, running=4, waiting=2, usage=0.5) == [2, 1, 2, 250]
    assert told(others, 1, running=1) == [0, 0, 0, 0]
    assert told(others, 0, running=1, waiting=0, usage=0.5) == [0, 0, 0, 0]
    others.forget(0)
    assert told(others, 0) == [0, 0, 0, 0]


def test_late_metrics_invent_no_others(others):
    for _ in range(3):
        others.moved((), (0,))
    others.moved((0,), ())
    others.moved((0,), (1,))  # metrics may still count both
    assert told(others, 0, running=3) == [0, 0, 0, 0]
    assert told(others, 0, running=3) == [2, 0, 2, 0]


def test_where_prefills_run_they_are_waited_for(others):
    assert told(others, 0, only_prefills=True, running=1, waiting=2, usage=0.5) == [0, 3, 0, 0]
    assert others.wait_s(0.0, 2.0).tolist() == [6, 0]
    assert others.wait_s(1.5, 2.0).tolist() == [4.5, 0]
    assert others.wait_s(10.0, 2.0).tolist() == [0, 0]
    assert others.are_at(0) and not others.are_at(1)


def metrics(running: int, waiting: int, usage: float = 0.0) -> str:
    return (
        f"vllm:num_requests_running {running}\nvllm:num_requests_waiting {waiting}\n"
        f"vllm:kv_cache_usage_perc {usage}\n"
    )


def test_an_engine_that_others_keep_busy_is_left_alone(cluster):
    router, engines = cluster(COUPLED, costs=SLOW)
    for name, other in (("both-0", "both-1"), ("both-1", "both-0")):
        engines[other].load = ""
        engines[name].load = metrics(2, 3, 0.25)
        eventually(lambda name=name: router.instance(name)["others_waiting"] == 3)
        eventually(lambda other=other: router.instance(other)["others_waiting"] == 0)
        assert router.instance(name)["others_running"] == 2
        assert router.instance(name)["kv_tokens"] == 4000 and not router.instance(name)["decoding"]
        for prompt in range(3):
            assert prefill_of(router.complete([prompt] * 40, stream=True)) == other
    assert router.metric("mooncake_router_instance_others_waiting") == 3
    samples = router.get("/instances")["costs"]["prefill"]["num_samples"]
    engines["both-1"].load = metrics(3, 0)  # one of which may seem to be ours
    eventually(lambda: router.instance("both-1")["others_waiting"] == 0)
    eventually(lambda: router.instance("both-1")["others_running"] == 3)
    engines["both-0"].load = metrics(1, 9)
    eventually(lambda: router.instance("both-0")["others_waiting"] == 9)
    assert prefill_of(router.complete([7] * 40, stream=True)) == "both-1"
    # It did not have its engine to itself.
    assert router.get("/instances")["costs"]["prefill"]["num_samples"] == samples


def test_what_others_keep_from_an_objective_is_refused(cluster):
    router, engines = cluster({"both": "both"}, admission={"ttft_s": 100}, costs=SLOW)
    assert router.complete([1] * 60).status_code == 200
    engines["both"].load = metrics(0, 5)
    eventually(lambda: router.instance("both")["others_waiting"] == 5)
    answer = router.complete([2] * 60)
    assert answer.status_code == 429
    engines["both"].load = metrics(0, 0)
    eventually(lambda: router.instance("both")["others_waiting"] == 0)
    assert router.complete([2] * 60).status_code == 200


@pytest.mark.parametrize("roles", [{"both": "both"}, {"prefill": "prefill", "decode": "decode"}])
def test_samples_of_our_own_requests_are_not_others(cluster, roles):
    """vLLM counts each of them; but a prompt for another engine is computed once."""
    router, engines = cluster(roles)
    generates = [*roles][-1]
    engines[generates].gate.clear()
    asking = threading.Thread(target=router.complete, args=([1] * 40,), kwargs={"n": 3})
    asking.start()
    eventually(lambda: engines[generates].calls)
    engines[generates].load = metrics(4, 0)
    eventually(lambda: router.instance(generates)["others_running"] == 1)
    engines[generates].gate.set()
    asking.join()
    eventually(lambda: router.instance(generates)["others_running"] == 4)
    assert not router.router.placement.others._own.any()


def test_an_engine_that_goes_down_serves_no_others(cluster):
    router, engines = cluster({"both": "both"})
    engines["both"].load = metrics(2, 1, 0.5)
    eventually(lambda: router.instance("both")["others_running"] == 2)
    engines["both"].server.kill()
    eventually(lambda: not router.instance("both")["up"])
    told = router.instance("both")
    assert (told["others_running"], told["others_waiting"], told["kv_tokens"]) == (0, 0, 0)
    assert not router.router.placement.conductor.cluster.batch_size.any()


def test_two_routers_see_each_others_requests(cluster, start):
    """Engines whose metrics tell what they have, as vLLM's do, and two routers before them."""
    first, engines = cluster(COUPLED, costs=SLOW)
    entries = [{"name": n, "role": "both", "url": e.url} for n, e in engines.items()]
    content = {"instance": entries, "block_size": BLOCK, "health_s": 0.05, "costs": SLOW}
    second = start(RouterServer, content)
    for engine in engines.values():
        engine.gate.clear()
    asking = threading.Thread(target=first.complete, args=([1] * 40,), kwargs={"stream": True})
    asking.start()
    busy = eventually(lambda: next((n for n in COUPLED if engines[n].calls), None))
    free = next(name for name in COUPLED if name != busy)
    engines[busy].load = metrics(0, 1)
    engines[free].load = metrics(0, 0)
    eventually(lambda: second.instance(busy)["others_waiting"] == 1)
    assert first.instance(busy)["others_waiting"] == 0 and first.instance(busy)["prefills"] == 1
    engines[free].gate.set()
    assert prefill_of(second.complete([1] * 40)) == free
    engines[busy].gate.set()
    asking.join()
