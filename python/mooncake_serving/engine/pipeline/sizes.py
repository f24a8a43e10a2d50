"""How many tokens of which prompts a step computes, so that all steps take equally long."""

import math
import time
from collections.abc import Callable, Sequence

from ...conductor.costs.fitted import PolynomialPrefill
from ..request import Request

TILE = 16  # chunks but the last of a prompt are multiples of it
NUM_SAMPLES = 3
FAR_CHUNKS = 16  # before the chunk by which the cost of a prefix is measured


def fit_cost(
    compute: Callable[[int, int], object], chunk_tokens: int, max_tokens: int
) -> PolynomialPrefill:
    """Measure chunks, and fit what they cost by their size and by what is before them.

    Args:
        compute: computes a chunk, given its number of tokens and that of the prefix before it.
        chunk_tokens: of the largest chunk.
        max_tokens: of a prompt.
    """
    chunk = max(2, min(chunk_tokens, max_tokens // 2))
    far = min(max_tokens - chunk, FAR_CHUNKS * chunk)
    shapes = [(chunk, 0), (chunk // 2, 0), (chunk, far)]
    seconds = []
    for num_tokens, prefix_tokens in shapes:
        times = []
        for _ in range(NUM_SAMPLES):
            began = time.perf_counter()
            compute(num_tokens, prefix_tokens)
            times.append(time.perf_counter() - began)
        seconds.append(min(times))
    lengths = [num_tokens + prefix_tokens for num_tokens, prefix_tokens in shapes]
    return PolynomialPrefill.fit(lengths, [prefix for _, prefix in shapes], seconds)


class StepSizes:
    """Cuts steps to the time of one chunk at the beginning of a prompt.

    The more tokens are before a chunk, the longer its attention takes: chunks shrink along a
    prompt. A pipeline is as fast as its slowest step, so equal ones leave no stage waiting.

    Args:
        cost: of a stage's steps.
        chunk_tokens: of the chunk whose time a step may take.
    """

    def __init__(self, cost: PolynomialPrefill, chunk_tokens: int):
        self._cost, self._chunk_tokens = cost, chunk_tokens
        self._step_s = float(cost.seconds(chunk_tokens, 0)) - cost.base_s

    def cut(self, work: Sequence[tuple[Request, int]]) -> list[tuple[Request, int]]:
        """Return the work of a step without the tokens that it has no time for.

        Of a request that decodes nothing is cut, and of the first prompt at least a tile is left.
        """
        left_s, has_prompt = self._step_s, False
        cut: list[tuple[Request, int]] = []
        for request, wanted in work:
            start = request.num_computed + request.num_under_way
            num_tokens = min(wanted, self.largest(start, left_s))
            if num_tokens < wanted:  # to the nearest multiple: 0 if that is little
                num_tokens = min(wanted, (num_tokens + TILE // 2) // TILE * TILE)
            if wanted == 1 or not has_prompt:
                num_tokens = max(num_tokens, min(wanted, TILE))
                has_prompt = wanted > 1
            if num_tokens:
                cut.append((request, num_tokens))
                left_s -= float(self._cost.seconds(start + num_tokens, start)) - self._cost.base_s
        return cut

    def largest(self, start: int, seconds: float) -> int:
        """Return how many tokens behind ``start`` others take at most so long, but for the base."""
        if seconds <= 0:
            return 0
        per_pair_s = self._cost.per_pair_s
        linear_s = self._cost.per_token_s + per_pair_s * start
        # The positive root of per_pair_s / 2 * n**2 + linear_s * n = seconds.
        root = math.sqrt(linear_s**2 + 2 * per_pair_s * seconds)
        return self._chunk_tokens if root == 0 else int(2 * seconds / (linear_s + root) + 1e-6)
