"""Measure the calibration table: every available engine, by direction, size and number of runs."""

import contextlib
import datetime
import os
import secrets
import statistics
import subprocess
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

import torch

from .. import _library
from ..errors import InvalidArgument, Unavailable
from .calibration import FORMAT, cpu_name
from .execute import Engine
from .measured_copy import Copy, seconds
from .streaming import measure_streaming

RUN_BYTES = (512, 2 << 10, 8 << 10, 32 << 10, 128 << 10, 1 << 20)
NUM_RUNS = (16, 256, 4096)
QUICK_RUN_BYTES, QUICK_NUM_RUNS = (4 << 10, 64 << 10), (16, 256)
MAX_BYTES, QUICK_MAX_BYTES = 256 << 20, 16 << 20  # of one copy
ENGINES: dict[str, tuple[Engine, ...]] = {
    "h2h": ("host",),
    "d2d": ("cuda", "tma", "copy_engine"),
    "h2d": ("cuda", "tma", "copy_engine", "two_hop"),
    "d2h": ("cuda", "tma", "copy_engine", "two_hop"),
}
REPEAT, QUICK_REPEAT = 9, 3


def measure(*, quick: bool = False, report: Callable[[str], object] = lambda line: None) -> Any:
    """Measure, and return the table as JSON-serializable values.

    Args:
        quick: few sizes and few rounds.
        report: called with one line per cell.
    """
    cells = []
    for direction in directions():
        for run_bytes, num_runs in _sizes(quick):
            speeds = _speeds(direction, run_bytes, num_runs, quick)
            if not speeds:
                continue
            winner = max(speeds, key=speeds.__getitem__)
            cells.append(
                {"direction": direction, "run_bytes": run_bytes, "num_runs": num_runs,
                 "gb_per_s": speeds, "winner": winner}
            )  # fmt: skip
            listed = ", ".join(f"{name} {speed:.2f}" for name, speed in speeds.items())
            report(f"{direction}  {num_runs:5} runs of {run_bytes:8} bytes  {listed} GB/s")
    stream_from, rows = measure_streaming(quick=quick)
    for row in rows:
        speeds_of_row = f"{row['cached']:.2f}, past it {row['streamed']:.2f} GB/s"
        report(
            f"h2h  {row['num_bytes']:10} bytes, and read again: through the cache {speeds_of_row}, "
            f"{row['ratio']:.2f}x"
        )
    report(f"h2h  past the cache from {stream_from} bytes on")
    return {
        "format": FORMAT,
        "machine": machine(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "quick": quick,
        "cells": cells,
        "host": {"stream_from_bytes": stream_from, "rows": rows},
    }


def directions() -> list[str]:
    """Return the directions that this machine supports."""
    return list(ENGINES) if torch.cuda.is_available() and _library.has_cuda else ["h2h"]


def _sizes(quick: bool) -> Iterator[tuple[int, int]]:
    most = QUICK_MAX_BYTES if quick else MAX_BYTES
    for run_bytes in QUICK_RUN_BYTES if quick else RUN_BYTES:
        for num_runs in QUICK_NUM_RUNS if quick else NUM_RUNS:
            if run_bytes * num_runs <= most:
                yield run_bytes, num_runs


def _speeds(direction: str, run_bytes: int, num_runs: int, quick: bool) -> dict[str, float]:
    """Return the median GB/s of each engine that takes the copy; they take turns."""
    copy = Copy(direction, run_bytes, num_runs)
    rounds: dict[Engine, list[float]] = {}
    with _stream_of(direction):
        for engine in ENGINES[direction]:
            try:
                seconds(copy, engine, direction)
                rounds[engine] = []
            except (InvalidArgument, Unavailable):  # not supported, or not available
                continue
        for _ in range(QUICK_REPEAT if quick else REPEAT):
            for engine, taken in rounds.items():
                taken.append(seconds(copy, engine, direction))
    return {
        engine: copy.num_bytes / statistics.median(taken) / 1e9 for engine, taken in rounds.items()
    }


def _stream_of(direction: str) -> Any:
    """Return a context manager for a stream that every engine takes."""
    return torch.cuda.stream(torch.cuda.Stream() if "d" in direction else None)


def machine() -> dict[str, Any]:
    """Describe the machine a table is for."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    try:
        package = version("mooncake-kernels")
    except PackageNotFoundError:
        package = None
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "driver": _driver() if gpu else None,
        "torch": torch.__version__,
        "package": package,
    }


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[TextIO]:
    """Open the file that takes the place of a path in the end, unless something fails.

    It is opened before anything is measured, so that a wrong path costs no time.

    Raises:
        InvalidArgument: there is something else than a file.
        OSError: it cannot be written.
    """
    if path.exists() and not path.is_file():
        raise InvalidArgument(f"calibrate: the table must be written to a file, got {path}")
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = part.open("x")  # what others have put there is not written to
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        with file:
            yield file
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _driver() -> str | None:
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except OSError:
        return None


def _commit() -> str | None:
    """Return the commit of the source tree; None for an installed package."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
    except OSError:
        return None
