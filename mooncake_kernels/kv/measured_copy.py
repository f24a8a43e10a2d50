"""A copy to be measured, for the calibration."""

import time

import torch

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
