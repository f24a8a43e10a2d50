"""A prefill instance against closed forms: M/D/1, a pipeline, loads during computation."""

from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_simulator.events import Clock
from mooncake_simulator.job import Job
from mooncake_simulator.machines import A800_NODE, LLAMA3_70B
from mooncake_simulator.network import Network, Nic
from mooncake_simulator.prefill import PrefillInstance, PrefillOptions
from mooncake_simulator.stages import Load, pass_stages
from mooncake_simulator.step_cost import StepCost
from mooncake_simulator.store import NodeStore
from mooncake_simulator.traces import TraceRequest

COST = StepCost(LLAMA3_70B, A800_NODE)


def serve(requests, options, store=None):
    """Prefill requests at their own times, alone on one instance."""
    clock = Clock()
    instance = PrefillInstance(
        clock,
        COST,
        store or NodeStore(None),
        options,
        started=lambda job: None,
        done=lambda job: None,
    )
    jobs = [Job(i, request, request.timestamp_ms / 1e3) for i, request in enumerate(requests)]
    for job in jobs:
        clock.at(job.arrival_s, instance.arrive, job)
    clock.run()
    return jobs


def prefill(arrivals, request, options, store=None):
    return serve([replace(request, timestamp_ms=1e3 * at) for at in arrivals], options, store)


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


def test_a_short_prompt_does_not_overtake_a_long_one_in_a_pipeline():
    options = PrefillOptions(group_size=4, chunk_tokens=32_768)
    prompts = [TraceRequest(0.0, 32_768, 1), TraceRequest(0.0, 512, 1)]
    long, short = serve(prompts, options)
    long_s, short_s = COST.prefill_s(32_768, 0, 32_768), COST.prefill_s(512, 0, 512)
    assert long.ttft_s == pytest.approx(long_s)  # one chunk: no stage overlaps another
    assert short.ttft_s == pytest.approx(long_s + short_s / 4)  # behind it on the last stage
    (alone,) = serve(prompts[1:], options)
    assert alone.ttft_s == pytest.approx(short_s)


def ticks(prompts, num_stages):
    """Move chunks through stages, tick by tick: each has a queue, and does one at a time.

    A prompt is (when it comes, until it may be computed, until its KV is there, its chunks).
    """
    queues, doing = [deque() for _ in range(num_stages)], [None] * num_stages
    coming, ends, now, first = deque(enumerate(prompts)), {}, 0, {}
    left = sum(len(chunks) for *_, chunks in prompts) * num_stages
    while left:
        for stage in reversed(range(num_stages)):
            if doing[stage] and doing[stage][2] <= now and first[doing[stage][0]][1] <= now:
                prompt, chunk, _ = doing[stage]
                doing[stage], ends[prompt, stage], left = None, now, left - 1
                if stage + 1 < num_stages:
                    queues[stage + 1].append((prompt, chunk))
        if not queues[0] and doing[0] is None and coming and coming[0][1][0] <= now:
            prompt, (_, begin, loaded, chunks) = coming.popleft()
            first[prompt] = now + begin, now + loaded
            queues[0].extend((prompt, chunk) for chunk in chunks)
        for stage, queue in enumerate(queues):
            if doing[stage] is None and queue and first[queue[0][0]][0] <= now:
                prompt, chunk = queue.popleft()
                doing[stage] = prompt, chunk, now + chunk
        now += 1
    return [[ends[p, stage] for stage in range(num_stages)] for p in range(len(prompts))]


prompts = st.tuples(
    st.integers(0, 40),
    st.integers(0, 4),
    st.integers(0, 20),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
)


@given(st.lists(prompts, min_size=1, max_size=6), st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_pipeline_matches_a_tick_by_tick_simulation(prompts, num_stages):
    prompts = [(at, first, max(first, loaded), c) for at, first, loaded, c in sorted(prompts)]
    free_s, ours = [0.0] * num_stages, []
    for at, first, loaded, chunks in prompts:
        whole = [num_stages * chunk for chunk in chunks]
        free_s = pass_stages(free_s, max(at, free_s[0]), whole, Load(first, loaded))
        ours.append(free_s)
    assert ours == ticks(prompts, num_stages)


@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.parametrize("on_ssd", [False, True])
@pytest.mark.parametrize("layer_wise", [False, True])
def test_each_stage_loads_its_own_layers_from_dram_or_ssd(stages, on_ssd, layer_wise):
    keys = tuple(range(200))
    store = NodeStore(200, ssd_blocks=200)
    store.insert(keys)
    if on_ssd:
        store.insert(range(1000, 1200))
    options = PrefillOptions(group_size=stages, layer_wise=layer_wise)
    (job,) = serve([TraceRequest(0.0, 200 * 512 + 100, 1, keys)], options, store)
    rate = A800_NODE.ssd_bytes_per_s if on_ssd else A800_NODE.host_bytes_per_s
    load_s = 200 * 512 * LLAMA3_70B.kv_bytes_per_token / rate / stages
    compute_s = COST.prefill_s(200 * 512 + 100, 200 * 512, 4096)
    layer_s = load_s * stages / LLAMA3_70B.num_layers  # a layer is on one node
    expected_s = load_s + compute_s
    if layer_wise:
        later_stages_s = compute_s * (stages - 1) / stages  # which have theirs by then
        expected_s = max(layer_s + compute_s, load_s + later_stages_s)
    assert job.prefix_tokens == 200 * 512
    assert job.ttft_s == pytest.approx(expected_s)


def test_reused_kv_is_loaded_during_the_computation_layer_by_layer():
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


def waiting(*num_tokens, expected_s=0.0):
    """Queue prompts on an instance, the first of which still fetches; return who starts, too."""
    clock, order = Clock(), []
    instance = PrefillInstance(
        clock,
        COST,
        NodeStore(None),
        PrefillOptions(),
        started=lambda job: order.append(job.job_id),
        done=lambda job: None,
    )
    jobs = [Job(i, TraceRequest(0.0, n, 1), 0.0) for i, n in enumerate(num_tokens)]
    jobs[0].ready = False
    for job in jobs:
        job.expected_s = expected_s
        instance.arrive(job)
    return clock, instance, jobs, order


def test_prompt_waiting_for_a_fetch_is_not_overtaken():
    clock, instance, jobs, order = waiting(1000, 100_000, 1000)

    def fetched():
        jobs[0].ready = True
        instance.wake()

    clock.at(0.015, fetched)
    clock.run()
    short_s, long_s = (COST.prefill_s(n, 0, 4096) for n in (1000, 100_000))
    assert order == [0, 1, 2]
    ends = np.cumsum([0.015 + short_s, long_s, short_s])
    assert [job.first_token_s for job in jobs] == pytest.approx(ends)


def test_a_prompt_that_delays_no_other_goes_ahead_of_a_fetch():
    """The second takes longer than the fetch, the third does not."""
    clock, instance, jobs, order = waiting(1000, 100_000, 2000)
    short_s, long_s, third_s = (COST.prefill_s(n, 0, 4096) for n in (1000, 100_000, 2000))
    fetch_s = 1.5 * third_s
    assert fetch_s < long_s
    network, nics = Network(clock), (Nic(1e9), Nic(1e9))

    def fetched():
        jobs[0].ready, jobs[0].fetch = True, None
        instance.wake()

    jobs[0].fetch = network.send(*nics, fetch_s * 1e9, fetched)
    assert jobs[0].fetch.ends_s == pytest.approx(fetch_s)
    instance.wake()
    clock.run()
    assert order == [2, 0, 1]
    ends = [fetch_s + short_s, fetch_s + short_s + long_s, third_s]
    assert [job.first_token_s for job in jobs] == pytest.approx(ends)


def test_queue_continues_after_a_fetching_prompt_is_cancelled():
    clock, instance, jobs, order = waiting(1000, 1000, 2000)

    def give_up():
        instance.drop(jobs[0])
        instance.drop(jobs[1])
        assert order == []  # not the second: it is given up at the same moment

    clock.at(2.0, give_up)
    clock.run()
    assert order == [2] and len(instance) == 0
    assert jobs[2].first_token_s == pytest.approx(2.0 + COST.prefill_s(2000, 0, 4096))


def test_expected_free_time_includes_pending_fetches():
    _, instance, jobs, _ = waiting(1000, 1000, expected_s=0.375)
    jobs[0].fetched_s = 3.0
    assert instance.expected_free_s == 3.75
    jobs[0].ready = True
    assert instance.expected_free_s == 0.75
    instance.fail()
    assert instance.expected_free_s == 0.0


def test_prompt_goes_ahead_only_if_it_clears_all_stages_before_the_fetch():
    """In a pipeline the first prompt would otherwise queue in the later stages."""
    size, stages = 4096, 8
    prefill_s = COST.prefill_s(size, 0, 4096)
    for fetch_s, expected in ((prefill_s * 0.5, [0, 1]), (prefill_s * 1.5, [1, 0])):
        clock, order = Clock(), []
        instance = PrefillInstance(
            clock,
            COST,
            NodeStore(None),
            PrefillOptions(group_size=stages),
            started=lambda job, order=order: order.append(job.job_id),
            done=lambda job: None,
        )
        jobs = [Job(i, TraceRequest(0.0, n, 1), 0.0) for i, n in enumerate((200, size))]
        jobs[0].ready = False

        def fetched(instance=instance, head=jobs[0]):
            head.ready, head.fetch = True, None
            instance.wake()

        jobs[0].fetch = Network(clock).send(Nic(1e9), Nic(1e9), fetch_s * 1e9, fetched)
        for job in jobs:
            instance.arrive(job)
        clock.run()
        assert order == expected
        alone_s = fetch_s + COST.prefill_s(200, 0, 4096)
        assert jobs[0].first_token_s == pytest.approx(alone_s)
