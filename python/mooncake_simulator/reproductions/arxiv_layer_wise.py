"""Mooncake (arXiv:2407.00079), section 5.2 and Figure 7: storing KV layer by layer."""

from itertools import pairwise

from ..machines import A800_NODE, LLAMA2_70B
from ..step_cost import StepCost
from .outcome import Claim, Curve, Outcome, Row, Setup

LENGTHS = (8192, 16384, 32768, 65536, 131072)


def store_latency_s(compute_s: float, store_s: float, num_layers: int) -> float:
    """Return how long after a prefill its KV is stored, if each layer's is stored once computed.

    for layer: its KV is stored when it is computed and when that of the layer before is stored

    Args:
        compute_s: of all layers, which take equally long.
        store_s: of the KV of all layers, in sequence; with one layer this is the result.
        num_layers: of the model.
    """
    computed = stored = 0.0
    for _ in range(num_layers):
        computed += compute_s / num_layers
        stored = max(stored, computed) + store_s / num_layers
    return stored - computed


def layer_wise(setup: Setup) -> Outcome:
    """Figure 7: what storing KV adds to a prefill, after it and layer by layer."""
    model, machine = LLAMA2_70B, A800_NODE
    cost = StepCost(model, machine)
    after, layered = [], []
    for length in LENGTHS:
        compute_s = cost.prefill_s(length, 0, length)
        store_s = length * model.kv_bytes_per_token / machine.host_bytes_per_s
        after.append(store_latency_s(compute_s, store_s, 1))
        layered.append(store_latency_s(compute_s, store_s, model.num_layers))
    return Outcome(
        "arXiv:2407.00079, Figure 7: latency of storing KV, LLaMA2-70B on 8 A800",
        [
            Row("128k: stored after the prefill", after[-1], 0.7, "s"),
            Row("128k: stored layer by layer", layered[-1], 0.1, "s"),
        ],
        [
            Claim(
                "layer by layer it takes less than half, at each length",
                all(b < a / 2 for a, b in zip(after, layered, strict=True)),
            ),
            Claim(
                "stored after the prefill, it grows with the length",
                all(shorter < longer for shorter, longer in pairwise(after)),
            ),
        ],
        [Curve("after the prefill", LENGTHS, after), Curve("layer by layer", LENGTHS, layered)],
        "tokens",
        "s after the prefill",
        log_x=True,
        remarks=["the published figures are read off a plot", "GPU to host at 128 GB/s"],
    )
