"""Mooncake (FAST'25), Figures 13 to 15: the network, where time goes, and the ratio of roles."""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ..machines import A800_NODE, LLAMA3_70B
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
    """Return whether values fall from the first to the last, with no step up of 2 % or more."""
    return values[-1] < values[0] and all(b < 1.02 * a for a, b in pairwise(values))


# FITTED on the best ratio of Figure 15, which is flat: as assumed, with 10 ms, all from 8P to 14P
# serve the same within a point, and 10P + 6D is 0.2 to 0.4 points ahead of 8P + 8D.
FITTED_STEP_S = 0.040


@dataclass(frozen=True)
class _Served:
    """What clusters of RATIOS serve, in this order."""

    effective: list[float]
    ttft_s: list[float]
    tbt_ms: list[float]

    @property
    def best(self) -> int:
        """Number of prefill instances of the best."""
        return RATIOS[int(np.argmax(self.effective))][0]


def _serve_ratios(setup: Setup, step_s: float) -> _Served:
    served = _Served([], [], [])
    machine = replace(A800_NODE, step_s=step_s)
    for num_prefill, num_decode in RATIOS:
        setup.on_step(f"{num_prefill}P + {num_decode}D, {1e3 * step_s:.0f} ms", 2 * len(RATIOS))
        options = DisaggregatedOptions(
            machine=machine, num_prefill=num_prefill, num_decode=num_decode
        )
        report = serve(setup, options)
        served.effective.append(100 * report.num_effective(10.0, 0.1) / len(report.jobs))
        served.ttft_s.append(float(report.ttft_s.mean()))
        served.tbt_ms.append(1e3 * float(report.tbt_s.mean()))
    return served


def ratio(setup: Setup) -> Outcome:
    """Figure 15: 16 nodes, prefill or decode; TTFT 10 s, TBT 100 ms; synthetic workload."""
    workload = synthetic(setup)
    setup = replace(setup, trace=workload.trace)
    fitted, assumed = (_serve_ratios(setup, s) for s in (FITTED_STEP_S, A800_NODE.step_s))
    counts = [num_prefill for num_prefill, _ in RATIOS]
    rows = []
    for name, served in (("fitted", fitted), ("as assumed", assumed)):
        rows.append(Row(f"{name}: prefill instances of the best", served.best, 8, ""))
        for i, (p, d) in enumerate(RATIOS):
            at = f"{name}, {p}P + {d}D"
            rows.append(Row(f"{at}: within both", served.effective[i], None, "%"))
            rows.append(Row(f"{at}: mean TTFT", served.ttft_s[i], None, "s"))
            rows.append(Row(f"{at}: mean TBT", served.tbt_ms[i], None, "ms"))
    even = RATIOS.index((8, 8))
    return Outcome(
        f"FAST'25, Figure 15: prefill and decode instances, {workload.name}",
        rows,
        [
            Claim(
                "TTFT falls with prefill instances, but for steps of less than 2 %",
                all(_falls(served.ttft_s) for served in (fitted, assumed)),
            ),
            Claim(
                "TBT rises with fewer decode instances, but for steps of less than 2 %",
                all(_falls(served.tbt_ms[::-1]) for served in (fitted, assumed)),
            ),
            Claim(
                "4P + 12D and 14P + 2D serve less than the best",
                all(
                    max(served.effective) > max(served.effective[0], served.effective[-1])
                    for served in (fitted, assumed)
                ),
            ),
            Claim("the best is 8P + 8D, fitted", fitted.best == 8),
            Claim(
                "as assumed, 8P + 8D is within a point of the best",
                max(assumed.effective) - assumed.effective[even] < 1,
            ),
        ],
        [
            Curve("fitted", counts, fitted.effective, "within TTFT 10 s and TBT 100 ms, %"),
            Curve("as assumed", counts, assumed.effective, "within TTFT 10 s and TBT 100 ms, %"),
            Curve("fitted", counts, fitted.ttft_s, "mean TTFT, s"),
            Curve("as assumed", counts, assumed.ttft_s, "mean TTFT, s"),
            Curve("fitted", counts, fitted.tbt_ms, "mean TBT, ms"),
            Curve("as assumed", counts, assumed.tbt_ms, "mean TBT, ms"),
        ],
        "prefill instances of 16",
        remarks=[
            f"fitted: a step costs {1e3 * FITTED_STEP_S:.0f} ms in addition to its computation; "
            f"as assumed elsewhere: {1e3 * A800_NODE.step_s:.0f} ms",
            *workload.remarks,
        ],
    )


def breakdown(setup: Setup) -> Outcome:
    """Figure 14: TTFT of one request alone, nothing and 95 % of its prefix cached.

    The paper splits a request into queue, prefill, transfer, the decode node's loading of KV from
    DRAM to HBM, and decode, and its TTFT accounts for the first four. So does ours, as if none of
    them overlapped; the simulated cluster, where they do, is another row.
    """
    machine, model = A800_NODE, LLAMA3_70B
    prefill_s: dict[float, list[float]] = {0.0: [], 0.95: []}
    served_s: dict[float, list[float]] = {0.0: [], 0.95: []}
    accounted_s: dict[float, list[float]] = {0.0: [], 0.95: []}
    for length in LENGTHS:
        kv_bytes = length * model.kv_bytes_per_token
        transfer_s = kv_bytes / machine.nic_bytes_per_s
        load_s = kv_bytes / machine.host_bytes_per_s
        for share in prefill_s:
            blocks = int(length * share) // 512
            keys = tuple(range(length // 512))
            # The first request leaves the prefix behind; the second is the one that is measured.
            requests = [TraceRequest(0.0, max(1, 512 * blocks), 1, keys[:blocks])] if blocks else []
            requests.append(TraceRequest(1e6, length, 2, keys))
            options = DisaggregatedOptions(
                model=model, machine=machine, num_prefill=1, num_decode=1, prefill=PrefillOptions()
            )
            job = serve(setup, options, trace=requests).jobs[-1]
            assert job.ttft_s is not None
            prefill_s[share].append(job.gpu_s)
            served_s[share].append(job.ttft_s)
            accounted_s[share].append(job.ttft_s + transfer_s + load_s)
    saved, sooner, served = (
        100 * (1 - times[0.95][-1] / times[0.0][-1]) for times in (prefill_s, accounted_s, served_s)
    )
    rows = [
        Row("128k: less prefill", saved, 92.0, "%"),
        Row("128k: less TTFT, one part after the other", sooner, 86.0, "%"),
        Row("128k: less TTFT as it is served", served, None, "%"),
        Row("128k: transfer", transfer_s, None, "s"),
        Row("128k: load to HBM", load_s, None, "s"),
    ]
    for share, name in ((0.0, "nothing cached"), (0.95, "95 % cached")):
        rows.append(Row(f"128k, {name}: queue and prefill", served_s[share][-1], None, "s"))
    return Outcome(
        "FAST'25, Figure 14: one request, nothing and 95 % of its prefix cached",
        rows,
        [
            Claim("prefill shrinks by most of it", saved > 80),
            Claim("so does TTFT", sooner > 80),
            Claim("TTFT shrinks less than prefill does, by a point or more", sooner < saved - 1),
        ],
        [
            Curve("nothing cached", LENGTHS, accounted_s[0.0]),
            Curve("95 % cached", LENGTHS, accounted_s[0.95]),
            Curve("nothing cached, as served", LENGTHS, served_s[0.0]),
            Curve("95 % cached, as served", LENGTHS, served_s[0.95]),
        ],
        "tokens",
        "TTFT, s",
        log_x=True,
        remarks=[
            "in TTFT: queue, prefill, transfer at 800 Gbps, load from DRAM to HBM at 128 GB/s",
            "as served: what streams during the prefill costs nothing",
        ],
    )
