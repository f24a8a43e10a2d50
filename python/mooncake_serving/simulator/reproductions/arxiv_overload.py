"""Mooncake (arXiv:2407.00079), section 7 and Table 3: whom to refuse under overload."""

import numpy as np

from ...conductor import Admission, Baseline, EarlyRejection, PredictiveRejection, Slo
from ..conducting import conductor_of
from ..disaggregated import Disaggregated
from ..options import DisaggregatedOptions
from ..traces import scale_trace
from .outcome import Claim, Curve, Outcome, Row, Setup

# The paper replays 23,000 requests at twice their speed on 8P + 8D and gives neither objectives nor
# t_d. CHOSEN so that prefill and decode are both overloaded by the conversation trace. The rules
# are as it describes them: no memory is kept for what is still prefilled, no second look.
SPEED, OPTIONS = 4.0, DisaggregatedOptions(num_prefill=8, num_decode=2)
SLO = Slo(ttft_s=30.0, tbt_s=0.040)
DECODE_S = 10.0  # t_d: 343 tokens of 30 ms
RULES: dict[str, tuple[Admission, float]] = {  # share refused of 23,000
    "baseline": (Baseline(needs_room=False), 100 * 4183 / 23000),
    "early rejection": (EarlyRejection(needs_room=False, check_again=False), 100 * 3771 / 23000),
    "with prediction": (
        PredictiveRejection(decode_s=DECODE_S, needs_room=False, check_again=False),
        100 * 3589 / 23000,
    ),
}


def overload(setup: Setup) -> Outcome:
    """Requests refused, prefill wasted on them, and the swing of the decode load."""
    trace = scale_trace(setup.trace, time=1 / SPEED)
    end_s = trace[-1].timestamp_ms / 1e3
    rows, curves = [], []
    refused, wasted, effective, swing = [], [], [], []
    for name, (rule, published) in RULES.items():
        setup.on_step(name, len(RULES))
        cluster = Disaggregated(
            OPTIONS,
            conductor_of(OPTIONS, admission=rule, slo=SLO, seed=setup.seed),
            on_progress=setup.on_progress,
        )
        load: list[int] = []

        def sample(cluster: Disaggregated = cluster, load: list[int] = load) -> None:
            load.append(sum(len(instance.batch) for instance in cluster.decode))

        for second in range(int(end_s)):
            cluster.clock.at(float(second), sample)
        report = cluster.run(trace)
        out = [job for job in report.jobs if job.rejected is not None]
        refused.append(100 * len(out) / len(trace))
        wasted.append(100 * sum(job.gpu_s for job in out) / report.prefill_gpu_s)
        effective.append(100 * report.num_effective(SLO.ttft_s, SLO.tbt_s) / len(trace))
        settled = load[len(load) // 10 :]
        swing.append(float(np.std(settled) / max(1e-9, np.mean(settled))))
        rows += [
            Row(f"{name}: refused", refused[-1], published, "%"),
            Row(f"{name}: prefill wasted on refused ones", wasted[-1], None, "%"),
            Row(f"{name}: within both objectives", effective[-1], None, "%"),
            Row(f"{name}: swing of the decode load (deviation over mean)", swing[-1]),
        ]
        curves.append(Curve(name, list(range(len(load))), load))
    return Outcome(
        f"arXiv:2407.00079, Table 3 and Figure 9: overload, {setup.trace_name} at {SPEED:g} x",
        rows,
        [
            Claim("refused: baseline > early rejection", refused[0] > refused[1]),
            Claim("refused: early rejection > with prediction", refused[1] > refused[2]),
            Claim("refused: baseline > with prediction", refused[0] > refused[2]),
            Claim("only the baseline wastes prefill", wasted[0] > max(wasted[1:])),
            Claim("early rejection serves more within objectives", effective[1] > effective[0]),
            Claim("prediction does, too", effective[2] > effective[0]),
            Claim("prediction swings less than early rejection", swing[2] < swing[1]),
        ],
        curves,
        "s",
        "requests that are decoded",
        remarks=["the paper's trace, objectives and t_d are not published; ours are chosen"],
    )
