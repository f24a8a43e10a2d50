"""Measure the calibration table: every available engine, by direction, size and number of runs."""

import contextlib
import datetime
import os
import secrets
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

import torch

from .. import _library
from ..errors import InvalidArgument, Unavailable
from .calibration import FORMAT, cpu_name
from .copy_plan import CopyPlan
from .execute import Engine
from .view import KVView


class Copy:
    """Runs of one size, read from random places of src and written in order to dst.

    Args:
        direction: "h2d" and so on.
        run_bytes: size of a run.
        num_runs: runs per copy.
    """

    def __init__(self, direction: str, run_bytes: int, num_runs: int):
        self.num_bytes = run_bytes * num_runs
        src, dst = (self._cache(place, run_bytes, num_runs, direction) for place in direction[::2])
        self.plan = CopyPlan(src, dst)
        self.dst = dst.tensors[0]
        self._scattered = torch.randperm(2 * num_runs)[:num_runs]
        self._in_order = torch.arange(num_runs, device="cpu")
        self._from_host = direction == "h2d"

    def run(self, engine: Engine) -> None:
        """Copy; on a GPU the copy is queued."""
        ids = (self._scattered, self._in_order)
        self.plan.run(*(ids[::-1] if self._from_host else ids), engine=engine)

    @staticmethod
    def _cache(place: str, run_bytes: int, num_runs: int, direction: str) -> KVView:
        shape, pinned = (2 * num_runs, 1, run_bytes), place == "h" and "d" in direction
        device = "cuda" if place == "d" else "cpu"
        memory = torch.empty(shape, dtype=torch.uint8, device=device, pin_memory=pinned)
        return KVView(memory.fill_(1), "block token dim")


def seconds(copy: Copy, engine: Engine, direction: str) -> float:
    """Time one copy with all that the caller waits for: its submission and its completion."""
    on_gpu = "d" in direction
    if on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    copy.run(engine)
    if on_gpu:
        torch.cuda.current_stream().synchronize()
    return time.perf_counter() - start


STREAMED_RUN_BYTES = 4 << 10
# Exponents of the sizes in bytes between which to look: quick, and not.
STREAMED_SHIFTS = {True: range(18, 25), False: range(18, 28)}


def measure_streaming(*, quick: bool = False) -> tuple[int | None, list[dict[str, float]]]:
    """Find the size in bytes from which the CPU should store past its cache.

    The timing includes one read of what was stored, because what bypassed the cache is further
    away. One thread only: how threads contend is a separate question. Returns None if it does not
    pay up to the largest size, and one row per size: GB/s, and the speedup.
    """
    rows: list[dict[str, float]] = []
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for shift in STREAMED_SHIFTS[quick]:
            rows.append(_cached_and_streamed(1 << shift, 3 if quick else 15))
    finally:
        torch.set_num_threads(num_threads)
        _library.set_stream_from_bytes(0)
    return smallest_that_pays(rows), rows


def smallest_that_pays(rows: list[dict[str, float]]) -> int | None:
    """Return the first size from which on no size is slower past the cache."""
    found = None
    for row in reversed(rows):
        if row["ratio"] < 1:
            break
        found = int(row["num_bytes"])
    return found


def _cached_and_streamed(num_bytes: int, repeat: int) -> dict[str, float]:
    copy = Copy("h2h", STREAMED_RUN_BYTES, num_bytes // STREAMED_RUN_BYTES)
    words = copy.dst[: num_bytes // STREAMED_RUN_BYTES].view(torch.int64)
    seconds: dict[str, list[float]] = {"cached": [], "streamed": []}
    for _ in range(repeat):
        for name, threshold in (("cached", 1 << 62), ("streamed", 1)):
            _library.set_stream_from_bytes(threshold)
            start = time.perf_counter()
            copy.run("host")
            words.sum()
            seconds[name].append(time.perf_counter() - start)
    speeds = {name: num_bytes / statistics.median(taken) / 1e9 for name, taken in seconds.items()}
    pairs = zip(seconds["cached"], seconds["streamed"], strict=True)
    ratio = statistics.median(cached / streamed for cached, streamed in pairs)
    return {"num_bytes": num_bytes, **speeds, "ratio": ratio}


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
