"""A run as a picture, and as a page that needs no other file."""

import html
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mooncake_kernels.extras import needed_from

from .figures import NAMES, series_of, spread_keys
from .request import Answer

with needed_from("simulator", __name__):
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 }
td, th { padding: .2rem .8rem; text-align: left }
td + td, th + th { text-align: right } tr { border-bottom: 1px solid #ddd }
svg { max-width: 100%; height: auto }
"""
TITLES = {
    "request_throughput": "requests/s",
    "output_throughput": "generated tokens/s",
    "total_token_throughput": "tokens/s",
    "request_goodput": "goodput, requests/s",
    "completed": "answered",
    "refused": "refused",
    "wasted_prefills": "refused after the prefill",
}


def draw(runs: Mapping[str, Sequence[Answer]], goodput_ms: Mapping[str, float]) -> Figure:
    """Draw the distributions of the times, and the first tokens over time.

    Args:
        runs: answers, by what they are: ``measured``, and perhaps ``simulated``.
        goodput_ms: objectives, which are drawn, too.
    """
    figure = Figure(figsize=(10, 7), layout="constrained")
    axes = figure.subplots(2, 2).ravel()
    for axis, name in zip(axes, ("ttft", "tpot", "e2el"), strict=False):
        for label, answers in runs.items():
            _share(axis, series_of(one for one in answers if not one.error)[name], label)
        if name in goodput_ms:
            axis.axvline(goodput_ms[name], color="grey", linestyle=":", label="objective")
        axis.set(xlabel=f"{NAMES[name]}, ms", ylabel="share of the answered", ylim=(0, 1.02))
    over_time = axes[3]
    for label, answers in runs.items():
        done = [one for one in answers if not one.error]
        times, ttft_ms = [one.started_s for one in done], [1000 * one.ttft_s for one in done]
        [dots] = over_time.plot(times, ttft_ms, ".", markersize=4, label=label)
        wrong = [one.started_s for one in answers if one.error]
        if wrong:
            over_time.plot(
                wrong, [0] * len(wrong), "|", color=dots.get_color(),
                label=f"{label}: not answered",
            )  # fmt: skip
    over_time.set(xlabel="sent, s after the beginning", ylabel=f"{NAMES['ttft']}, ms")
    for axis in axes:
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    return figure


def save_png(figure: Figure, path: str) -> None:
    """Write a picture.

    Raises:
        OSError: it cannot be written.
    """
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=120, format="png")


def page_of(figure: Figure, title: str, runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a page with the picture, and tables of the figures.

    Args:
        figure: the picture.
        title: of the page.
        runs: figures, by what they are.
    """
    picture = io.StringIO()
    figure.savefig(picture, format="svg")
    svg = picture.getvalue()
    measured = next(iter(runs.values()))
    rows = [(label, [run.get(name) for run in runs.values()]) for name, label in TITLES.items()]
    for name in NAMES:
        rows += [
            (f"{key.split('_')[0]} {name.upper()}, ms", [run.get(key) for run in runs.values()])
            for key in spread_keys(measured, name)
        ]
    reasons = [
        f"<tr><td>{html.escape(reason)}</td><td>{html.escape(label)}</td><td>{one['count']}</td>"
        f"<td>{_cell(one['retry_after_s'])}</td></tr>"
        for label, run in runs.items()
        for reason, one in run["not_answered"].items()
    ]
    return "\n".join(
        [
            f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
            f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>",
            f"<h1>{html.escape(title)}</h1>",
            svg[svg.index("<svg") :],
            f"<table><tr><th></th>{''.join(f'<th>{label}</th>' for label in runs)}</tr>",
            *(_row(label, values) for label, values in rows),
            "</table>",
            *(_REASONS_HEAD if reasons else ()),
            *reasons,
            *(("</table>",) if reasons else ()),
            "</body></html>\n",
        ]
    )


_REASONS_HEAD = (
    "<h2>Not answered</h2>",
    "<table><tr><th>why</th><th></th><th>requests</th><th>again after, s</th></tr>",
)


def _share(axis: Axes, seconds: Sequence[float], label: str) -> None:
    """Draw which share of values is below each."""
    if seconds:
        values = 1000 * np.sort(seconds)
        axis.step(values, np.arange(1, len(values) + 1) / len(values), where="post", label=label)


def _row(label: str, values: Sequence[float | None]) -> str:
    return f"<tr><td>{label}</td>{''.join(f'<td>{_cell(value)}</td>' for value in values)}</tr>"


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else f"{value}"
