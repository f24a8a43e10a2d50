"""Infinite-LLM (arXiv:2401.02669): the effect of memory pooling on throughput and context."""

import numpy as np

from ..machines import A100, LLAMA2_7B, LLAMA2_13B, LLAMA2_70B, Model, group
from ..pooling import serve_pooled
from ..step_cost import StepCost
from ..traces import TraceRequest
from .outcome import Claim, Curve, Outcome, Row, Setup

NUM_GPUS = 32
GPUS_AN_INSTANCE: dict[str, tuple[Model, int]] = {
    "LLaMA2-7B": (LLAMA2_7B, 1),
    "LLaMA2-13B": (LLAMA2_13B, 2),
    "LLaMA2-70B": (LLAMA2_70B, 4),
}
# ASSUMED: the paper's nine traces span 1 to 60K up to 1 to 2,000K tokens; their distributions are
# not available. Ours are uniform in the logarithm, with outputs of 256 tokens.
MAX_TOKENS = (60_000, 100_000, 200_000, 400_000, 600_000)
NUM_REQUESTS = 3200
OUTPUT = 256


def workload(max_tokens: int, num_requests: int, seed: int) -> list[TraceRequest]:
    """Prompts of 1,000 to ``max_tokens`` tokens."""
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.uniform(np.log(1000), np.log(max_tokens), num_requests))
    return [TraceRequest(0.0, int(n), OUTPUT) for n in lengths]


def pooling(setup: Setup) -> Outcome:
    """Throughput with and without lending, and the longest context, on 32 A100."""
    rows, claims, curves = [], [], []
    for name, (model, num_gpus) in GPUS_AN_INSTANCE.items():
        machine = group(A100, num_gpus, step_s=0.005)
        cost = StepCost(model, machine)
        capacity, count = machine.kv_capacity_tokens(model), NUM_GPUS // num_gpus
        gains = []
        for max_tokens in MAX_TOKENS:
            # Only what one instance can hold: otherwise there would be nothing to compare with.
            requests = workload(max_tokens, NUM_REQUESTS, setup.seed)
            fits = [r for r in requests if r.input_length + OUTPUT <= capacity]
            setup.on_step(f"{name}, {max_tokens:,} tokens", len(MAX_TOKENS) * 3)
            alone, together = (
                serve_pooled(
                    cost, fits, num_instances=count, capacity_tokens=capacity, pooled=pooled
                ).saturated_tokens_per_s
                for pooled in (False, True)
            )
            gains.append(together / alone)
        rows.append(Row(f"{name}: smallest gain in throughput", min(gains), 1.35, "x"))
        rows.append(Row(f"{name}: largest gain in throughput", max(gains), 1.73, "x"))
        rows.append(Row(f"{name}: longest context over one instance's", count, None, "x"))
        claims.append(Claim(f"{name}: pooling is never slower", min(gains) >= 1))
        claims.append(Claim(f"{name}: pooling is faster somewhere", max(gains) > 1.05))
        curves.append(Curve(name, MAX_TOKENS, gains))
    return Outcome(
        "Infinite-LLM: pooled memory of 32 A100 over instances by themselves",
        rows,
        claims,
        curves,
        "longest prompt, tokens",
        "throughput, pooled over not",
        log_x=True,
        remarks=[
            "decoding only, outputs of 256 tokens; the paper's traces are not at hand",
            "published: 1.35 to 1.73 on three traces of contexts that one instance can hold",
            "the longest context is that of as many instances, by construction; published: 2 to "
            "19 x, over models and numbers of GPUs",
        ],
    )
