"""Mooncake (FAST'25), section 5.3: one cache for all instances, its size, and its copies."""

from collections import Counter
from dataclasses import replace

import numpy as np

from mooncake_serving.conductor import KVCacheCentric, LoadBalance, LocalCacheAware, PrefillPolicy

from ..conducting import conductor_of
from ..disaggregated import Disaggregated
from ..hit_rate import replay
from ..options import DisaggregatedOptions
from ..report import Report
from ..traces import TraceRequest
from .clusters import serve
from .outcome import Claim, Curve, Outcome, Row, Setup
from .workloads import (
    CONVERSATION,
    SYNTHETIC,
    TOOLAGENT,
    Workload,
    conversation,
    synthetic,
    toolagent,
)

INF = float("inf")
MADE_UP = ["what is made up is fitted on its file's hit rates, and is no evidence of them"]
CAPACITIES = (1e6, 2e6, 3e6, 5e6, 1e7, 2e7, 3e7, 5e7, INF)
POLICIES = ("lru", "fifo", "lfu", "length-aware", "sieve", "belady")
# Figure 9 and Table 2: the unlimited hit rate, and LRU's share of it at 3 million tokens, %.
PUBLISHED_HITS = {CONVERSATION: (0.40, 41.0), SYNTHETIC: (0.66, 46.0), TOOLAGENT: (0.59, 75.0)}
# LRU's hit rates on the second half of the tool&agent file, by blocks of 512 tokens, as known from
# Mooncake's own cache calculator (its precomputed curves).
KNOWN_TOOLAGENT = {500: 0.363, 2000: 0.372, 6000: 0.432, 20_000: 0.547, INF: 0.591}
# Section 5.3.1: hits and prefill GPU time, global over local caches.
PUBLISHED_GLOBAL = {CONVERSATION: (2.22, 0.76), SYNTHETIC: (2.36, 0.52), TOOLAGENT: (1.38, 0.74)}
# Of Figure 11. Blocks once hot are evicted later: copies are sampled over time.
NUM_PREFILL, SAMPLE_S = 8, 30


def hit_rate_over_capacity(setup: Setup) -> Outcome:
    """Figure 9: a pool of one LRU, each workload; and the conversation by other policies."""
    first, *others = workloads = (conversation(setup), toolagent(setup), synthetic(setup))
    num_steps = len(POLICIES) + len(others) + 1
    by_policy = {policy: _hit_rates(setup, first, policy, num_steps) for policy in POLICIES}
    lru = {workload.kind: _hit_rates(setup, workload, "lru", num_steps) for workload in others}
    lru[first.kind] = by_policy["lru"]
    share = {
        kind: {c: 100 * rate / rates[-1] for c, rate in zip(CAPACITIES, rates, strict=True)}
        for kind, rates in lru.items()
    }
    rows = []
    for workload in workloads:
        unlimited, at_3_million = PUBLISHED_HITS[workload.kind]
        of_that = share[workload.kind]
        rows += [
            Row(f"{workload.name}: without a limit", lru[workload.kind][-1], unlimited),
            Row(
                f"{workload.name}: LRU at 3 million tokens, of that",
                of_that[3e6],
                at_3_million,
                "%",
            ),
        ]
    rows.append(
        Row(f"{first.name}: LRU at 50 million, of that", share[first.kind][5e7], 100.0, "%")
    )
    best = {kind: rates[-1] for kind, rates in lru.items()}
    second_half = _second_half(setup, others[0], num_steps)
    for blocks, rate in second_half.items():
        size = "without a limit" if blocks == INF else f"LRU, {blocks:,} blocks"
        what = f"{others[0].name}, its second half: {size}"
        rows.append(Row(what, rate, KNOWN_TOOLAGENT[blocks]))
    limited = [blocks for blocks in KNOWN_TOOLAGENT if blocks != INF]
    return Outcome(
        f"FAST'25, Figure 9: hit rate over capacity, {first.name}",
        rows,
        [
            Claim("50 million tokens are nearly as good as no limit", share[first.kind][5e7] > 97),
            Claim("3 million are less than half as good", share[first.kind][3e6] < 50),
            Claim(
                "without a limit: synthetic > tool&agent > conversation",
                best[SYNTHETIC] > best[TOOLAGENT] > best[CONVERSATION],
            ),
            Claim(
                "of that at 3 million: tool&agent > synthetic > conversation",
                share[TOOLAGENT][3e6] > share[SYNTHETIC][3e6] > share[CONVERSATION][3e6],
            ),
            Claim(
                "nothing beats Belady",
                all(
                    belady >= rate
                    for rates in by_policy.values()
                    for belady, rate in zip(by_policy["belady"], rates, strict=True)
                ),
            ),
        ],
        [
            *(
                Curve(policy, CAPACITIES[:-1], rates[:-1], f"hit rate, {first.name}")
                for policy, rates in by_policy.items()
            ),
            *(
                Curve(workload.name, CAPACITIES[:-1], lru[workload.kind][:-1], "hit rate, LRU")
                for workload in workloads
            ),
            *(
                Curve(
                    label,
                    [512 * blocks for blocks in limited],
                    [rates[blocks] for blocks in limited],
                    f"hit rate of the second half, {TOOLAGENT}",
                )
                for label, rates in ((others[0].name, second_half), ("known", KNOWN_TOOLAGENT))
            ),
        ],
        "tokens",
        log_x=True,
        remarks=[
            *(remark for workload in workloads for remark in workload.remarks),
            *(MADE_UP if len(setup.released) < len(others) else ()),
        ],
    )


def _second_half(setup: Setup, workload: Workload, num_steps: int) -> dict[float, float]:
    """Return the hit rates of LRU pools of the known sizes, filled by the first half."""
    setup.on_step(f"{workload.kind}, second half", num_steps, len(KNOWN_TOOLAGENT))
    rates = {}
    for blocks in KNOWN_TOOLAGENT:
        rates[blocks] = replay(workload.trace, 512 * blocks, warm_up=0.5).hit_rate
        setup.on_progress()
    return rates


def _hit_rates(setup: Setup, workload: Workload, policy: str, num_steps: int) -> list[float]:
    """Return the hit rate of a pool of each capacity.

    Raises:
        ValueError: there is no hit even without a limit.
    """
    setup.on_step(f"{workload.kind}, {policy}", num_steps, len(CAPACITIES))
    rates = []
    for capacity in CAPACITIES:
        rates.append(replay(workload.trace, capacity, policy=policy).hit_rate)
        setup.on_progress()
    if not rates[-1]:
        raise ValueError(
            f"a trace must hold requests that share prefixes, got {len(workload.trace):,} that "
            f"share none: {workload.name}"
        )
    return rates


def _caches(setup: Setup, workload: Workload) -> tuple[list[Row], list[Claim]]:
    """Compare a global cache with local ones."""
    options = DisaggregatedOptions(num_prefill=10, num_decode=1)
    first = [TraceRequest(r.timestamp_ms, r.input_length, 1, r.hash_ids) for r in workload.trace]
    setup, name = replace(setup, trace=first), workload.name

    def replayed(policy: PrefillPolicy, what: str) -> Report:
        setup.on_step(f"{name}, {what}", 3 * len(PUBLISHED_GLOBAL))
        return serve(setup, options, policy=policy)

    local = replayed(LoadBalance(), "local caches, by load")
    aware = replayed(LocalCacheAware(), "local caches, by cache")
    shared = replayed(KVCacheCentric(balancing_threshold=1.0), "global cache")
    hits = shared.hit_rate / local.hit_rate if local.hit_rate else INF
    gpu = shared.prefill_gpu_s / local.prefill_gpu_s
    published_hits, published_gpu = PUBLISHED_GLOBAL[workload.kind]
    rows = [
        Row(f"{name}: hit rate, global over local", hits, published_hits, "x"),
        Row(f"{name}: prefill GPU time, global over local", gpu, published_gpu, "x"),
        Row(f"{name}: hit rate of local caches, requests by load", local.hit_rate),
        Row(f"{name}: hit rate of local caches, requests to most cached", aware.hit_rate),
        Row(f"{name}: hit rate of the global cache", shared.hit_rate),
    ]
    claims = [
        Claim(f"{name}: more hits", shared.hit_rate > local.hit_rate),
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
    remarks = ["local caches: requests go by load; the paper does not say by what"]
    for workload in (conversation(setup), toolagent(setup), synthetic(setup)):
        found = _caches(setup, workload)
        rows += found[0]
        claims += found[1]
        remarks += workload.remarks
    return Outcome(
        "FAST'25, section 5.3.1: global against local caches", rows, claims, remarks=remarks
    )


def _copies(
    setup: Setup, what: str, options: DisaggregatedOptions
) -> tuple[np.ndarray, np.ndarray]:
    """Count copies of the 1,000 hottest blocks: the maximum over time, and at the end."""
    setup.on_step(what, 3)
    trace = setup.trace
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
    cluster.run(trace)
    sample()
    return most, count()


def replicas(setup: Setup) -> Outcome:
    """Figure 11: how many prefill instances come to hold the 10, 100, 1,000 hottest blocks."""
    options = DisaggregatedOptions(num_prefill=NUM_PREFILL, num_decode=8)
    unlimited = replace(options, dram_tokens=None)
    workload, other_workload = conversation(setup), synthetic(setup)
    most, at_end = _copies(setup, "3 million tokens an instance", options)
    kept, _ = _copies(setup, "stores without a limit", unlimited)
    other_setup = replace(setup, trace=other_workload.trace)
    other, _ = _copies(other_setup, other_workload.name, options)
    unit = f"of {NUM_PREFILL}"
    top = {n: float(most[:n].mean()) for n in (1, 10, 100, 1000)}
    return Outcome(
        f"FAST'25, Figure 11: copies of hot blocks, {workload.name}, 8P + 8D",
        [
            Row("copies of the hottest block, at its most", top[1], NUM_PREFILL, unit),
            Row("copies of the 10 hottest, at their most, mean", top[10], NUM_PREFILL, unit),
            Row("copies of the 100 hottest, at their most, mean", top[100], NUM_PREFILL, unit),
            Row("copies of the 1,000 hottest, at their most, mean", top[1000], None, unit),
            Row("the 100 hottest, stores without a limit", float(kept[:100].mean()), None, unit),
            Row("the 100 hottest, at the end of the trace", float(at_end[:100].mean()), None, unit),
            Row(f"the 100 hottest: {other_workload.name}", float(other[:100].mean()), None, unit),
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
        remarks=[
            "the published figure is read as: nearly all instances for the 100 hottest keys",
            *workload.remarks,
            *other_workload.remarks,
        ],
    )
