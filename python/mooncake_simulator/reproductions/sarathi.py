"""SARATHI (arXiv:2308.16369): tiles, chunks that carry decodes, and where that pays most."""

from dataclasses import replace

from ..coupled import CoupledInstance
from ..coupled_options import Batching, CoupledOptions
from ..events import Clock
from ..job import Job
from ..machines import A6000, LLAMA_13B
from ..step_cost import StepCost
from ..traces import TraceRequest
from .outcome import Claim, Curve, Outcome, Row, Setup

COST = StepCost(LLAMA_13B, A6000)
BATCH, LENGTH = 18, 1024  # how many 1K sequences fit into 48 GB, by the paper's section 5
PD_RATIOS = (1, 2, 4, 7, 10, 12, 14, 15, 17, 20, 28, 40, 60, 100, 200)
CHUNKS = {128: None, 256: 1.27, 512: 1.23}  # tokens of a step: published peak of the gain
NUM_REQUESTS = 24 * BATCH  # enough that filling and draining the batch hardly count


def makespan_s(options: CoupledOptions, requests: list[TraceRequest]) -> float:
    """Seconds until one instance has served all requests, which arrive at the start."""
    clock = Clock()
    capacity = options.max_batch_size * LENGTH
    instance = CoupledInstance(
        clock,
        COST,
        options,
        capacity_tokens=capacity,
        prefilled=lambda job: None,
        finished=lambda job: None,
    )
    for index, request in enumerate(requests):
        clock.at(0.0, instance.arrive, Job(index, request, 0.0))
    clock.run()
    return clock.now


def gain(pd_ratio: float, budget: int) -> float:
    """Throughput of decode-maximal batches over that of prefill-only and decode-only ones."""
    prompt = round(LENGTH * pd_ratio / (1 + pd_ratio))
    requests = [TraceRequest(0.0, prompt, LENGTH - prompt)] * NUM_REQUESTS
    baseline = CoupledOptions(max_batched_tokens=BATCH * LENGTH, max_batch_size=BATCH)
    chunked = replace(baseline, batching=Batching.CHUNKED, token_budget=budget)
    return makespan_s(baseline, requests) / makespan_s(chunked, requests)


def tiles(setup: Setup) -> Outcome:
    """Section 4.3: one token more than a multiple of the tile costs a whole tile."""
    published = {128: 55.0, 256: 69.8, 257: 92.33}
    ours = {tokens: 1e3 * COST.mixed_s([(tokens, 0)]) for tokens in published}
    lengths = list(range(16, 1025))
    return Outcome(
        "SARATHI: a step of LLaMA-13B on an A6000",
        [Row(f"{n} tokens", ours[n], published[n], "ms") for n in published],
        [
            Claim("the 257th token costs more than 20 % of the step", ours[257] > 1.2 * ours[256]),
            Claim("the 129th to 256th cost less than 50 %", ours[256] < 1.5 * ours[128]),
        ],
        [Curve("step", lengths, [1e3 * COST.mixed_s([(n, 0)]) for n in lengths])],
        "tokens",
        "ms",
        remarks=["constants fitted on Table 2 alone; these three figures are not in it"],
    )


def pd_peak(setup: Setup) -> Outcome:
    """Section 5.1: the gain peaks where each chunk finds its decodes, P:D = C / (B - 1)."""
    curves, rows, claims = [], [], []
    for budget, published in CHUNKS.items():
        setup.on_step(f"{budget} tokens a step", len(CHUNKS), len(PD_RATIOS))
        gains = []
        for ratio in PD_RATIOS:
            gains.append(gain(ratio, budget))
            setup.on_progress()
        curves.append(Curve(f"C = {budget}", PD_RATIOS, gains))
        best = PD_RATIOS[gains.index(max(gains))]
        expected = budget / (BATCH - 1)
        rows += [
            Row(f"C={budget}: peak gain", max(gains), published, "x"),
            Row(f"C={budget}: P:D of the peak", best, round(expected), ""),
        ]
        claims.append(
            Claim(
                f"C={budget}: the peak is within a factor of 1.5 of C / (B - 1) = {expected:.0f}",
                expected / 1.5 <= best <= expected * 1.5,
            )
        )
    peaks = {budget: max(curve.y) for budget, curve in zip(CHUNKS, curves, strict=True)}
    others = [peak for budget, peak in peaks.items() if budget != 256]
    claims.append(Claim("C=256 gains most", peaks[256] > max(others)))
    return Outcome(
        "SARATHI: gain of decode-maximal batches, LLaMA-13B on an A6000, B=18, 1K",
        rows,
        claims,
        curves,
        "P:D",
        "throughput over prefill-only and decode-only batches",
        log_x=True,
    )
