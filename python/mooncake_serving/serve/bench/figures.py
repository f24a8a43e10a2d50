"""Figures of a run, by the names and definitions of vLLM's ``bench serve``."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from .request import Answer

NAMES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
LEAST_S = 1e-9
WIDTH = 50  # of a line for people


def figures_of(
    answers: Sequence[Answer],
    duration_s: float,
    *,
    goodput_ms: Mapping[str, float],
    percentiles: Sequence[float],
) -> dict[str, Any]:
    """Return the figures; times in milliseconds, of the requests that have a whole answer.

    Args:
        answers: to all requests.
        duration_s: from the beginning to the end of the last.
        goodput_ms: objectives by ``ttft``, ``tpot``, ``e2el``; {}: there is no goodput.
        percentiles: besides mean and median, by linear interpolation.
    """
    done = [one for one in answers if not one.error]
    output = sum(one.output_len for one in done)
    total_input = sum(one.input_len for one in done)
    per_s = 1 / max(duration_s, LEAST_S)
    figures: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(answers) - len(done),
        "total_input_tokens": total_input,
        "total_output_tokens": output,
        "total_cached_tokens": sum(one.cached_len for one in done),
        "request_throughput": len(done) * per_s,
        "request_goodput": None,
        "output_throughput": output * per_s,
        "total_token_throughput": (total_input + output) * per_s,
    }
    if goodput_ms:
        good = sum(is_good(one, goodput_ms) for one in done)
        figures |= {"request_goodput": good * per_s, "good": good}
    for name, values in series_of(done).items():
        figures |= _spread(name, values, percentiles)
    refused = [one for one in answers if one.is_refused]
    figures["refused"] = len(refused)
    figures["wasted_prefills"] = sum(one.is_wasted_prefill for one in refused)
    figures["not_answered"] = _by_reason(answers)
    return figures


def series_of(done: Iterable[Answer]) -> dict[str, list[float]]:
    """Return the seconds that each of ``NAMES`` is about."""
    done = list(done)
    return {
        "ttft": [one.ttft_s for one in done],
        "tpot": [one.tpot_s for one in done if one.tpot_s is not None],
        "itl": [gap for one in done for gap in one.itl_s],
        "e2el": [one.latency_s for one in done],
    }


def is_good(answer: Answer, goodput_ms: Mapping[str, float]) -> bool:
    """Whether a whole answer meets all objectives; one of a single token has no time a token."""
    times = {"ttft": answer.ttft_s, "tpot": answer.tpot_s or 0.0, "e2el": answer.latency_s}
    return all(1000 * times[name] <= most_ms for name, most_ms in goodput_ms.items())


def details_of(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return lists with an entry for each request, times in seconds."""
    return {
        "start_times": [one.started_s for one in answers],
        "input_lens": [one.input_len for one in answers],
        "output_lens": [one.output_len for one in answers],
        "cached_lens": [one.cached_len for one in answers],
        "ttfts": [one.ttft_s for one in answers],
        "itls": [one.itl_s for one in answers],
        "latencies": [one.latency_s for one in answers],
        "errors": [one.error for one in answers],
    }


def text_of(figures: Mapping[str, Any]) -> str:
    """Return figures as lines for people."""
    lines = [
        _line("Successful requests", figures["completed"]),
        _line("Failed requests", figures["failed"]),
        _line("Benchmark duration (s)", figures["duration"]),
        _line("Total input tokens", figures["total_input_tokens"]),
        _line("of these cached", figures["total_cached_tokens"]),
        _line("Total generated tokens", figures["total_output_tokens"]),
        _line("Request throughput (req/s)", figures["request_throughput"]),
        _line("Output token throughput (tok/s)", figures["output_throughput"]),
        _line("Total token throughput (tok/s)", figures["total_token_throughput"]),
    ]
    if figures["request_goodput"] is not None:
        lines.append(_line("Request goodput (req/s)", figures["request_goodput"]))
    for name, title in NAMES.items():
        lines.append(title.center(WIDTH, "-"))
        for key in spread_keys(figures, name):
            lines.append(_line(f"{key.split('_')[0].title()} {name.upper()} (ms)", figures[key]))
    for reason, one in figures["not_answered"].items():
        after = one["retry_after_s"]
        retry = "" if after is None else f", again after {after:.3g} s"
        lines.append(f"{one['count']} not answered: {reason}{retry}")
    if figures["wasted_prefills"]:
        lines.append(f"{figures['wasted_prefills']} of these after their prefill, which is wasted")
    return "\n".join(lines)


def spread_keys(figures: Mapping[str, Any], name: str) -> list[str]:
    """List the keys of figures about one of ``NAMES``."""
    return [key for key in figures if key.endswith(f"_{name}_ms")]


def _line(what: str, value: float | None) -> str:
    shown = "none" if value is None else f"{value:.2f}" if isinstance(value, float) else f"{value}"
    return f"{what + ':':<40} {shown}"


def _spread(name: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, Any]:
    """Describe seconds in milliseconds; None of no values."""
    functions: dict[str, Callable[[Sequence[float]], Any]]
    functions = {"mean": np.mean, "median": np.median, "std": np.std}
    described = {
        f"{key}_{name}_ms": 1000 * float(function(values)) if values else None
        for key, function in functions.items()
    }
    for p in percentiles:
        value = 1000 * float(np.percentile(values, p)) if values else None
        described[f"p{p:g}_{name}_ms"] = value
    return described


def _by_reason(answers: Sequence[Answer]) -> dict[str, Any]:
    """Count what has no whole answer, and average after which time it may come again."""
    told: dict[str, list[Answer]] = {}
    for one in answers:
        if one.error:
            told.setdefault(one.error, []).append(one)
    return {
        reason: {"count": len(those), "retry_after_s": _mean([t.retry_after_s for t in those])}
        for reason, those in sorted(told.items())
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
