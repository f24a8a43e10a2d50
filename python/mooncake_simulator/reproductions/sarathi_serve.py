"""Sarathi-Serve (arXiv:2403.02310), Table 4: chunks and hybrid batches, one without the other."""

from collections.abc import Sequence

import numpy as np

from ..coupled import CoupledInstance
from ..coupled_options import Batching, CoupledOptions
from ..events import Clock
from ..job import Job
from ..machines import A100, YI_34B, group
from ..step_cost import StepCost
from ..traces import TraceRequest
from .outcome import Claim, Outcome, Row, Setup

# Two A100 by tensor parallelism. ASSUMED: 5 ms a step for launches, all-reduces and the scheduler.
COST = StepCost(YI_34B, group(A100, 2, step_s=0.005))
TOKEN_BUDGET = 1024
NUM_REQUESTS = 1000
# Median and 90th percentile of prompt and output (Sarathi-Serve, Table 2), drawn as log-normal.
# ASSUMED: requests per second, since the paper gives none for this table; about 70 % of capacity.
WORKLOADS = {
    "openchat_sharegpt4": ((1730, 5696), (415, 834), 0.9),
    "arxiv_summarization": ((7059, 12985), (208, 371), 0.45),
}
MODES = {
    "hybrid only": Batching.HYBRID,
    "chunks only": Batching.CHUNKED_ALONE,
    "both": Batching.CHUNKED,
}
PUBLISHED = {  # P50 TTFT, P99 TBT, seconds
    "openchat_sharegpt4": {
        "hybrid only": (0.53, 0.68),
        "chunks only": (1.04, 0.17),
        "both": (0.76, 0.14),
    },
    "arxiv_summarization": {
        "hybrid only": (3.78, 1.38),
        "chunks only": (5.38, 0.20),
        "both": (3.90, 0.17),
    },
}


def workload(name: str, seed: int) -> list[TraceRequest]:
    """Poisson arrivals with the lengths of a dataset."""
    (prompt, output, rate) = WORKLOADS[name]
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, NUM_REQUESTS))

    def lengths(median: int, p90: int) -> np.ndarray:
        sigma = np.log(p90 / median) / 1.2816  # the normal distribution's 90th percentile
        drawn = np.exp(rng.normal(np.log(median), sigma, NUM_REQUESTS))
        return np.clip(drawn, 2, 16384).astype(int)

    return [
        TraceRequest(1e3 * float(t), int(p), int(o))
        for t, p, o in zip(times, lengths(*prompt), lengths(*output), strict=True)
    ]


def serve(batching: Batching, requests: Sequence[TraceRequest]) -> tuple[float, float]:
    """P50 TTFT and P99 TBT of one instance, seconds."""
    clock = Clock()
    instance = CoupledInstance(
        clock,
        COST,
        CoupledOptions(batching=batching, token_budget=TOKEN_BUDGET, max_batched_tokens=16384),
        capacity_tokens=COST.machine.kv_capacity_tokens(COST.model),
        prefilled=lambda job: None,
        finished=lambda job: None,
    )
    jobs = [Job(i, request, request.timestamp_ms / 1e3) for i, request in enumerate(requests)]
    for job in jobs:
        clock.at(job.arrival_s, instance.arrive, job)
    clock.run()
    gaps = np.concatenate([job.gaps_s() for job in jobs])
    return float(np.median([job.ttft_s for job in jobs])), float(np.quantile(gaps, 0.99))


def table4(setup: Setup) -> Outcome:
    """Hybrid batches alone are good for TTFT, chunks alone for TBT, and both for either."""
    rows, claims = [], []
    for name, modes in PUBLISHED.items():
        requests = workload(name, setup.seed)
        ours = {}
        for mode, (ttft, tbt) in modes.items():
            setup.on_step(f"{name}, {mode}", len(PUBLISHED) * len(MODES))
            ours[mode] = serve(MODES[mode], requests)
            rows.append(Row(f"{name}, {mode}: P50 TTFT", ours[mode][0], ttft, "s"))
            rows.append(Row(f"{name}, {mode}: P99 TBT", ours[mode][1], tbt, "s"))
        hybrid, chunks, both = (ours[mode] for mode in MODES)
        claims += [
            Claim(f"{name}: TTFT hybrid < both < chunks", hybrid[0] < both[0] < chunks[0]),
            Claim(f"{name}: TBT both < chunks < hybrid", both[1] < chunks[1] < hybrid[1]),
        ]
    return Outcome(
        "Sarathi-Serve, Table 4: Yi-34B on two A100, 1,024 tokens a step",
        rows,
        claims,
        remarks=["arrival rates are ours: the paper gives none for this table"],
    )
