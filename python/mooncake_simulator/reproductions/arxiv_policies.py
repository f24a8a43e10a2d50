"""Mooncake (arXiv:2407.00079), Table 1: eviction policies over the capacity in blocks."""

from ..hit_rate import replay
from .outcome import Claim, Outcome, Row, Setup

CAPACITIES = (float("inf"), 100_000, 50_000, 30_000, 10_000, 1_000)  # blocks of 512 tokens
PUBLISHED = {
    "lru": (0.51, 0.51, 0.50, 0.48, 0.40, 0.30),
    "lfu": (0.51, 0.51, 0.49, 0.43, 0.35, 0.30),
    "length-aware": (0.51, 0.50, 0.48, 0.42, 0.35, 0.30),
}


def policies(setup: Setup) -> Outcome:
    """Hit rate of each policy; the published ones are of another trace, of 23,608 requests."""
    rows: list[Row] = []
    ours: dict[str, list[float]] = {}
    for policy, published in PUBLISHED.items():
        setup.on_step(policy, len(PUBLISHED), len(CAPACITIES))
        ours[policy] = []
        for capacity in CAPACITIES:
            ours[policy].append(replay(setup.trace, 512 * capacity, policy=policy).hit_rate)
            setup.on_progress()
        for capacity, rate, figure in zip(CAPACITIES, ours[policy], published, strict=True):
            name = "no limit" if capacity == float("inf") else f"{capacity:,.0f} blocks"
            rows.append(Row(f"{policy}, {name}", rate, figure))
    return Outcome(
        f"arXiv:2407.00079, Table 1: eviction policies, {setup.trace_name}",
        rows,
        [_claim(ours, "lru", "lfu"), _claim(ours, "lfu", "length-aware")],
        remarks=["the published rates are of the arXiv trace, which is not at hand"],
    )


def _claim(ours: dict[str, list[float]], better: str, worse: str) -> Claim:
    """Claim that one policy's hit rate is higher wherever the published one is."""
    places = [
        place
        for place, (high, low) in enumerate(zip(PUBLISHED[better], PUBLISHED[worse], strict=True))
        if high > low
    ]
    capacities = ", ".join(f"{CAPACITIES[place]:,}" for place in places)
    holds = all(ours[better][place] > ours[worse][place] for place in places)
    return Claim(f"{better} > {worse} at {capacities} blocks", holds)
