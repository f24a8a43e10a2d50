"""SARATHI (arXiv:2308.16369), section 5.3: GPT-3 on 64 A100, and the bubbles of its pipeline."""

import numpy as np

from ..machines import A100, GPT3_175B, group
from ..pipeline import serve_by_pipeline
from ..step_cost import StepCost
from ..traces import TraceRequest
from .outcome import Claim, Curve, Outcome, Row, Setup

COST = StepCost(GPT3_175B, group(A100, 8))  # tensor parallel 8; 8 of these in a pipeline, or alone
STAGES, PP_BATCH, TP_BATCH, PD_RATIO, BUDGET = 8, 27, 11, 10, 256
NUM_REQUESTS = 4000  # of the paper's 10,000: 18 fills of the pipeline


def workload(seed: int) -> list[TraceRequest]:
    """Lengths of 1K to 4K tokens, Zipf with theta 0.4, ten prompt tokens per generated one."""
    rng = np.random.default_rng(seed)
    lengths = np.arange(1024, 4097)
    weights = 1.0 / np.arange(1, len(lengths) + 1) ** 0.4
    drawn = rng.choice(lengths, NUM_REQUESTS, p=weights / weights.sum())
    outputs = drawn // (PD_RATIO + 1)
    return [
        TraceRequest(0.0, int(n - out), int(out)) for n, out in zip(drawn, outputs, strict=True)
    ]


def bubbles(setup: Setup) -> Outcome:
    """Steps of equal length leave no bubbles; prompts of all sizes between decodes do."""
    requests = workload(setup.seed)
    settings = {
        "Orca, TP 8 x PP 8": (STAGES, PP_BATCH, None, requests),
        "SARATHI, TP 8 x PP 8": (STAGES, PP_BATCH, BUDGET, requests),
        "Orca, 8 replicas of TP 8": (1, TP_BATCH, None, requests[::STAGES]),
    }
    results = {}
    for name, (stages, batch, budget, part) in settings.items():
        setup.on_step(name, len(settings))
        results[name] = serve_by_pipeline(
            COST, part, num_stages=stages, batch_size=batch, token_budget=budget
        )
    orca, sarathi, replicas = results.values()
    medians = [float(np.median(result.bubbles_s)) for result in (orca, sarathi)]
    speedup = orca.makespan_s / sarathi.makespan_s
    replicas_speedup = orca.makespan_s / replicas.makespan_s
    over_replicas = replicas.makespan_s / sarathi.makespan_s
    shares = np.linspace(0, 1, 101)
    return Outcome(
        "SARATHI: GPT-3 on 64 A100",
        [
            Row("median bubble a request, Orca over SARATHI", medians[0] / medians[1], 6.29, "x"),
            Row("SARATHI over Orca, both TP 8 x PP 8", speedup, 1.91, "x"),
            Row("SARATHI TP 8 x PP 8 over 8 replicas of TP 8", over_replicas, 1.48, "x"),
            Row("8 replicas of TP 8 over Orca TP 8 x PP 8", replicas_speedup, 1.28, "x"),
        ],
        [
            Claim("SARATHI has the smaller bubbles", medians[0] > medians[1]),
            Claim("SARATHI is faster than Orca on the same pipeline", speedup > 1),
            Claim("SARATHI's pipeline is faster than replicas", over_replicas > 1),
            Claim("replicas are faster than Orca's pipeline", replicas_speedup > 1),
        ],
        [
            Curve("Orca", np.quantile(orca.bubbles_s, shares).tolist(), shares.tolist()),
            Curve("SARATHI", np.quantile(sarathi.bubbles_s, shares).tolist(), shares.tolist()),
        ],
        "bubble a request, s",
        "share of requests",
        log_x=True,
        remarks=["no cost of sending between stages, nor of all-reduces"],
    )
