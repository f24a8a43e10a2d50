"""A prefill instance against closed forms: M/D/1, a pipeline, loads beside computation."""

import numpy as np
import pytest

from mooncake_serving.simulator.events import Clock
from mooncake_serving.simulator.job import Job
from mooncake_serving.simulator.machines import A800_NODE, LLAMA3_70B
from mooncake_serving.simulator.prefill import PrefillInstance, PrefillOptions
from mooncake_serving.simulator.step_cost import StepCost
from mooncake_serving.simulator.store import NodeStore
from mooncake_serving.simulator.traces import TraceRequest

COST = StepCost(LLAMA3_70B, A800_NODE)


def prefill(arrivals, request, options, store=None):
    clock = Clock()
    instance = PrefillInstance(
        clock,
        COST,
        store or NodeStore(None),
        options,
        started=lambda job: None,
        done=lambda job: None,
    )
    jobs = [Job(i, request, float(at)) for i, at in enumerate(arrivals)]
    for job in jobs:
        clock.at(job.arrival_s, instance.arrive, job)
    clock.run()
    return jobs


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_poisson_arrivals_of_equal_prompts_wait_as_in_m_d_1(load):
    request = TraceRequest(0.0, 4000, 1)
    service_s = COST.prefill_s(4000, 0, 4096)
    rng = np.random.default_rng(0)
    arrivals = np.cumsum(rng.exponential(service_s / load, 12_000))
    jobs = prefill(arrivals, request, PrefillOptions())
    waits = np.array([job.ttft_s - service_s for job in jobs])
    # Pollaczek and Khinchine, deterministic service
    assert waits.mean() == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.1)
    # by PASTA, as many arrive at an idle instance as it is idle for
    assert (waits < 1e-9).mean() == pytest.approx(1 - load, abs=0.02)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_pipeline_takes_the_makespan_of_a_flow_shop(stages):
    chunks = COST.chunks_s(20_000, 0, 4096)
    options = PrefillOptions(group_size=stages)
    first, second = prefill([0.0, 0.0], TraceRequest(0.0, 20_000, 1), options)
    finish = [0.0] * stages  # stage by stage, chunk by chunk
    for chunk in chunks:
        done = 0.0
        for stage in range(stages):
            done = finish[stage] = max(done, finish[stage]) + chunk / stages
    assert first.ttft_s == pytest.approx(finish[-1])
    # the second enters as soon as the first stage is free
    assert second.ttft_s - first.ttft_s == pytest.approx(sum(chunks) / stages)


def test_reused_kv_is_loaded_beside_the_computation_layer_by_layer():
    keys = tuple(range(40))
    request = TraceRequest(0.0, 40 * 512, 1, keys)
    load_s = (40 * 512 - 1) * LLAMA3_70B.kv_bytes_per_token / A800_NODE.host_bytes_per_s
    compute_s = COST.prefill_s(40 * 512, 40 * 512 - 1, 4096)
    times = {}
    for layer_wise in (True, False):
        store = NodeStore(None)
        store.insert(keys)
        (job,) = prefill([0.0], request, PrefillOptions(layer_wise=layer_wise), store)
        assert job.prefix_tokens == 40 * 512 - 1  # the last token is always computed
        times[layer_wise] = job.ttft_s
    first_layer_s = load_s / LLAMA3_70B.num_layers
    rest_s = max(compute_s, load_s - first_layer_s)
    assert times[True] == pytest.approx(first_layer_s + rest_s)
    assert times[False] == pytest.approx(load_s + compute_s)


def test_who_waits_for_a_fetch_is_passed_over():
    clock, order = Clock(), []
    instance = PrefillInstance(
        clock,
        COST,
        NodeStore(None),
        PrefillOptions(),
        started=lambda job: order.append(job.job_id),
        done=lambda job: None,
    )
    jobs = [Job(i, TraceRequest(0.0, 1000, 1), 0.0) for i in range(3)]
    jobs[0].ready = False
    for job in jobs:
        instance.arrive(job)

    def fetched():
        jobs[0].ready = True
        instance.wake()

    clock.at(10.0, fetched)
    clock.run()
    assert order == [1, 2, 0] and jobs[0].first_token_s > 10.0
