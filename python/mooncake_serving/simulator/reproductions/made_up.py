"""A trace like FAST'25's synthetic one, by what is published of it: the file is not at hand."""

import numpy as np

from ..traces import BLOCK_SIZE, TraceRequest

MADE_UP = "made up like the synthetic trace"

# Requests, their rate, and quantiles 50, 90 and 99 % of prompts and outputs (FAST'25, Table 2, and
# the released file): arrivals are Poisson, 65 % of input tokens can be reused without a limit.
NUM_REQUESTS, RATE = 3993, 3.91
INPUTS = {0.0: 128, 0.5: 11587, 0.9: 38615, 0.99: 66458, 1.0: 120000}
OUTPUTS = {0.0: 1, 0.5: 69, 0.9: 389, 0.99: 769, 1.0: 893}
# FITTED on the released file's hit rates: LRU at 1, 3 and 10 million tokens and without a limit
# has 14.2, 31.5, 57.7 and 65.1 %; these make 15.4, 33.5, 59.2 and 64.9 % (seed 0).
# A prompt begins a new document with this chance, or reads one of the last RECENT ones again; its
# last part, the question, is its own.
NEW, RECENT, OWN = 0.13, 450, 0.07
MAX_BLOCKS = 10**6  # of a document: keys of different ones do not meet


def _quantile(points: dict[float, int], u: float) -> int:
    """Between published quantiles, the logarithm of the length is linear."""
    return round(float(np.exp(np.interp(u, list(points), np.log(list(points.values()))))))


def like_synthetic(seed: int) -> list[TraceRequest]:
    """Make it up."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1e3 / RATE, NUM_REQUESTS))
    requests: list[TraceRequest] = []
    documents, fresh = 0, -1
    for time in times:
        length = _quantile(INPUTS, rng.random())
        num_blocks = -(-length // BLOCK_SIZE)
        own = max(1, round(OWN * num_blocks))
        if not documents or rng.random() < NEW:
            documents += 1
        document = documents - 1 - int(rng.integers(min(RECENT, documents)))
        start = document * MAX_BLOCKS
        keys = (*range(start, start + num_blocks - own), *range(fresh, fresh - own, -1))
        fresh -= own
        output = _quantile(OUTPUTS, rng.random())
        requests.append(TraceRequest(float(time), length, output, keys))
    return requests
