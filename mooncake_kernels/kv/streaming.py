"""Measure the size from which the CPU should store past its cache on this machine."""

import statistics
import time

import torch

from .. import _library
from .measured_copy import Copy

RUN_BYTES = 4 << 10
SHIFTS = {True: range(18, 25), False: range(18, 28)}  # exponents of 2, in bytes: quick, and not


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
        for shift in SHIFTS[quick]:
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
    copy = Copy("h2h", RUN_BYTES, num_bytes // RUN_BYTES)
    words = copy.dst[: num_bytes // RUN_BYTES].view(torch.int64)
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
