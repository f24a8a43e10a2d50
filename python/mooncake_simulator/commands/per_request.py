"""The output of ``run`` about a simulation: a line for each request, and overall distributions."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..job import Job
from ..report import Report
from ..reproductions import Curve, Panel


def lines(report: Report) -> Iterator[dict[str, Any]]:
    """Report the decision about each request, its reason, and its times; null did not happen."""
    for job in report.jobs:
        served = job.finished_s is not None
        yield {
            "request": job.job_id,
            "arrival_s": job.arrival_s,
            "input_length": job.request.input_length,
            "output_length": job.request.output_length,
            "served": served,
            **_decided(job),
            "prefill_instance": job.prefill_instance,
            "decode_instance": job.decode_instance,
            "hit_tokens": job.prefix_tokens,
            "fetched_tokens": job.fetched_tokens,
            "ttft_s": job.ttft_s,
            "tbt_s": job.tbt_s() if served else None,
            "finished_s": job.finished_s,
            "restarts": job.restarts,
        }


def _decided(job: Job) -> dict[str, Any]:
    if job.decision is None:
        return {"decision": None, "reason": None, "prefill_reason": None}
    prefill = job.decision.prefill
    return {
        "decision": job.decision.reason.why.name,
        "reason": str(job.decision.reason),
        "prefill_reason": None if prefill is None else str(prefill.reason),
    }


def panels(report: Report) -> list[Panel]:
    """Draw the distributions of TTFT and TBT, and the number of requests over time."""
    served = [job for job in report.jobs if job.finished_s is not None]
    prefilled = [(job.arrival_s, job.first_token_s) for job in served]
    decoded = [(job.first_token_s, job.finished_s) for job in served]
    return [
        Panel([_distribution("TTFT", report.ttft_s)], "TTFT, s", "requests, %", log_x=True),
        Panel([_distribution("TBT", report.tbt_s)], "TBT, s", "requests, %", log_x=True),
        Panel(
            [_load("waiting or prefilled", prefilled), _load("decoded", decoded)],
            "s",
            "requests at a time",
        ),
    ]


def _distribution(label: str, seconds: np.ndarray) -> Curve:
    """Draw the share of requests up to each value; a request of one token has no TBT."""
    values = np.sort(seconds[seconds > 0])
    shares = 100 * np.arange(1, len(values) + 1) / max(1, len(values))
    return Curve(label, values.tolist(), shares.tolist())


def _load(label: str, spans: list[tuple[Any, Any]]) -> Curve:
    """Draw the number of overlapping time spans, at each moment at which one begins or ends."""
    begin, end = np.array(spans, float).reshape(-1, 2).T
    moments = np.concatenate([begin, end])
    order = np.argsort(moments, kind="stable")
    change = np.repeat([1, -1], len(spans))[order]
    return Curve(label, moments[order].tolist(), np.cumsum(change).tolist())
