"""The store's second tier: reading takes time wherever it happens, and the conductor knows."""

from dataclasses import replace

import pytest

from mooncake_serving.conductor import KVCacheCentric, Random
from mooncake_simulator import (
    Disaggregated,
    DisaggregatedOptions,
    PrefillOptions,
    TraceRequest,
    conductor_of,
)
from mooncake_simulator.events import Clock
from mooncake_simulator.machines import A800_NODE, LLAMA3_70B
from mooncake_simulator.network import Network, Nic
from mooncake_simulator.step_cost import StepCost
from mooncake_simulator.store import Disk
from mooncake_simulator.traces import BLOCK_SIZE

COST = StepCost(LLAMA3_70B, A800_NODE)
BLOCK_BYTES = BLOCK_SIZE * LLAMA3_70B.kv_bytes_per_token
PREFIX = tuple(range(64))
SECOND = tuple(range(500, 564))
OTHERS = tuple(range(1000, 1064))


def make(ssd_bytes_per_s, *, num_prefill=1, group_size=1, policy=None):
    """Instances whose DRAM holds 64 blocks."""
    options = DisaggregatedOptions(
        machine=replace(A800_NODE, ssd_bytes_per_s=ssd_bytes_per_s),
        num_prefill=num_prefill,
        num_decode=1,
        prefill=PrefillOptions(group_size=group_size),
        dram_tokens=64 * BLOCK_SIZE,
        ssd_tokens=10**6,
    )
    return Disaggregated(options, conductor_of(options, policy=policy))


def put_on_ssd(cluster, instance):
    """Have PREFIX and SECOND on an instance's SSD, and OTHERS in its DRAM."""
    for keys in (PREFIX, SECOND, OTHERS):
        cluster.prefill[instance].store.insert(keys)
        cluster.publishers[instance].stored(keys)


def serve(cluster):
    """Serve a prompt of PREFIX and 100 tokens of its own."""
    (job,) = cluster.run([TraceRequest(0.0, 64 * BLOCK_SIZE + 100, 1, (*PREFIX, 999))]).jobs
    return job


def serve_cached(group_size=1):
    """Serve the same prompt where PREFIX is in DRAM."""
    cluster = make(1e9, group_size=group_size)
    cluster.prefill[0].store.insert(PREFIX)
    cluster.publishers[0].stored(PREFIX)
    return serve(cluster)


def test_disk_reads_are_sequential():
    clock = Clock()
    disk = Disk(clock, 10.0)
    assert disk.read_s(0) == 0 and disk.read_s(50) == 5
    assert disk.read(50) == 5 and disk.read(20) == 7 and disk.read_s(0) == 0
    clock.at(6.0, lambda: None)
    clock.run()
    assert disk.read_s(10) == 2
    disk.reset()
    assert disk.read_s(10) == 1


def test_flow_from_a_disk_is_limited_by_the_disk_and_dies_with_it():
    clock, done, lost = Clock(), {}, []
    network, a, b = Network(clock), Nic(100.0), Nic(100.0)
    network.send(a, b, 100, lambda: done.setdefault("disk", clock.now), limit_bytes_per_s=10.0)
    network.send(a, b, 100, lambda: done.setdefault("dram", clock.now))
    clock.run()
    assert done == {"dram": pytest.approx(2.0), "disk": pytest.approx(10.0)}
    network.send(a, b, 100, done.clear, lambda: lost.append(clock.now), limit_bytes_per_s=10.0)
    clock.at(15.0, network.fail, a)
    clock.run()
    assert done and lost == [15.0]


@pytest.mark.parametrize("bytes_per_s, tokens", [(1e6, 0), (1e12, 64 * BLOCK_SIZE)])
def test_slow_ssd_is_recomputed_around_and_a_fast_one_is_read(bytes_per_s, tokens):
    cluster = make(bytes_per_s)
    put_on_ssd(cluster, 0)
    job = serve(cluster)
    assert job.prefix_tokens == tokens
    compute_s = COST.prefill_s(64 * BLOCK_SIZE + 100, tokens, 4096)
    to_gpu_s = tokens * LLAMA3_70B.kv_bytes_per_token / A800_NODE.host_bytes_per_s
    assert job.ttft_s == pytest.approx(max(compute_s, to_gpu_s))


@pytest.mark.parametrize("ssd_gb_per_s, nic_bound", [(20, False), (400, True)])
@pytest.mark.parametrize("group_size", [1, 4])
def test_a_fetch_takes_the_slower_of_the_nics_and_the_ssds_of_its_source(
    ssd_gb_per_s, nic_bound, group_size
):
    cluster = make(1e9 * ssd_gb_per_s, num_prefill=2, group_size=group_size)
    put_on_ssd(cluster, 0)
    cluster.conductor.cluster.free_at_s[0] = 1e6
    job = serve(cluster)
    assert job.prefill_instance == 1 and job.fetched_tokens == 64 * BLOCK_SIZE
    rate = A800_NODE.nic_bytes_per_s if nic_bound else 1e9 * ssd_gb_per_s
    fetch_s = 64 * BLOCK_BYTES / rate / group_size
    assert job.ttft_s == pytest.approx(fetch_s + serve_cached(group_size).ttft_s)


def test_two_fetches_from_one_ssd_share_it():
    cluster = make(10e9, num_prefill=3)
    put_on_ssd(cluster, 0)
    cluster.conductor.cluster.free_at_s[0] = 1e6
    trace = [TraceRequest(0.0, 64 * BLOCK_SIZE, 1, keys) for keys in (PREFIX, SECOND)]
    both = cluster.run(trace).jobs
    assert {job.prefill_instance for job in both} == {1, 2}
    first, second = (job.ttft_s for job in both)
    assert second - first == pytest.approx(64 * BLOCK_BYTES / 10e9)


def test_blocks_on_a_slow_remote_ssd_are_not_fetched():
    cluster = make(1e6, num_prefill=2)
    put_on_ssd(cluster, 0)
    cluster.conductor.cluster.free_at_s[0] = 1e6
    job = serve(cluster)
    assert job.prefill_instance == 1 and job.fetched_tokens == 0
    assert job.ttft_s == pytest.approx(COST.prefill_s(64 * BLOCK_SIZE + 100, 0, 4096))


def test_fetch_also_reads_the_local_ssd_of_the_target():
    cluster = make(10e9, num_prefill=2, policy=KVCacheCentric(balancing_threshold=1.0))
    source, target = cluster.prefill
    source.store.insert(PREFIX)
    cluster.publishers[0].stored(PREFIX)
    for keys in (PREFIX[:32], OTHERS):
        target.store.insert(keys)
        cluster.publishers[1].stored(keys)
    cluster.conductor.cluster.free_at_s[0] = 1e6
    job = serve(cluster)
    assert job.fetched_tokens == 32 * BLOCK_SIZE
    read_s = 32 * BLOCK_BYTES / 10e9  # compared with the NIC, which is faster
    assert job.ttft_s == pytest.approx(read_s + serve_cached().ttft_s)


@pytest.mark.parametrize("gb_per_s", [0.001, 6, 24])
def test_conductor_predicts_ssd_reads(gb_per_s):
    cluster = make(1e9 * gb_per_s)
    put_on_ssd(cluster, 0)
    commit, decisions = cluster.conductor.commit, []
    cluster.conductor.commit = lambda decision: (decisions.append(decision), commit(decision))
    job = serve(cluster)
    assert decisions[0].prefill.ttft_s == pytest.approx(job.ttft_s, rel=0.1)
    assert decisions[0].prefill.prefix_tokens == job.prefix_tokens


def test_faster_ssd_is_never_worse_and_the_slowest_equals_none():
    keys = [tuple(range(100 * i, 100 * i + 30)) for i in range(6)]
    trace = [TraceRequest(3e3 * i, 30 * BLOCK_SIZE, 1, keys[i % 6]) for i in range(24)]

    def mean_ttft_s(ssd_tokens, bytes_per_s):
        options = replace(make(bytes_per_s).options, ssd_tokens=ssd_tokens)
        cluster = Disaggregated(options, conductor_of(options, policy=Random()))
        return cluster.run(trace).ttft_s.mean()

    times = [mean_ttft_s(10**6, rate) for rate in (1e15, 24e9, 3e9, 1e6)]
    assert times == sorted(times) and times[0] < times[-1]
    assert times[-1] == pytest.approx(mean_ttft_s(0, 1e6))
