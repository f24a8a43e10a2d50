"""All policies on one made-up conversation trace: the order that the papers report.

FAST'25 figure 5 orders them by mean TTFT, best first: global cache-aware (Algorithm 1), local
cache-aware, load balance, random. Here prefill is a queue at each instance, caches keep everything,
and each prediction comes true; the simulator tests what a cluster does with it.
"""

import heapq
from pathlib import Path

import numpy as np
import pytest

from mooncake_serving.conductor import (
    A800_X8,
    LLAMA3_70B,
    AcceptAll,
    Cluster,
    Conductor,
    Costs,
    KVCacheCentric,
    LinearDecode,
    LoadBalance,
    LocalCacheAware,
    NicTransfer,
    PrefixIndex,
    Random,
    Request,
    Role,
    Roofline,
    RooflinePrefill,
    Slo,
)
from mooncake_simulator.traces import TraceProfile, synth_trace

PROFILE = Path(__file__).parent.parent / "simulator/conversation.profile.json"
NUM_PREFILL = 12


@pytest.fixture(scope="module")
def trace():
    return synth_trace(TraceProfile.load(PROFILE), 3000, seed=5)


def replay(trace, policy) -> tuple[float, float]:
    """Return the mean TTFT, and the share of tokens that were not computed."""
    prefill = RooflinePrefill(Roofline(LLAMA3_70B, A800_X8, flops_share=0.2))
    nic = NicTransfer(LLAMA3_70B.kv_bytes_per_token, A800_X8.nic_bytes_per_s)
    cluster = Cluster([Role.PREFILL] * NUM_PREFILL + [Role.DECODE])
    costs = Costs(prefill, LinearDecode(0.02, 0, 0), nic)
    index, options = PrefixIndex(cluster.num_instances), {"policy": policy, "seed": 1}
    conductor = Conductor(cluster, index, costs, Slo(30, 1), admission=AcceptAll(), **options)
    ttft_s, reused, prefills = [], 0, []
    for number, one in enumerate(trace):
        now_s = one.timestamp_ms / 1e3
        while prefills and prefills[0][0] <= now_s:
            conductor.prefilled(prefills[0][1], prefills[0][0])
            conductor.decoded(heapq.heappop(prefills)[1])  # only prefill is looked at
        decision = conductor.decide(Request(number, one.input_length, one.hash_ids), now_s)
        conductor.commit(decision)
        heapq.heappush(prefills, (now_s + decision.prefill.ttft_s, number))
        ttft_s.append(decision.prefill.ttft_s)
        reused += decision.prefill.prefix_tokens
    return float(np.mean(ttft_s)), reused / sum(one.input_length for one in trace)


def test_policies_rank_as_in_the_papers(trace):
    policies = (KVCacheCentric(), LocalCacheAware(), LoadBalance(), Random())
    results = [replay(trace, policy) for policy in policies]
    ttft = [mean for mean, _ in results]
    assert ttft == sorted(ttft), ttft
    assert ttft[3] > 1.5 * ttft[0]
    reuse = [share for _, share in results]
    assert reuse[0] == max(reuse) and reuse[1] > 1.5 * reuse[3], reuse
