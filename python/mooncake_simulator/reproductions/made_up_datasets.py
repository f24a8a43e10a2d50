"""Synthetic requests like those of the datasets in arXiv:2407.00079, by published averages."""

from dataclasses import dataclass

import numpy as np

from ..traces import BLOCK_SIZE, TraceRequest
from .made_up_toolagent import log_normal


@dataclass(frozen=True)
class Dataset:
    """Averages of a dataset (arXiv:2407.00079, Table 2), and what is ASSUMED in addition.

    Attributes:
        name: of it.
        input_tokens, output_tokens: their means.
        shared: share of a prompt that others also have; published is the cache ratio, which is
            ``shared`` times (1 - 1 / ``askers``).
        askers: prompts that share it; 0 for all.
        sigma: deviation of the logarithm of prompt lengths; 0 if all are equal.
    """

    name: str
    input_tokens: int
    output_tokens: int
    shared: float
    askers: int
    sigma: float = 0.5


ARXIV_SUMMARIZATION = Dataset("ArXiv-Summarization", 8088, 229, shared=0.0, askers=1)
L_EVAL = Dataset("L-Eval", 19019, 72, shared=0.92, askers=8)
SIMULATED = {
    thousands: Dataset(f"simulated {thousands}k", thousands * 1024, 512, 0.5, askers=0, sigma=0.0)
    for thousands in (16, 32, 64, 128)
}


def make(dataset: Dataset, rate: float, num_requests: int, seed: int) -> list[TraceRequest]:
    """Generate requests at ``rate`` per second, Poisson, those of a document spread out."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1e3 / rate, num_requests))
    askers = dataset.askers or num_requests
    documents = rng.permutation(np.arange(num_requests) // askers)
    lengths = log_normal(rng, dataset.input_tokens, dataset.sigma, int(documents.max()) + 1)
    outputs = log_normal(rng, dataset.output_tokens, dataset.sigma, num_requests)
    fresh = int(lengths.sum())  # blocks of documents have smaller numbers
    starts = np.concatenate(([0], np.cumsum(lengths)))
    requests = []
    for time, document, output in zip(times, documents, outputs, strict=True):
        length, start = int(lengths[document]), int(starts[document])
        num_blocks = -(-length // BLOCK_SIZE)
        num_shared = min(num_blocks - 1, int(dataset.shared * num_blocks))
        own = range(fresh, fresh + num_blocks - num_shared)
        fresh += len(own)
        keys = (*range(start, start + num_shared), *own)
        requests.append(TraceRequest(float(time), length, int(output), keys))
    return requests
