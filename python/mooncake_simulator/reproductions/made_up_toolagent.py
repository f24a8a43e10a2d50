"""A trace like FAST'25's tool&agent one, by what is published of it: the file is unavailable."""

import numpy as np

from ..traces import BLOCK_SIZE, TraceRequest

# FAST'25, Table 2: requests in an hour, mean prompt and output.
NUM_REQUESTS, HOUR_MS = 23_608, 3.6e6
MEAN_INPUT, MEAN_OUTPUT = 8596, 182
# ASSUMED: Poisson arrivals, lengths log-normal with these deviations of the logarithm.
INPUT_SIGMA, OUTPUT_SIGMA = 0.6, 1.0
# FITTED on the known hit rates of the file: LRU at 500, 2,000, 6,000, 20,000 blocks and without a
# limit has 36.3, 37.2, 43.2, 54.7 and 59.1 % (of its second half); these make 36.2, 39.5, 43.4,
# 51.8 and 56.9 % (of all; seed 0). With probability NEW a prompt begins a new session, which mostly
# begins with one of a few tools' prompts; otherwise it continues one of the RECENT last ones.
NEW, RECENT, OWN = 0.38, 3500, 0.1
WITH_TOOL, TOOL_BLOCKS, TOOLS = 0.7, 12, 4
TOOL_ZIPF = 2.5


def like_toolagent(seed: int, num_requests: int = NUM_REQUESTS) -> list[TraceRequest]:
    """Generate its first ``num_requests`` requests."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(HOUR_MS / NUM_REQUESTS, num_requests))
    inputs = log_normal(rng, MEAN_INPUT, INPUT_SIGMA, num_requests)
    outputs = log_normal(rng, MEAN_OUTPUT, OUTPUT_SIGMA, num_requests)
    popularity = np.arange(1, TOOLS + 1) ** -TOOL_ZIPF
    popularity /= popularity.sum()
    sessions: list[tuple[int, ...]] = []
    fresh = TOOLS * TOOL_BLOCKS
    for length in inputs:
        num_blocks = -(-int(length) // BLOCK_SIZE)
        if not sessions or rng.random() < NEW:
            begin: tuple[int, ...] = ()
            if rng.random() < WITH_TOOL:
                first = TOOL_BLOCKS * int(rng.choice(TOOLS, p=popularity))
                begin = tuple(range(first, first + min(TOOL_BLOCKS, num_blocks - 1)))
        else:
            session = sessions[-1 - int(rng.integers(min(RECENT, len(sessions))))]
            begin = session[: num_blocks - max(1, round(OWN * num_blocks))]
        rest = range(fresh, fresh + num_blocks - len(begin))
        fresh += len(rest)
        sessions.append((*begin, *rest))
    return [
        TraceRequest(float(at), int(length), int(output), keys)
        for at, length, output, keys in zip(times, inputs, outputs, sessions, strict=True)
    ]


def log_normal(rng: np.random.Generator, mean: float, sigma: float, count: int) -> np.ndarray:
    """Draw lengths of that mean, at least 1."""
    lengths = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.maximum(1, np.rint(lengths)).astype(np.int64)
