"""Mooncake (FAST'25), Figures 13 to 15: the network, where time goes, and how many of each kind."""

from dataclasses import replace
from itertools import pairwise

import numpy as np

from ..machines import A800_NODE
from ..options import DisaggregatedOptions
from ..prefill import PrefillOptions
from ..traces import TraceRequest
from .clusters import serve
from .outcome import Claim, Curve, Outcome, Row, Setup
from .workloads import synthetic

GBPS = (24, 50, 100, 200, 400)
RATIOS = ((4, 12), (6, 10), (8, 8), (10, 6), (12, 4), (14, 2))
LENGTHS = (8192, 16384, 32768, 65536, 131072)


def bandwidth(setup: Setup) -> Outcome:
    """Figure 13: mean TTFT over the network's rate, on the synthetic workload."""
    workload = synthetic(setup)
    setup = replace(setup, trace=workload.trace)
    means = []
    for gbps in GBPS:
        setup.on_step(f"{gbps} Gbps", len(GBPS))
        machine = replace(A800_NODE, nic_bytes_per_s=gbps * 1e9 / 8)
        report = serve(setup, DisaggregatedOptions(machine=machine))
        means.append(float(report.ttft_s.mean()))
    by_rate = dict(zip(GBPS, means, strict=True))
    return Outcome(
        f"FAST'25, Figure 13: TTFT over the network's rate, {workload.name}, 8P + 8D",
        [Row(f"{gbps} Gbps: mean TTFT", mean, None, "s") for gbps, mean in by_rate.items()],
        [
            Claim("below 2 s from 100 Gbps on", max(by_rate[g] for g in GBPS if g >= 100) < 2),
            Claim("TTFT falls with bandwidth, but for steps of less than 2 %", _falls(means)),
            Claim(
                "what 100 Gbps gains over 24 is more than what 400 gains over 100",
                by_rate[24] - by_rate[100] > by_rate[100] - by_rate[400],
            ),
        ],
        [Curve("mean TTFT", GBPS, means)],
        "Gbps a node",
        "mean TTFT, s",
        remarks=[
            "KV that streams to a decode instance delays its second token, not TTFT",
            *workload.remarks,
        ],
    )


def _falls(values: list[float]) -> bool:
    """Tell whether values fall from the first to the last, and no step up is of 2 % or more."""
    return values[-1] < values[0] and all(b < 1.02 * a for a, b in pairwise(values))


def ratio(setup: Setup) -> Outcome:
    """Figure 15: 16 nodes, prefill or decode; TTFT 10 s, TBT 100 ms; synthetic workload."""
    workload = synthetic(setup)
    setup = replace(setup, trace=workload.trace)
    effective, ttft, tbt = [], [], []
    for num_prefill, num_decode in RATIOS:
        setup.on_step(f"{num_prefill}P + {num_decode}D", len(RATIOS))
        options = DisaggregatedOptions(num_prefill=num_prefill, num_decode=num_decode)
        report = serve(setup, options)
        effective.append(100 * report.num_effective(10.0, 0.1) / len(report.jobs))
        ttft.append(float(report.ttft_s.mean()))
        tbt.append(1e3 * float(report.tbt_s.mean()))
    best, best_of = RATIOS[int(np.argmax(effective))][0], max(effective)
    even = effective[RATIOS.index((8, 8))]
    counts = [num_prefill for num_prefill, _ in RATIOS]
    names = [f"{p}P + {d}D" for p, d in RATIOS]
    rows = [Row("prefill instances of the best", best, 8, "")]
    for name, e, f, b in zip(names, effective, ttft, tbt, strict=True):
        rows += [Row(f"{name}: within both", e, None, "%"), Row(f"{name}: mean TTFT", f, None, "s")]
        rows.append(Row(f"{name}: mean TBT", b, None, "ms"))
    return Outcome(
        f"FAST'25, Figure 15: prefill and decode instances, {workload.name}",
        rows,
        [
            Claim(
                "TTFT falls with prefill instances, but for steps of less than 2 %", _falls(ttft)
            ),
            Claim(
                "TBT rises with fewer decode instances, but for steps of less than 2 %",
                _falls(tbt[::-1]),
            ),
            Claim(
                "4P + 12D and 14P + 2D serve less than the best",
                best_of > max(effective[0], effective[-1]),
            ),
            Claim("the best is 8P + 8D", best == 8),
            Claim("8P + 8D is within a point of the best", best_of - even < 1),
        ],
        [
            Curve("within both", counts, effective, "within TTFT 10 s and TBT 100 ms, %"),
            Curve("mean TTFT", counts, ttft, "mean TTFT, s"),
            Curve("mean TBT", counts, tbt, "mean TBT, ms"),
        ],
        "prefill instances of 16",
        remarks=workload.remarks,
    )


def breakdown(setup: Setup) -> Outcome:
    """Figure 14: TTFT of one request alone, nothing and 95 % of its prefix cached."""
    prefill_s: dict[float, list[float]] = {0.0: [], 0.95: []}
    ttft_s: dict[float, list[float]] = {0.0: [], 0.95: []}
    for length in LENGTHS:
        for share in prefill_s:
            blocks = int(length * share) // 512
            keys = tuple(range(length // 512))
            # The first request leaves the prefix behind; the second is the one that is measured.
            requests = [TraceRequest(0.0, max(1, 512 * blocks), 1, keys[:blocks])] if blocks else []
            requests.append(TraceRequest(1e6, length, 2, keys))
            options = DisaggregatedOptions(num_prefill=1, num_decode=1, prefill=PrefillOptions())
            job = serve(setup, options, trace=requests).jobs[-1]
            assert job.ttft_s is not None
            prefill_s[share].append(job.gpu_s)
            ttft_s[share].append(job.ttft_s)
    saved = 100 * (1 - prefill_s[0.95][-1] / prefill_s[0.0][-1])
    sooner = 100 * (1 - ttft_s[0.95][-1] / ttft_s[0.0][-1])
    return Outcome(
        "FAST'25, Figure 14: one request, nothing and 95 % of its prefix cached",
        [
            Row("128k: less prefill", saved, 92.0, "%"),
            Row("128k: less TTFT", sooner, 86.0, "%"),
        ],
        [
            Claim("prefill shrinks by most of it", saved > 80),
            Claim("so does TTFT", sooner > 80),
            Claim("TTFT shrinks less than prefill does, by a point or more", sooner < saved - 1),
        ],
        [
            Curve("nothing cached", LENGTHS, ttft_s[0.0]),
            Curve("95 % cached", LENGTHS, ttft_s[0.95]),
        ],
        "tokens",
        "TTFT, s",
        log_x=True,
    )
