"""The result of a reproduction: our figures next to the published ones, curves, and remarks."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..traces import TraceProfile, TraceRequest


@dataclass(frozen=True)
class Row:
    """One figure of ours next to the published one, if it is known."""

    what: str
    ours: float
    published: float | None = None
    unit: str = ""


@dataclass(frozen=True)
class Curve:
    """A line of the plot; lines with the same ``y_label`` share a panel."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    y_label: str = ""


@dataclass(frozen=True)
class Panel:
    """One pair of axes of a plot; everything on it has one unit."""

    curves: Sequence[Curve]
    x_label: str
    y_label: str
    log_x: bool = False


@dataclass(frozen=True)
class Claim:
    """An order or sign that the paper reports, and whether we find it too."""

    what: str
    holds: bool


@dataclass(frozen=True)
class Outcome:
    """The result of a reproduction.

    The curves are plotted over ``x_label`` and ``y_label``; without curves, the rows as bars.
    """

    title: str
    rows: Sequence[Row]
    claims: Sequence[Claim] = ()
    curves: Sequence[Curve] = ()
    x_label: str = ""
    y_label: str = ""
    log_x: bool = False
    remarks: Sequence[str] = field(default_factory=tuple)

    @property
    def panels(self) -> list[Panel]:
        """The curves, grouped by their y label."""
        by_label: dict[str, list[Curve]] = {}
        for curve in self.curves:
            by_label.setdefault(curve.y_label or self.y_label, []).append(curve)
        return [
            Panel(curves, self.x_label, y_label, self.log_x) for y_label, curves in by_label.items()
        ]


@dataclass(frozen=True)
class Setup:
    """Input of a reproduction.

    Attributes:
        trace: requests to replay; synthetic if the user gave no file.
        trace_name: for the title.
        on_simulation: called before each simulation with a text, the total number of simulations,
            and how often ``on_progress`` will be called in this one; 0 if unknown.
        on_progress: called once for each request that is over, or another part of a simulation.
        seed: of everything random.
        released: the user's files of FAST'25's other workloads, by name; the others are made up.
        synthetic_profile: by which the synthetic one is made up.
    """

    trace: Sequence[TraceRequest]
    trace_name: str
    on_simulation: Callable[[str, int, int], None] = lambda text, total, num_parts: None
    on_progress: Callable[[], None] = lambda: None
    seed: int = 0
    released: Mapping[str, Sequence[TraceRequest]] = field(default_factory=dict)
    synthetic_profile: TraceProfile | None = None

    def on_step(self, text: str, total: int, num_parts: int | None = None) -> None:
        """Report the start of one of ``total`` simulations; by default its parts are requests."""
        self.on_simulation(text, total, len(self.trace) if num_parts is None else num_parts)


Reproduction = Callable[[Setup], Outcome]


def as_lines(name: str, outcome: Outcome) -> list[dict[str, Any]]:
    """The outcome as JSON objects, one per line, the title first; non-numbers are null."""
    lines: list[dict[str, Any]] = [{"reproduction": name, "title": outcome.title}]
    lines += [
        {
            "reproduction": name,
            "what": row.what,
            "ours": row.ours if math.isfinite(row.ours) else None,
            "published": row.published,
            "unit": row.unit,
        }
        for row in outcome.rows
    ]
    lines += [{"reproduction": name, "claim": c.what, "holds": c.holds} for c in outcome.claims]
    lines += [{"reproduction": name, "remark": remark} for remark in outcome.remarks]
    return lines
