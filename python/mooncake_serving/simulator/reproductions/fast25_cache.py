"""Mooncake (FAST'25), section 5.3: one cache for all instances, how large, and its copies."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...conductor import KVCacheCentric, LoadBalance, LocalCacheAware, PrefillPolicy
from ..conducting import conductor_of
from ..disaggregated import Disaggregated
from ..hit_rate import replay
from ..options import DisaggregatedOptions
from ..report import Report
from ..traces import TraceRequest
from .clusters import serve
from .outcome import Claim, Curve, Outcome, Row, Setup
from .workloads import synthetic, toolagent

INF = float("inf")
# Of Figure 11. What was hot is evicted later on: copies are counted as time goes by.
NUM_PREFILL, SAMPLE_S = 8, 30


def hit_rate_over_capacity(setup: Setup) -> Outcome:
    """Figure 9: a pool of one LRU."""
    capacities = [1e6, 2e6, 3e6, 5e6, 1e7, 2e7, 3e7, 5e7, INF]
    curves, rates = [], {}
    for policy in ("lru", "fifo", "lfu", "length-aware", "sieve", "belady"):
        setup.on_step(policy, 6)
        rates[policy] = [replay(setup.trace, c, policy=policy).hit_rate for c in capacities]
        curves.append(Curve(policy, capacities[:-1], rates[policy][:-1]))
    lru, belady = rates["lru"], rates["belady"]
    share = {c: 100 * rate / lru[-1] for c, rate in zip(capacities, lru, strict=True)}
    return Outcome(
        f"FAST'25, Figure 9: hit rate over capacity, {setup.trace_name}",
        [
            Row("hit rate without a limit", lru[-1], 0.40, ""),
            Row("LRU at 3 million tokens, of that", share[3e6], 41.0, "%"),
            Row("LRU at 50 million tokens, of that", share[5e7], 100.0, "%"),
        ],
        [
            Claim("50 million tokens are nearly as good as no limit", share[5e7] > 97),
            Claim("3 million are less than half as good", share[3e6] < 50),
            Claim(
                "nothing beats Belady",
                all(b >= max(r) for b, *r in zip(belady, *rates.values(), strict=True)),
            ),
        ],
        curves,
        "tokens",
        "hit rate",
        log_x=True,
    )


def _caches(
    setup: Setup, trace: Sequence[TraceRequest], name: str, published: tuple[float, float]
) -> tuple[list[Row], list[Claim]]:
    """Compare a global cache with local ones; published are hits and GPU time over theirs."""
    options = DisaggregatedOptions(num_prefill=10, num_decode=1)
    first = [TraceRequest(r.timestamp_ms, r.input_length, 1, r.hash_ids) for r in trace]

    def replay(policy: PrefillPolicy, what: str) -> Report:
        setup.on_step(f"{name}, {what}", 9)
        return serve(setup, options, trace=first, policy=policy)

    local = replay(LoadBalance(), "local caches, by load")
    aware = replay(LocalCacheAware(), "local caches, by cache")
    shared = replay(KVCacheCentric(balancing_threshold=1.0), "global cache")
    hits = shared.hit_rate / local.hit_rate if local.hit_rate else INF
    gpu = shared.prefill_gpu_s / local.prefill_gpu_s
    rows = [
        Row(f"{name}: hit rate, global over local", hits, published[0], "x"),
        Row(f"{name}: prefill GPU time, global over local", gpu, published[1], "x"),
        Row(f"{name}: hit rate of local caches, requests by load", local.hit_rate),
        Row(f"{name}: hit rate of local caches, requests to most cached", aware.hit_rate),
        Row(f"{name}: hit rate of the global cache", shared.hit_rate),
    ]
    claims = [
        Claim(f"{name}: more hits", hits > 1),
        Claim(f"{name}: less GPU time", gpu < 1),
        Claim(
            f"{name}: more hits than with cache-aware requests, too",
            shared.hit_rate > aware.hit_rate,
        ),
    ]
    return rows, claims


def global_cache(setup: Setup) -> Outcome:
    """Section 5.3.1: 10 prefill nodes of 3 million tokens each, one token generated."""
    rows, claims = [], []
    for (trace, name), published in (
        ((setup.trace, setup.trace_name), (2.22, 0.76)),
        (toolagent(setup), (1.38, 0.74)),
        (synthetic(setup), (2.36, 0.52)),
    ):
        found = _caches(setup, trace, name, published)
        rows += found[0]
        claims += found[1]
    return Outcome(
        "FAST'25, section 5.3.1: global against local caches",
        rows,
        claims,
        remarks=["local caches: requests go by load; the paper does not say by what"],
    )


def _copies(
    setup: Setup, trace: Sequence[TraceRequest], name: str, options: DisaggregatedOptions
) -> tuple[np.ndarray, np.ndarray]:
    """Count copies of the 1,000 hottest blocks: the most at any one time, and at the end."""
    cluster = Disaggregated(
        options, conductor_of(options, seed=setup.seed), on_progress=setup.on_progress
    )
    uses = Counter(key for request in trace for key in request.hash_ids)
    hottest = [key for key, _ in uses.most_common(1000)]
    most = np.zeros(len(hottest))

    def count() -> np.ndarray:
        return np.array([sum(key in node.store for node in cluster.prefill) for key in hottest])

    def sample() -> None:
        np.maximum(most, count(), out=most)

    for second in range(0, int(trace[-1].timestamp_ms / 1e3), SAMPLE_S):
        cluster.clock.at(float(second), sample)
    setup.on_step(name, 3)
    cluster.run(trace)
    sample()
    return most, count()


def replicas(setup: Setup) -> Outcome:
    """Figure 11: how many prefill instances come to hold the 10, 100, 1,000 hottest blocks."""
    options = DisaggregatedOptions(num_prefill=NUM_PREFILL, num_decode=8)
    unlimited = replace(options, dram_tokens=None)
    most, at_end = _copies(setup, setup.trace, "3 million tokens an instance", options)
    kept, _ = _copies(setup, setup.trace, "stores without a limit", unlimited)
    other_trace, other_name = synthetic(setup)
    other, _ = _copies(setup, other_trace, other_name, options)
    unit = f"of {NUM_PREFILL}"
    top = {n: float(most[:n].mean()) for n in (1, 10, 100, 1000)}
    return Outcome(
        f"FAST'25, Figure 11: copies of hot blocks, {setup.trace_name}, 8P + 8D",
        [
            Row("copies of the hottest block, at its most", top[1], NUM_PREFILL, unit),
            Row("copies of the 10 hottest, at their most, mean", top[10], NUM_PREFILL, unit),
            Row("copies of the 100 hottest, at their most, mean", top[100], NUM_PREFILL, unit),
            Row("copies of the 1,000 hottest, at their most, mean", top[1000], None, unit),
            Row("the 100 hottest, stores without a limit", float(kept[:100].mean()), None, unit),
            Row("the 100 hottest, at the end of the trace", float(at_end[:100].mean()), None, unit),
            Row(f"the 100 hottest: {other_name}", float(other[:100].mean()), None, unit),
        ],
        [
            Claim("the hottest block is on every prefill instance", top[1] == NUM_PREFILL),
            Claim("the 100 hottest come to be on most", top[100] > 0.75 * NUM_PREFILL),
            Claim(
                "half as many in the synthetic workload",
                bool(other[:100].mean() < top[100] / 2),
            ),
        ],
        [
            Curve("3 million tokens an instance", list(range(1, len(most) + 1)), most.tolist()),
            Curve("without a limit", list(range(1, len(kept) + 1)), kept.tolist()),
            Curve("at the end of the trace", list(range(1, len(at_end) + 1)), at_end.tolist()),
        ],
        "rank of the block by its uses",
        "prefill instances that hold it",
        log_x=True,
        remarks=["the published figure is read as: nearly all instances for the 100 hottest keys"],
    )
