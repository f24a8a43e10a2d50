"""Plots of reproductions and of runs."""

from collections.abc import Sequence
from pathlib import Path

try:
    import matplotlib
    from matplotlib import pyplot as plt
    from matplotlib.figure import Figure
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"{__name__}: {missing.name} is not installed: pip install 'mooncake-kernels[simulator]'",
        name=missing.name,
    ) from None

from .reproductions import Outcome, Panel, Row

matplotlib.use("Agg")
PANEL_INCHES, ROW_INCHES = 3.6, 0.32


def save_plot(outcome: Outcome, path: Path) -> None:
    """Plot an outcome's curves, or its rows as bars next to the published figures, into a file."""
    if outcome.curves:
        save_panels(outcome.title, outcome.panels, path)
    else:
        _save(
            _bars([row for row in outcome.rows if row.published is not None]), outcome.title, path
        )


def save_panels(title: str, panels: Sequence[Panel], path: Path) -> None:
    """Draw curves into a file, one panel below the other."""
    figure, axes = plt.subplots(
        len(panels), squeeze=False, figsize=(7, 0.6 + PANEL_INCHES * len(panels)),
        layout="constrained",
    )  # fmt: skip
    for axis, panel in zip(axes[:, 0], panels, strict=True):
        for curve in panel.curves:
            axis.plot(curve.x, curve.y, label=curve.label, marker="." if len(curve.x) < 40 else "")
        axis.set(xlabel=panel.x_label, ylabel=panel.y_label)
        if panel.log_x:
            axis.set_xscale("log")
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    _save(figure, title, path)


def _bars(rows: Sequence[Row]) -> Figure:
    """Draw the figures of each unit on separate axes."""
    by_unit: dict[str, list[Row]] = {}
    for row in rows:
        by_unit.setdefault(row.unit, []).append(row)
    heights = [1.0 + ROW_INCHES * len(group) for group in by_unit.values()]
    figure, axes = plt.subplots(
        len(by_unit), squeeze=False, figsize=(7, 0.6 + sum(heights)), height_ratios=heights,
        layout="constrained",
    )  # fmt: skip
    for axis, (unit, group) in zip(axes[:, 0], by_unit.items(), strict=True):
        places = range(len(group))
        axis.barh([i - 0.2 for i in places], [row.ours for row in group], 0.4, label="ours")
        axis.barh(
            [i + 0.2 for i in places], [row.published or 0 for row in group], 0.4, label="published"
        )
        axis.set_yticks(list(places), [row.what for row in group], fontsize=7)
        axis.set_xlabel(unit)
        axis.invert_yaxis()
        axis.legend(fontsize=8)
    return figure


def _save(figure: Figure, title: str, path: Path) -> None:
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)
