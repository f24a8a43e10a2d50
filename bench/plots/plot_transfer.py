"""Draw GB/s of bench_transfer.py by what a call moves: one SVG a transport.

Reads what bench_transfer.py --json wrote; the same file gives the same pictures.

    python bench/plots/plot_transfer.py bench/results/transfer.jsonl bench/results
"""

import argparse
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib

from lib.results import Row, read

NAMES = {
    "ours": "mooncake-kernels", "mooncake": "Mooncake", "nixl-tcp": "NIXL (UCX, tcp)",
    "nixl-cma": "NIXL (UCX, shm)", "stream": "one socket stream", "memcpy": "one memcpy",
    "memcpy-mapped": "one memcpy",
}  # fmt: skip
# Distinguished by marker and dash, not by colour: a printed page is grey.
STYLES = {
    "ours": {"color": "black", "marker": "o", "linestyle": "-"},
    "mooncake": {"color": "0.35", "marker": "s", "linestyle": "--"},
    "nixl-tcp": {"color": "0.35", "marker": "^", "linestyle": "-."},
    "nixl-cma": {"color": "0.35", "marker": "^", "linestyle": "-."},
    "stream": {"color": "0.7", "marker": "", "linestyle": "-", "linewidth": 4},
    "memcpy": {"color": "0.7", "marker": "", "linestyle": "-", "linewidth": 4},
    "memcpy-mapped": {"color": "0.7", "marker": "", "linestyle": "-", "linewidth": 4},
}
SETTINGS = {  # keep letters as text: half the file size
    "svg.hashsalt": "mooncake-kernels", "svg.fonttype": "none",
    "font.family": "DejaVu Sans", "font.size": 9,
}  # fmt: skip


def split(case: str) -> tuple[str, str, str]:
    """``tcp write, 128 x 4 KiB``: the transport, the verb, and what is moved."""
    head, _, moved = case.partition(", ")
    transport, _, verb = head.partition(" ")
    return transport, verb, moved


def label(moved: str) -> str:
    """``64 x 1024 KiB`` as 64 x 1 MiB."""
    count, _, size = moved.partition(" x ")
    if not size.endswith(" KiB"):
        return moved
    kib = int(size.removesuffix(" KiB"))
    return f"{count} x {kib >> 10} MiB" if kib >= 1024 else moved


def draw(axes: Axes, rows: list[Row], verb: str) -> None:
    labels = [label(split(row["case"])[2]) for row in rows]
    sides = [
        "ours",
        *(key[len("x_") :] for key in rows[0] if key[:2] == "x_" and key[-9:] != "quartiles"),
    ]
    sides = [side for side in sides if side in STYLES]
    for side in sorted(sides, key=list(STYLES).index, reverse=True):
        column = "gb_per_s" if side == "ours" else f"gb_per_s_{side}"
        axes.plot(labels, [row[column] for row in rows], label=NAMES[side], markersize=4.5,
                  **{"linewidth": 1.2, **STYLES[side]})  # fmt: skip
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.minorticks_off()
    axes.tick_params("x", rotation=60)
    axes.set_ylabel("GB/s, moved")
    axes.set_title(verb, loc="left", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9", linewidth=0.6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, help="of bench_transfer.py")
    parser.add_argument("folder", type=Path, help="of the pictures")
    options = parser.parse_args()
    results = read(options.results)
    head, rows = results.head, results.rows
    with mpl.rc_context(SETTINGS):
        for transport in dict.fromkeys(split(row["case"])[0] for row in rows):
            mine = [row for row in rows if split(row["case"])[0] == transport]
            verbs = list(dict.fromkeys(split(row["case"])[1] for row in mine))
            figure, panels = plt.subplots(
                1, len(verbs), figsize=(4.5 * len(verbs), 4), layout="constrained",
                sharey=True, squeeze=False,
            )  # fmt: skip
            for axes, verb in zip(panels[0], verbs, strict=True):
                draw(axes, [row for row in mine if split(row["case"])[1] == verb], verb)
            panels[0][0].legend(frameon=False, fontsize=7)
            machine = f"{head['device']}, {head['cores']} cores, commit {head['commit']}"
            figure.supxlabel(f"{transport}, blocks at random places of 256 MiB. {machine}.",
                             x=0.01, ha="left", fontsize=7)  # fmt: skip
            path = options.folder / f"transfer_{transport.replace('-', '_')}.svg"
            figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
