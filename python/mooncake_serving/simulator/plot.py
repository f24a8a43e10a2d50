"""Plots of reproductions."""

from pathlib import Path

from .reproductions import Outcome


def save_plot(outcome: Outcome, path: Path) -> None:
    """Draw an outcome's curves, or its rows as bars beside the published figures, into a file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    if outcome.curves:
        for curve in outcome.curves:
            axes.plot(curve.x, curve.y, label=curve.label, marker="." if len(curve.x) < 40 else "")
        axes.set_xlabel(outcome.x_label)
        axes.set_ylabel(outcome.y_label)
        if outcome.log_x:
            axes.set_xscale("log")
        axes.legend()
        axes.grid(alpha=0.3)
    else:
        rows = [row for row in outcome.rows if row.published is not None]
        places = range(len(rows))
        axes.barh([i - 0.2 for i in places], [row.ours for row in rows], 0.4, label="ours")
        axes.barh(
            [i + 0.2 for i in places], [row.published or 0 for row in rows], 0.4, label="published"
        )
        axes.set_yticks(list(places), [f"{row.what} [{row.unit}]" for row in rows], fontsize=7)
        axes.invert_yaxis()
        axes.legend()
    axes.set_title(outcome.title, fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)
