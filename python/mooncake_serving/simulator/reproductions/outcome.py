"""What a reproduction finds: our figures beside the published ones, curves, and remarks."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..traces import TraceRequest


@dataclass(frozen=True)
class Row:
    """One figure of ours beside the published one, if it is known."""

    what: str
    ours: float
    published: float | None = None
    unit: str = ""


@dataclass(frozen=True)
class Curve:
    """A line of the plot; with a ``y_label`` in a panel of those that have the same."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    y_label: str = ""


@dataclass(frozen=True)
class Panel:
    """One pair of axes of a plot; what is on it has one unit."""

    curves: Sequence[Curve]
    x_label: str
    y_label: str
    log_x: bool = False


@dataclass(frozen=True)
class Claim:
    """An order or sign that the paper reports, and whether it is found here too."""

    what: str
    holds: bool


@dataclass(frozen=True)
class Outcome:
    """The result of a reproduction.

    The curves are drawn, over ``x_label`` and ``y_label``; where there are none, the rows as bars.
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
        """The curves, those of one label of the ordinate together."""
        by_label: dict[str, list[Curve]] = {}
        for curve in self.curves:
            by_label.setdefault(curve.y_label or self.y_label, []).append(curve)
        return [
            Panel(curves, self.x_label, y_label, self.log_x) for y_label, curves in by_label.items()
        ]


@dataclass(frozen=True)
class Setup:
    """What a reproduction is given.

    Attributes:
        trace: requests to replay; made up where the user gave no file.
        trace_name: what they are, for the title.
        on_simulation: is called before each simulation with a text, the number of simulations in
            all, and how often ``on_progress`` will be called in this one; 0 is not known.
        on_progress: is called once a request that is done with, or another part of a simulation.
        seed: of whatever is random.
        released: of FAST'25's other workloads, by name, the files that the user has; the others are
            made up.
    """

    trace: Sequence[TraceRequest]
    trace_name: str
    on_simulation: Callable[[str, int, int], None] = lambda text, total, num_parts: None
    on_progress: Callable[[], None] = lambda: None
    seed: int = 0
    released: Mapping[str, Sequence[TraceRequest]] = field(default_factory=dict)

    def on_step(self, text: str, total: int, num_parts: int | None = None) -> None:
        """Tell that one simulation of so many begins; by default its parts are its requests."""
        self.on_simulation(text, total, len(self.trace) if num_parts is None else num_parts)


Reproduction = Callable[[Setup], Outcome]


def as_lines(name: str, outcome: Outcome) -> list[dict[str, Any]]:
    """The outcome as JSON objects, one a line, the title first; what is no number is null."""
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
