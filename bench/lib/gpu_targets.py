"""Report which targets of the copies on a GPU are met, from what `gpu.sh --targets` has measured.

A target is a share of another copy's speed in the same run, in the worst of its cases. Of a case
with several engines the best one counts, since "auto" chooses it by calibration. A target that was
not measured is reported and makes the exit status 1; a target that is not met does not.

    python bench/lib/gpu_targets.py results
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib

from lib.results import Row, read

MIN_RUN_BYTES, MAX_SMS = 4 << 10, 8
TRANSFORMS = ["bf16 to fp8", "fp8 to bf16", "RoPE", "checksum"]


def rows_of(folder: Path, name: str) -> list[Row]:
    """Return the rows of a bench, as far as it got; nothing if it did not run."""
    try:
        return read(folder / f"targets_{name}.jsonl").rows
    except (OSError, ValueError):
        return []


def best_of_each(rows: Iterable[Row], kind: Callable[[Row], str], value: str) -> dict[str, Row]:
    """Return the row with the highest value of each kind."""
    best: dict[str, Row] = {}
    for row in rows:
        if kind(row) not in best or row[value] > best[kind(row)][value]:
            best[kind(row)] = row
    return best


def of_the_ceiling(name: str, rows: list[Row], wanted: float) -> tuple[str, bool | None]:
    """Judge the worst shape, each at its largest copy, by the percentage of one large copy."""
    rows = [row for row in rows if row["run_bytes"] >= MIN_RUN_BYTES]
    largest = best_of_each(rows, lambda row: row["shape"], "runs")
    rows = [row for row in rows if row["runs"] == largest[row["shape"]]["runs"]]
    best = best_of_each(rows, lambda row: row["shape"], "percent_of_ceiling").values()
    if not best:
        return f"{name} >= {wanted:g} %", None
    worst = min(best, key=lambda row: row["percent_of_ceiling"])
    told = f"{worst['percent_of_ceiling']:.1f} % of {worst['ceiling_gb_per_s']:.1f} GB/s"
    told += f" ({worst['case']}; {len(best)} shapes)"
    return f"{name} >= {wanted:g} %: {told}", worst["percent_of_ceiling"] >= wanted


def judged(folder: Path) -> Iterable[tuple[str, bool | None]]:
    """Yield the text of each target, and whether it is met; None if it was not measured."""
    d2d = rows_of(folder, "d2d")
    yield of_the_ceiling("D2D, of a large device copy, runs of 4 KiB and more", d2d, 92)
    few_sms = [row for row in rows_of(folder, "pcie") if (row["max_sms"] or 1 << 30) <= MAX_SMS]
    for direction in ("H2D", "D2H"):
        rows = [row for row in few_sms if row["direction"] == direction]
        name = f"{direction}, of a large pinned copy, runs of 4 KiB and more, {MAX_SMS} SMs"
        smallest = min((row["run_bytes"] for row in rows), default=None)
        yield of_the_ceiling(name, rows if smallest == MIN_RUN_BYTES else [], 90)
    transforms = rows_of(folder, "transforms")
    for transform in TRANSFORMS:
        rows = [row for row in transforms if row["transform"] == transform]
        if len(rows) < 2:  # into two layouts
            yield f"{transform} costs <= 10 %", None
            continue
        worst = min(rows, key=lambda row: row["x_plain"])
        cost = 100 * (1 - worst["x_plain"])
        yield f"{transform} costs <= 10 %: {cost:.1f} % ({worst['case']})", cost <= 10
    calls = [row for row in rows_of(folder, "host") if row["case"].startswith("host time")]
    if not calls:
        yield "host time of a run of 1,024 blocks x 80 layers <= 10 us", None
    for row in calls:
        yield f"{row['case']} <= 10 us: {row['us']:.1f} us", row["us"] <= 10


def of_the_product(folder: Path) -> Iterable[str]:
    """Yield what a copy and a matrix product cost each other; there is no target for it."""
    for row in rows_of(folder, "mm"):
        slower = f"copy {row['copy_slowdown']:.2f}x, product {row['mm_slowdown']:.2f}x slower"
        yield f"with a matrix product: {row['case']}: {slower}"


def main(folder: Path) -> int:
    words = {True: "MET", False: "NOT MET", None: "NOT MEASURED"}
    results = list(judged(folder))
    for text, met in results:
        sys.stdout.write(f"{words[met]:13} {text}\n")
    slowdowns = list(of_the_product(folder))
    for text in slowdowns or ["with a matrix product"]:
        sys.stdout.write(f"{'REPORTED' if slowdowns else 'NOT MEASURED':13} {text}\n")
    return int(not slowdowns or any(met is None for _, met in results))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of the results")
    sys.exit(main(parser.parse_args().folder))
