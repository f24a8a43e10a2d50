"""Mooncake (FAST'25), Figure 1, over what no paper gives: the effect of each assumption."""

from dataclasses import dataclass, replace
from itertools import pairwise

from mooncake_serving.conductor import PrefillPolicy, Random, RoundRobin

from ..coupled_options import CoupledOptions
from ..machines import A800_NODE, Machine
from ..options import DisaggregatedOptions
from ..report import Report
from .clusters import VLLM, gain, serve, serve_coupled
from .fast25_capacity import PUBLISHED_GAIN, TBT_S, TTFT_S
from .outcome import Claim, Curve, Outcome, Row, Setup
from .workloads import conversation

SHARES = (0.3, 0.4, 0.5, 0.6)


@dataclass(frozen=True)
class _Variant:
    """The difference to Figure 1."""

    machine: Machine = A800_NODE
    vllm: CoupledOptions = VLLM["vLLM"]
    router: PrefillPolicy | None = None
    max_batch_size: int = 256  # of a decode instance
    ttft_s: float = TTFT_S


def _with_share(share: float) -> Machine:
    return replace(A800_NODE, math_efficiency=share, attention_efficiency=0.8 * share)


# vLLM 0.5.1 batches prompts up to the model's context length, unless another limit is set.
ONE_AT_A_TIME = {
    "vLLM routes in turn": _Variant(router=RoundRobin()),
    "vLLM routes at random": _Variant(router=Random()),
    "vLLM prefills up to 131,072 tokens a step": _Variant(
        vllm=CoupledOptions(max_batched_tokens=131_072)
    ),
    "vLLM prefills one prompt a step": _Variant(vllm=CoupledOptions(max_batched_tokens=1)),
    "64 requests a batch in both": _Variant(
        vllm=CoupledOptions(max_batch_size=64), max_batch_size=64
    ),
    "a step costs 5 ms": _Variant(machine=replace(A800_NODE, step_s=0.005)),
    "a step costs 20 ms": _Variant(machine=replace(A800_NODE, step_s=0.020)),
    "TTFT within 10 s": _Variant(ttft_s=10.0),
    "30 % of the peak, vLLM routes at random": _Variant(_with_share(0.3), router=Random()),
}


def _gains(setup: Setup, variant: _Variant, mooncake: Report) -> list[float]:
    """By how many percent Mooncake serves more requests in time, at each limit of TBT."""
    vllm = serve_coupled(setup, variant.vllm, machine=variant.machine, policy=variant.router)
    return [gain(mooncake, vllm, variant.ttft_s, limit) for limit in TBT_S]


def sensitivity(setup: Setup) -> Outcome:
    """Figure 1 again, with one assumption at a time that no paper gives set otherwise."""
    variants = {f"{share:.0%} of the peak": _Variant(_with_share(share)) for share in SHARES}
    variants |= ONE_AT_A_TIME
    gains: dict[str, list[float]] = {}
    served: dict[tuple[Machine, int], Report] = {}  # reused if a variant concerns vLLM alone
    for name, variant in variants.items():
        setup.on_step(name, len(variants))
        ours = variant.machine, variant.max_batch_size
        if ours not in served:
            options = DisaggregatedOptions(machine=ours[0], max_batch_size=ours[1])
            served[ours] = serve(setup, options)
        gains[name] = _gains(setup, variant, served[ours])
    workload = conversation(setup)
    published = PUBLISHED_GAIN[workload.kind]
    return Outcome(
        f"FAST'25, Figure 1, over what is assumed: {workload.name}",
        [
            Row(f"{name}: gain over vLLM, TBT {1e3 * limit:.0f} ms", ours, theirs, "%")
            for name, values in gains.items()
            for limit, ours, theirs in zip(TBT_S, values, published, strict=True)
        ],
        [
            Claim(
                "Mooncake serves more in each", all(min(values) > 0 for values in gains.values())
            ),
            Claim(
                "the tighter the limit, the more, in each",
                all(a > b for values in gains.values() for a, b in pairwise(values)),
            ),
        ],
        [
            Curve(
                f"TBT {1e3 * limit:.0f} ms",
                SHARES,
                [gains[f"{share:.0%} of the peak"][i] for share in SHARES],
            )
            for i, limit in enumerate(TBT_S)
        ],
        "share of the peak in matrix products",
        "gain over vLLM, %",
        remarks=workload.remarks,
    )
