"""What a reproduction finds: our figures beside the published ones, curves, and remarks."""

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
    """A line of the plot."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class Claim:
    """An order or sign that the paper reports, and whether it is found here too."""

    what: str
    holds: bool


@dataclass(frozen=True)
class Outcome:
    """The result of a reproduction.

    ``bars`` draws the rows as bars; else the curves are drawn, over ``x_label`` and ``y_label``.
    """

    title: str
    rows: Sequence[Row]
    claims: Sequence[Claim] = ()
    curves: Sequence[Curve] = ()
    x_label: str = ""
    y_label: str = ""
    log_x: bool = False
    remarks: Sequence[str] = field(default_factory=tuple)


@dataclass(frozen=True)
class Setup:
    """What a reproduction is given.

    Attributes:
        trace: requests to replay; made up where the user gave no file.
        trace_name: what they are, for the title.
        on_step: is called with a text before each simulation, and the number of them in all.
        on_progress: is called once a request that is done with.
        seed: of whatever is random.
        released: of FAST'25's other workloads, by name, the files that the user has; the others are
            made up.
    """

    trace: Sequence[TraceRequest]
    trace_name: str
    on_step: Callable[[str, int], None] = lambda text, total: None
    on_progress: Callable[[], None] = lambda: None
    seed: int = 0
    released: Mapping[str, Sequence[TraceRequest]] = field(default_factory=dict)


Reproduction = Callable[[Setup], Outcome]


def as_lines(name: str, outcome: Outcome) -> list[dict[str, Any]]:
    """The outcome as JSON objects, one a line."""
    lines: list[dict[str, Any]] = [
        {
            "reproduction": name,
            "what": row.what,
            "ours": row.ours,
            "published": row.published,
            "unit": row.unit,
        }
        for row in outcome.rows
    ]
    lines += [{"reproduction": name, "claim": c.what, "holds": c.holds} for c in outcome.claims]
    return lines
