"""The output of a bench: a table on the screen, and the same rows in a file."""

import argparse
import sys
from collections.abc import Iterable
from typing import Any

from lib import machine, results
from lib.harness import Case, LeftOut, measure


def report(title: str, cases: Iterable[Case | LeftOut], options: argparse.Namespace) -> None:
    """Measure the cases one by one, print a table, and write the rows if a file was named.

    A case from a generator is freed before the next one is made: not all fit into memory at once.
    """
    head, rows, left_out = heading(title, options), [], []
    cases = iter(cases)
    while (case := next(cases, None)) is not None:
        if isinstance(case, LeftOut):
            left_out.append({"case": case.name, "left_out": case.why})
            sys.stdout.write(f"{case.name:44} left out: {case.why}\n")
        else:
            row = measure(case, options)
            rows.append(row)
            sys.stdout.write(line(row, list(case.baselines)))
        sys.stdout.flush()
        save(head, rows, options, left_out)  # each time, so that an interrupted run keeps its rows
        del case


def heading(title: str, options: argparse.Namespace) -> dict[str, Any]:
    """Print the origin of the numbers, and return it."""
    head = {"bench": title, **machine.describe(options.device, options.threads)}
    sys.stdout.write("  ".join(f"{key}={value}" for key, value in head.items()) + "\n")
    return head


def line(row: dict[str, Any], baselines: list[str]) -> str:
    """Return one row of the table."""
    text = f"{row['case']:44} {row['us']:10.1f} us"
    if "gb_per_s" in row:
        text += f" {row['gb_per_s']:8.2f} GB/s"
    if "percent_of_ceiling" in row:
        text += f" {row['percent_of_ceiling']:4.0f} % of {row['ceiling_gb_per_s']:.1f}"
    if "gflop_per_s" in row:
        text += f" {row['gflop_per_s']:8.1f} GFLOP/s"
    if "percent_of_peak" in row:
        text += f" {row['percent_of_peak']:4.0f} % of {row['peak_gflop_per_s']:.0f}"
    if row["us_host"] < 0.99 * row["us"]:  # else it is a CPU, or `us` is the host's time
        text += f"   {row['us_host']:.1f} us of the host"
    for name in baselines:
        low, high = row[f"x_{name}_quartiles"]
        text += f"   {row[f'x_{name}']:.2f}x {name} [{low:.2f}, {high:.2f}]"
    return text + "\n"


def save(
    head: dict[str, Any],
    rows: list[dict[str, Any]],
    options: argparse.Namespace,
    left_out: list[dict[str, str]] | None = None,
) -> None:
    """Write the rows if a file was named.

    A case that was not measured is in ``left_out``: its name as ``case``, the reason as
    ``left_out``.
    """
    if options.json:
        results.write(options.json, results.Results(head, rows, left_out or []))
