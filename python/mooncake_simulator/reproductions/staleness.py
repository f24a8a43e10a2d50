"""The cost of late KV events: the conductor decides by an index that lags behind."""

from dataclasses import replace

from ..options import DisaggregatedOptions
from .clusters import serve
from .outcome import Claim, Curve, Outcome, Row, Setup

DELAYS_S = (0.0, 0.1, 1.0, 10.0, 60.0)
# Much less than the default, so that blocks are constantly evicted and the index becomes outdated.
OPTIONS = DisaggregatedOptions(dram_tokens=300_000)


def staleness(setup: Setup) -> Outcome:
    """Hit rate and TTFT over the delay of KV events (not in the paper)."""
    hits, ttft, rows = [], [], []
    for delay_s in DELAYS_S:
        setup.on_step(f"{delay_s:g} s late", len(DELAYS_S))
        report = serve(setup, replace(OPTIONS, event_delay_s=delay_s))
        hits.append(report.hit_rate)
        ttft.append(float(report.ttft_s.mean()))
        rows.append(Row(f"{delay_s:g} s late: hit rate", hits[-1]))
        rows.append(Row(f"{delay_s:g} s late: mean TTFT", ttft[-1], None, "s"))
    return Outcome(
        f"Late KV events: {setup.trace_name}, 8P + 8D, 300,000 tokens of store an instance",
        rows,
        [
            Claim("1 s late costs less than 5 % of the hits", hits[2] > 0.95 * hits[0]),
            Claim("1 s late costs less than 5 % of TTFT", ttft[2] < 1.05 * ttft[0]),
        ],
        [Curve("hit rate", [max(d, 0.01) for d in DELAYS_S], hits)],
        "seconds that events are late",
        "hit rate",
        log_x=True,
        remarks=[
            "what the conductor reserves itself is known at once; only what stores tell is late"
        ],
    )
