"""Mooncake (FAST'25), Figures 1, 6 and 7: requests that meet their objectives, against vLLM."""

from dataclasses import replace

from ..options import DisaggregatedOptions
from .clusters import VLLM, gain, serve, serve_coupled
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

TTFT_S = 30.0
TBT_S = (0.1, 0.2, 0.3)
CURVE_TBT_S = tuple(0.02 * i for i in range(1, 26))
PUBLISHED_GAIN = {  # %, at each limit of TBT: over vLLM, for tool&agent over its prefix caching
    CONVERSATION: (498.0, 157.0, 59.0),
    TOOLAGENT: (64.0, 42.0, 22.0),
    SYNTHETIC: (62.0, 40.0, 28.0),
}
PUBLISHED_GPU = {  # prefill GPU time over Mooncake's: the modes in the order of VLLM
    CONVERSATION: (1.56, 1.43, 1.90),
    TOOLAGENT: (2.12, 1.40, 2.68),
    SYNTHETIC: (2.76, 2.59, 3.33),
}


def effective_capacity(setup: Setup, workload: Workload, over: str = "vLLM") -> Outcome:
    """Replay a trace as it came; count requests with TTFT <= 30 s and TBT within a limit."""
    setup = replace(setup, trace=workload.trace)
    reports = {}
    for name, engine in VLLM.items():
        setup.on_step(name, len(VLLM) + 1)
        reports[name] = serve_coupled(setup, engine)
    setup.on_step("Mooncake", len(VLLM) + 1)
    mooncake = serve(setup, DisaggregatedOptions())
    gains = [gain(mooncake, reports[over], TTFT_S, limit) for limit in TBT_S]
    rows = [
        Row(f"gain over {over}, TBT {1e3 * limit:.0f} ms", ours, published, "%")
        for limit, ours, published in zip(TBT_S, gains, PUBLISHED_GAIN[workload.kind], strict=True)
    ]
    for (name, report), theirs in zip(reports.items(), PUBLISHED_GPU[workload.kind], strict=True):
        ratio = report.prefill_gpu_s / mooncake.prefill_gpu_s
        rows.append(Row(f"prefill GPU time of {name}", ratio, theirs, "x Mooncake"))
    everyone = {"Mooncake": mooncake, **reports}
    for name, report in everyone.items():
        effective = report.num_effective(TTFT_S, TBT_S[0]) / len(report.jobs)
        rows.append(Row(f"{name}: requests within 30 s and 100 ms", 100 * effective, None, "%"))
    gpu = [report.prefill_gpu_s for report in (mooncake, *reports.values())]
    return Outcome(
        f"FAST'25, effective request capacity: {workload.name}, 16 nodes, 8P + 8D",
        rows,
        [
            Claim("Mooncake serves more at every limit", min(gains) > 0),
            Claim("the tighter the limit, the more", gains[0] > gains[1] > gains[2]),
            Claim(
                "prefill GPU time: Mooncake < prefix caching < vLLM < chunked prefill",
                gpu[0] < gpu[2] < gpu[1] < gpu[3],
            ),
        ],
        [
            Curve(
                name,
                [1e3 * limit for limit in CURVE_TBT_S],
                [100 * r.num_effective(TTFT_S, limit) / len(r.jobs) for limit in CURVE_TBT_S],
            )
            for name, r in everyone.items()
        ],
        "TBT limit, ms",
        "requests within TTFT 30 s and this TBT, %",
        remarks=workload.remarks,
    )


def real_workload(setup: Setup) -> Outcome:
    """arXiv:2407.00079, real workload: 10P + 10D compared with 20 vLLM; TTFT 30 s, TBT 100 ms."""
    setup.on_step("20 vLLM", 2)
    vllm = serve_coupled(setup, VLLM["vLLM"], num_instances=20)
    setup.on_step("Mooncake 10P + 10D", 2)
    mooncake = serve(setup, DisaggregatedOptions(num_prefill=10, num_decode=10))
    shares = {}
    for name, report in (("Mooncake", mooncake), ("vLLM", vllm)):
        shares[name, "TTFT"] = 100 * float((report.ttft_s <= TTFT_S).mean())
        shares[name, "TBT"] = 100 * float((report.tbt_s <= TBT_S[0]).mean())
    published = {("Mooncake", "TTFT"): 100.0, ("vLLM", "TTFT"): 100.0}
    published |= {("Mooncake", "TBT"): 100.0, ("vLLM", "TBT"): 57.0}
    return Outcome(
        f"arXiv:2407.00079, real workload: {setup.trace_name}, 20 nodes",
        [
            *(
                Row(f"{name}: within its {limit}", shares[name, limit], published[name, limit], "%")
                for name, limit in published
            ),
            Row("more requests within both", gain(mooncake, vllm, TTFT_S, TBT_S[0]), 75.0, "%"),
        ],
        [
            Claim(
                "nearly all meet TTFT on both", min(shares[n, "TTFT"] for n, _ in published) > 95
            ),
            Claim("nearly all of Mooncake's meet TBT", shares["Mooncake", "TBT"] > 95),
            Claim("far fewer of vLLM's do", shares["vLLM", "TBT"] < 80),
        ],
        remarks=["the paper's trace of 23,000 requests is another one"],
    )


def conversation_workload(setup: Setup) -> Outcome:
    """Figure 1, the conversation workload."""
    return effective_capacity(setup, conversation(setup))


def synthetic_workload(setup: Setup) -> Outcome:
    """Figure 7, the synthetic workload."""
    return effective_capacity(setup, synthetic(setup))


def toolagent_workload(setup: Setup) -> Outcome:
    """Figure 6, the tool&agent workload."""
    return effective_capacity(setup, toolagent(setup), "vLLM prefix caching")
