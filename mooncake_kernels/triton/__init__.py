"""Triton kernels: for GPUs without nvcc's kernels, and for TRITON_INTERPRET=1 on the CPU."""

from collections.abc import Sequence

from ..errors import InvalidArgument
from ..extras import needed_from

with needed_from("gpu", __name__):
    import triton

INTERPRETED = triton.knobs.runtime.interpret  # triton.jit reads it once, in the modules here

MOST_PROGRAMS, MOST_BEYOND_X = (1 << 31) - 1, (1 << 16) - 1


def check_grid(argument: str, whose: str, grid: Sequence[int]) -> None:
    """Refuse a grid that CUDA has no room for; Triton launches nothing if its product wraps.

    Raises:
        InvalidArgument: naming the argument, and what of it the grid is made of.
    """
    num_programs = 1
    for size in grid:
        num_programs *= size
    if num_programs > MOST_PROGRAMS or max((0, *grid[1:])) > MOST_BEYOND_X:
        raise InvalidArgument(
            f"{argument} must have {whose} for at most {MOST_PROGRAMS} programs, and "
            f"{MOST_BEYOND_X} beyond the first axis, for engine triton, got a grid of {tuple(grid)}"
        )
