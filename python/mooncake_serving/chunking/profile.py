"""How long a step takes, by its tokens: measured once, and interpolated."""

import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mooncake_kernels import InvalidArgument

from .arguments import is_integer, is_number, shown


@dataclass(frozen=True)
class ChunkProfile:
    """Duration of a step, by its number of tokens.

    Attributes:
        sizes: tokens of the steps that were measured, ascending.
        seconds: of each.

    Raises:
        InvalidArgument: sizes do not ascend from 1, or there is not a positive, finite time for
            each.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        """Check the table."""
        sizes = self.sizes if isinstance(self.sizes, Sequence) else ()
        is_good = len(sizes) > 0 and all(is_integer(size, 1) for size in sizes)
        if not is_good or not all(before < after for before, after in pairwise(sizes)):
            raise InvalidArgument(
                f"ChunkProfile: sizes must ascend and be at least 1, got {shown(self.sizes)}"
            )
        seconds = self.seconds if isinstance(self.seconds, Sequence) else ()
        if len(seconds) != len(sizes) or not all(
            is_number(s) and 0 < s < float("inf") for s in seconds
        ):
            raise InvalidArgument(
                f"ChunkProfile: seconds must be positive, finite and one a size ({len(sizes)}), "
                f"got {shown(self.seconds)}"
            )

    def step_seconds(self, num_tokens: int) -> float:
        """Return the time of a step: interpolated linearly between its neighbours in the table.

        A step below the smallest size takes as long as that: it is bound by reading the weights.

        Raises:
            InvalidArgument: more tokens than the largest size.
        """
        if not is_number(num_tokens) or num_tokens > self.sizes[-1]:
            raise InvalidArgument(
                f"ChunkProfile: num_tokens must be at most {self.sizes[-1]}, the largest size "
                f"measured, got {shown(num_tokens)}"
            )
        index = bisect_left(self.sizes, num_tokens)
        if index == 0 or self.sizes[index] == num_tokens:
            return self.seconds[index]
        (low, high), (begin, end) = (
            values[index - 1 : index + 1] for values in (self.sizes, self.seconds)
        )
        return begin + (end - begin) * (num_tokens - low) / (high - low)


def profile_chunks(
    run: Callable[[int], object],
    sizes: Iterable[int],
    *,
    repeats: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> ChunkProfile:
    """Measure steps: for each size the median of ``repeats`` calls, after an untimed one.

    Args:
        run: computes one step of this many tokens, and returns when it is done (on CUDA it must
            wait for the device).
        sizes: tokens, ascending; ``choose_chunk_size`` looks up multiples of the tile.
        repeats: calls that are timed.
        clock: returns seconds.

    Raises:
        InvalidArgument: see ``ChunkProfile``; or there are no repeats.

    Source: the one-time profile of SARATHI, section 4.4, and Sarathi-Serve, section 4.3.
    """
    if not is_integer(repeats, 1):
        raise InvalidArgument(
            f"profile_chunks: repeats must be an integer of at least 1, got {shown(repeats)}"
        )
    sizes = tuple(sizes)
    medians = []
    for size in sizes:
        run(size)  # warm up: allocations, autotuning, the first touch of memory
        times = []
        for _ in range(repeats):
            begin = clock()
            run(size)
            times.append(clock() - begin)
        medians.append(statistics.median(times))
    return ChunkProfile(sizes, tuple(medians))
