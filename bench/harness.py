"""One timer and one table for every bench: what was measured, where, and against what.

A case is checked for equality before it is timed. Ours and every baseline are then called in turn,
so that all meet the same noise, and what is reported is the median of the ratios of calls that
stood beside each other, with their quartiles: on a busy machine a ratio of two medians, measured
one after the other, can be far off.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

WARM_UP = 3


@dataclass
class Case:
    """One row: `ours` beside `baselines`, each doing the same job.

    Attributes:
        name: of the row.
        ours: what is measured.
        baselines: what it is compared with, by name.
        check: raises if ours and the baselines do not have the same result; called before timing.
        num_bytes: read plus written by one call, for GB/s; None where bytes mean nothing.
        on_host: on CUDA, time what the caller spends and not what the GPU does.
    """

    name: str
    ours: Callable[[], Any]
    baselines: dict[str, Callable[[], Any]]
    check: Callable[[], None]
    num_bytes: int | None = None
    on_host: bool = False


def arguments(doc: str | None) -> argparse.Namespace:
    """Parse the options that every bench has."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1, help="for ours and for the baselines")
    parser.add_argument("--repeat", type=int, default=21, help="timed rounds a case")
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds, for CI")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    if options.quick:
        options.repeat = min(options.repeat, 5)
    torch.set_num_threads(options.threads)
    return options


def seconds(call: Callable[[], Any], device: str) -> float:
    """Time one call; on CUDA by the GPU's own clock, with a cold L2."""
    if device == "cpu":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    torch.empty(256 << 20, dtype=torch.uint8, device=device).zero_()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def measure(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Check a case, time it, and return its row."""
    case.check()
    calls = {"ours": case.ours, **case.baselines}
    rounds = []
    for i in range(WARM_UP + options.repeat):
        # They take turns in going first, so that none always has the same neighbour, nor itself.
        first = i % len(calls)
        names = [*list(calls)[first:], *list(calls)[:first]]
        clock = "cpu" if case.on_host else options.device
        taken = {name: seconds(calls[name], clock) for name in names}
        rounds.append(taken)
    rounds = rounds[WARM_UP:]
    ours = [taken["ours"] for taken in rounds]
    row: dict[str, Any] = {"case": case.name, "us": statistics.median(ours) * 1e6}
    row["us_p95"] = sorted(ours)[int(0.95 * (len(ours) - 1))] * 1e6
    if case.num_bytes is not None:
        row["gb_per_s"] = case.num_bytes / statistics.median(ours) / 1e9
    for name in case.baselines:
        ratios = sorted(taken[name] / taken["ours"] for taken in rounds)
        row[f"x_{name}"] = statistics.median(ratios)
        row[f"x_{name}_quartiles"] = [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]]
        row[f"us_{name}"] = statistics.median(taken[name] for taken in rounds) * 1e6
    return row


def machine(options: argparse.Namespace) -> dict[str, Any]:
    """Describe where the numbers come from."""
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True, text=True, cwd=Path(__file__).parent,
    )  # fmt: skip
    on_gpu = options.device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if on_gpu else cpu_name(),
        "cores": os.cpu_count(),
        "threads": options.threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": git.stdout.strip() or "none",
    }


def cpu_name() -> str:
    """Return the processor's name, as Linux tells it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def report(title: str, cases: list[Case], options: argparse.Namespace) -> None:
    """Measure the cases, print a table, and write the JSON if it was asked for."""
    head = {"bench": title, **machine(options)}
    write = sys.stdout.write
    write("  ".join(f"{key}={value}" for key, value in head.items()) + "\n")
    rows = []
    for case in cases:
        row = measure(case, options)
        rows.append(row)
        speed = f"{row['gb_per_s']:8.2f} GB/s" if "gb_per_s" in row else ""
        write(f"{row['case']:44} {row['us']:10.1f} us {speed}")
        for name in case.baselines:
            low, high = row[f"x_{name}_quartiles"]
            write(f"   {row[f'x_{name}']:.2f}x {name} [{low:.2f}, {high:.2f}]")
        write("\n")
        sys.stdout.flush()
    if options.json:
        options.json.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
