"""One timer and one table for every bench: what was measured, where, and against what.

A case is checked for equality before it is timed. Ours and every baseline are then called in turn,
so that all meet the same noise. The reported figure is the median of the ratios of adjacent calls,
with its quartiles: on a busy machine a ratio of two medians, measured one after the other, can be
far off.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lib import machine

WARM_UP = 3
MIN_ROUNDS = 5  # timed, however long they take


@dataclass
class Case:
    """One row: `ours` and the `baselines` that do the same job.

    Attributes:
        name: of the row.
        ours: what is measured.
        baselines: what it is compared with, by name.
        check: raises if ours and the baselines do not have the same result; called before timing.
        num_bytes: read plus written by one call, for GB/s; None where bytes mean nothing.
        on_host: on CUDA, time what the caller spends and not what the GPU does.
        ceiling: GB/s, measured in this run; GB/s is also given as a percentage of it.
        num_flops: of one call, for GFLOP/s.
        peak: GFLOP/s, measured in this run; GFLOP/s is also given as a percentage of it.
        warm: call each once more before it is timed: the others have evicted most of what fits the
            cache.
        undo: by the name of a side ("ours" or a baseline's), what is called after each of its calls
            and not timed, to restore what the call has changed.
        fields: additional fields of the row.
    """

    name: str
    ours: Callable[[], Any]
    baselines: dict[str, Callable[[], Any]]
    check: Callable[[], None]
    num_bytes: int | None = None
    on_host: bool = False
    ceiling: float | None = None
    warm: bool = False
    num_flops: float | None = None
    peak: float | None = None
    undo: dict[str, Callable[[], Any]] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass
class LeftOut:
    """A row that is not measured here, and why."""

    name: str
    why: str


def at_least(least: float, kind: type = int, most: float = math.inf) -> Callable[[str], Any]:
    """Return a type for an option: a number of a kind, within bounds."""

    def number(text: str) -> Any:
        value = kind(text)
        if not least <= value <= most:
            bounds = f"at least {least}" if most == math.inf else f"{least} to {most}"
            raise argparse.ArgumentTypeError(f"must be {bounds}, got {text}")
        return value

    number.__name__ = kind.__name__  # argparse says "invalid int value"
    return number


def folder(text: str) -> Path:
    """Return a folder that exists: a type for an option."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"must be a folder that exists, got {text}")
    return Path(text)


def arguments(
    doc: str | None,
    add: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
    without: tuple[str, ...] = (),
) -> argparse.Namespace:
    """Parse the options that benches have, and those that ``add`` adds.

    Args:
        doc: of the bench.
        add: adds options, or other defaults.
        without: those that this bench does not have: "device" if it runs on the CPU even if there
            is a GPU, "seconds" if it does not call `measure`, which stops when they have passed.
    """
    parser = argparse.ArgumentParser(description=doc, allow_abbrev=False)
    if "device" in without:
        parser.set_defaults(device="cpu")
    else:
        default = "cuda" if torch.cuda.is_available() else "cpu"
        parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    if "seconds" not in without:
        few = "a case; then fewer rounds"
        parser.add_argument("--seconds", type=at_least(0, float), default=20, help=few)
    both = "for ours and for the baselines"
    parser.add_argument("--threads", type=at_least(1), default=1, help=both)
    parser.add_argument("--repeat", type=at_least(1), default=21, help="timed rounds a case")
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds, for CI")
    parser.add_argument(
        "--json", type=Path, help="also write the results to this file, as JSON lines"
    )
    add(parser)
    options = parser.parse_args()
    if options.json and (why := machine.why_not_kept(options.json)):
        parser.error(f"--json: {why}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: torch finds no GPU, got cuda")
    if options.quick:
        options.repeat = min(options.repeat, 3)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.device == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())  # engines do not copy in the default stream
    return options


def seconds(call: Callable[[], Any], device: str) -> tuple[float, float]:
    """Time one call, and what its caller spent: on CUDA by the GPU's own clock, with a cold L2."""
    if device == "cpu":
        start = time.perf_counter()
        call()
        taken = time.perf_counter() - start
        return taken, taken
    torch.empty(256 << 20, dtype=torch.uint8, device=device).zero_()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    start = time.perf_counter()
    call()
    on_host = time.perf_counter() - start
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3, on_host


def timed(case: Case, options: argparse.Namespace) -> list[dict[str, tuple[float, float]]]:
    """Call ours and the baselines in turn, and return what each took in each round."""
    calls = {"ours": case.ours, **case.baselines}
    rounds = []
    until = time.perf_counter() + options.seconds
    for i in range(WARM_UP + options.repeat):
        # They take turns in going first, so that none always has the same neighbour, or itself.
        first = i % len(calls)
        names = [*list(calls)[first:], *list(calls)[:first]]
        taken = {}
        for name in names:
            undo = case.undo.get(name, _nothing)
            if case.warm:
                calls[name]()
                undo()
            taken[name] = seconds(calls[name], options.device)
            undo()
        rounds.append(taken)
        if len(rounds) >= WARM_UP + MIN_ROUNDS and time.perf_counter() > until:
            break
    return rounds[WARM_UP:]


def _nothing() -> None:
    pass


def measure(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Check a case, time it, and return its row."""
    case.check()
    rounds = timed(case, options)
    clock = int(case.on_host)
    ours = [taken["ours"][clock] for taken in rounds]
    row: dict[str, Any] = {"case": case.name, **case.fields, "us": statistics.median(ours) * 1e6}
    row["us_p95"] = sorted(ours)[int(0.95 * (len(ours) - 1))] * 1e6
    row["us_host"] = statistics.median(taken["ours"][1] for taken in rounds) * 1e6
    row["rounds"] = len(rounds)
    if case.num_bytes is not None:
        row["gb_per_s"] = case.num_bytes / statistics.median(ours) / 1e9
    if case.ceiling is not None:
        row["ceiling_gb_per_s"] = case.ceiling
        row["percent_of_ceiling"] = 100 * row["gb_per_s"] / case.ceiling
    if case.num_flops is not None:
        row["gflop_per_s"] = case.num_flops / statistics.median(ours) / 1e9
    if case.num_flops is not None and case.peak is not None:
        row["peak_gflop_per_s"] = case.peak
        row["percent_of_peak"] = 100 * row["gflop_per_s"] / case.peak
    for name in case.baselines:
        ratios = [taken[name][clock] / taken["ours"][clock] for taken in rounds]
        row[f"x_{name}"], row[f"x_{name}_quartiles"] = spread(ratios)
        row[f"us_{name}"] = statistics.median(taken[name][clock] for taken in rounds) * 1e6
    return row


def spread(ratios: list[float]) -> tuple[float, list[float]]:
    """Return the median of paired ratios, and their quartiles."""
    ratios = sorted(ratios)
    quartiles = [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]]
    return statistics.median(ratios), quartiles
