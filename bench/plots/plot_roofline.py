"""Draw GB/s against the length of a run, under its roof: one PNG and one SVG a direction.

Reads what bench_kv_shapes.py --json wrote. The roof is the ceiling measured in that run; the slope
is the speed of a loop that takes run after run, each at the cost of one with hardly any bytes.
Of each shape it takes the job with the most runs. The same file gives the same pictures.

    python bench/plots/plot_roofline.py bench/results/kv_shapes.jsonl bench/results
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib

from lib.results import Row, read

TITLES = {
    "H2H": "within host memory, CPU", "D2D": "within GPU memory", "H2D": "host to GPU",
    "D2H": "GPU to host", "both": "host to GPU and back at once",
}  # fmt: skip
LOOPS = {"H2H": "waiting for memory"}  # else: the driver's copy, a run at a time
BASELINES = {"torch": "torch, random", "memcpy_loop": "a memcpy a run, random"}
# Distinguished by marker and dash, not by colour: a printed page is grey.
STYLES = [
    {"color": "black", "marker": "o", "linestyle": "-"},
    {"color": "black", "marker": "o", "linestyle": "--", "markerfacecolor": "white"},
    {"color": "0.35", "marker": "s", "linestyle": "-"},
    {"color": "0.35", "marker": "s", "linestyle": "--", "markerfacecolor": "white"},
    {"color": "0.35", "marker": "^", "linestyle": "-"},
    {"color": "0.35", "marker": "D", "linestyle": "-."},
    {"color": "0.55", "marker": "v", "linestyle": "-"},
    {"color": "0.55", "marker": "P", "linestyle": "--"},
]
SETTINGS = {  # keep letters as text: half the file size
    "svg.hashsalt": "mooncake-kernels", "svg.fonttype": "none",
    "font.family": "DejaVu Sans", "font.size": 9,
}  # fmt: skip


def most_runs(rows: list[Row]) -> list[Row]:
    """Return for each shape the row with the most bytes, by the length of its runs."""
    largest: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: row["runs"]):
        largest[row["shape"]] = row
    return sorted(largest.values(), key=lambda row: (row["run_bytes"], row["shape"]))


def lines(rows: list[Row]) -> dict[str, list[tuple[int, float]]]:
    """Return what is drawn: by name, points of (bytes of a run, GB/s)."""
    groups: dict[tuple[str, str, int | None], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["engine"], row["ids"], row["max_sms"]), []).append(row)
    found = {}
    for (engine, ids, max_sms), group in groups.items():
        name = f"CopyPlan{'' if engine == 'auto' else ' ' + engine}, {ids}"
        name += f", {max_sms} SMs" if max_sms is not None else ""
        found[name] = [(row["run_bytes"], row["gb_per_s"]) for row in most_runs(group)]
    first = next(iter(groups.values()))
    for baseline, name in BASELINES.items():
        points = [
            (row["run_bytes"], row["gb_per_s"] * row["us"] / row[f"us_{baseline}"])
            for row in most_runs([row for row in first if f"us_{baseline}" in row])
        ]
        if points:
            found[name] = points
    return found


def bytes_label(size: float, _: int = 0) -> str:
    if size < 1024:
        return f"{size:.0f} B"
    return f"{size / 1024:.0f} KiB" if size < 1 << 20 else f"{size / (1 << 20):.0f} MiB"


def draw(axes: Axes, direction: str, rows: list[Row]) -> None:
    """Draw one direction."""
    sizes = sorted({row["run_bytes"] for row in rows})
    low, high = sizes[0] / 1.5, sizes[-1] * 1.5
    roof = statistics.median(row["ceiling_gb_per_s"] for row in rows)
    lone = rows[0]["us_lone_run"]
    ways = 2 if direction == "both" else 1
    knee = min(max(roof * lone * 1e3 / 2 / ways, low), high)
    slope: Callable[[float], float] = lambda size: min(2 * ways * size / lone / 1e3, roof)  # noqa: E731
    axes.plot([low, knee, high], [slope(low), slope(knee), slope(high)], color="0.75",
              linewidth=5, solid_joinstyle="miter", zorder=1)  # fmt: skip
    for style, (name, points) in zip(STYLES * 3, lines(rows).items(), strict=False):
        axes.plot(*zip(*points, strict=True), label=name, linewidth=1.2, markersize=4.5, **style)
    shapes = {row["run_bytes"]: row["shape"] for row in rows}
    for size, name in shapes.items():
        axes.text(size, 1.01, name, rotation=90, ha="center", va="bottom", fontsize=6.5,
                  transform=axes.get_xaxis_transform())  # fmt: skip
    axes.annotate(f"one large copy: {roof:.1f} GB/s", (high, roof), (0, 6), ha="right",
                  textcoords="offset points", color="0.35")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlim(low, high)
    axes.set_ylim(top=1.5 * axes.get_ylim()[1])  # room for the roof's name
    axes.xaxis.set_major_locator(FixedLocator([2**power for power in range(9, 21)]))
    axes.xaxis.set_major_formatter(FuncFormatter(bytes_label))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("length of a run")
    axes.set_ylabel("GB/s, read + written")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    axes.legend(frameon=False, loc="lower right")
    axes.set_title(f"{direction}: {TITLES[direction]}", loc="left", pad=62, fontweight="bold")


def caption(head: Row, direction: str, rows: list[Row]) -> str:
    machine = f"{head['device']}, {head['threads']} thread"
    machine += "s" if head["threads"] > 1 else ""
    loop = LOOPS.get(direction, "one cuMemcpyAsync")
    return (
        f"{machine}, torch {head['torch']}, commit {head['commit']}. Each shape's job with "
        f"the most runs.\nGrey: one large copy, and runs one by one, {loop} for each: "
        f"{rows[0]['us_lone_run'] * 1e3:,.0f} ns."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, help="of bench_kv_shapes.py")
    parser.add_argument("folder", type=Path, help="of the pictures")
    options = parser.parse_args()
    results = read(options.results)
    with mpl.rc_context(SETTINGS):
        for direction in dict.fromkeys(row["direction"] for row in results.rows):
            rows = [row for row in results.rows if row["direction"] == direction]
            figure, axes = plt.subplots(figsize=(7, 4.6), layout="constrained")
            draw(axes, direction, rows)
            figure.supxlabel(caption(results.head, direction, rows), x=0.01, ha="left", fontsize=7)
            path = options.folder / f"roofline_{direction.lower()}"
            figure.savefig(f"{path}.svg", metadata={"Date": None})
            figure.savefig(f"{path}.png", metadata={"Software": None}, dpi=150)
            plt.close(figure)


if __name__ == "__main__":
    main()
