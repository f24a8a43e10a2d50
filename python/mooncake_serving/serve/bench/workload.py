"""What is sent, and when."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mooncake_simulator.traces import BLOCK_SIZE, TraceRequest, read_trace, unshared


@dataclass(frozen=True)
class Planned:
    """A request to send.

    Attributes:
        at_s: when, after the beginning.
        token_ids: of its prompt.
        output_len: tokens that it may generate.
        block_ids: of each block of the prompt, a last part of one included; equal ones mean equal
            tokens up to there.
    """

    at_s: float
    token_ids: Sequence[int]
    output_len: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class Workload:
    """All that is sent.

    Attributes:
        requests: in the order of their times.
        block_size: tokens that a block id stands for.
    """

    requests: Sequence[Planned]
    block_size: int

    def as_trace(self) -> list[TraceRequest]:
        """Return the requests as a trace of blocks of ``block_size``."""
        return [
            TraceRequest(1000 * one.at_s, len(one.token_ids), one.output_len, one.block_ids)
            for one in self.requests
        ]


def workload_of(options: argparse.Namespace) -> Workload:
    """Make the load that options ask for; the same ones make the same.

    Raises:
        InvalidTrace: the trace is none.
        OSError: it cannot be read.
    """
    if options.trace is not None:
        trace = read_trace(options.trace)[: options.num_prompts]
        return _of_trace(options, trace if trace[0].hash_ids else [*unshared(trace)])
    return _random(options, options.num_prompts or 32)


def _of_trace(options: argparse.Namespace, trace: Sequence[TraceRequest]) -> Workload:
    block_size = scaled(BLOCK_SIZE, options.scale_lengths)
    if math.isfinite(options.request_rate):
        times = arrivals_s(len(trace), options.request_rate, options.burstiness, options.seed)
    else:
        first_ms = trace[0].timestamp_ms
        times = [(one.timestamp_ms - first_ms) / 1000 / options.speed for one in trace]
    scale_outputs = options.scale_outputs or options.scale_lengths
    blocks = _Blocks(options.seed, options.token_ids, block_size)
    requests = []
    for at_s, one in zip(times, trace, strict=True):
        full = len(one.hash_ids) - 1
        rest = scaled(one.input_length - full * BLOCK_SIZE, options.scale_lengths)
        prompt = blocks.prompt(one.hash_ids, full * block_size + min(rest, block_size))
        output_len = scaled(one.output_length, scale_outputs)
        requests.append(Planned(at_s, prompt, output_len, one.hash_ids))
    return Workload(requests, block_size)


def _random(options: argparse.Namespace, count: int) -> Workload:
    """Make prompts that share their first tokens: one block, which each continues by its own."""
    times = arrivals_s(count, options.request_rate, options.burstiness, options.seed)
    shared, own = options.random_prefix_len, options.random_input_len
    size = shared or own
    blocks = _Blocks(options.seed, options.token_ids, size)
    requests = []
    for index, at_s in enumerate(times):
        own_ids = range(1 + index * own, 1 + index * own + -(-own // size))
        ids = (0, *own_ids) if shared else (*own_ids,)
        prompt = blocks.prompt(ids, shared + own)
        requests.append(Planned(at_s, prompt, options.random_output_len, ids))
    return Workload(requests, size)


class _Blocks:
    """Tokens of blocks, drawn by their ids."""

    def __init__(self, seed: int, token_ids: tuple[int, int], size: int):
        self._seed, self._token_ids, self._size = seed, token_ids, size

    def prompt(self, ids: Sequence[int], num_tokens: int) -> list[int]:
        """Return the tokens of blocks, cut to ``num_tokens``."""
        tokens: list[int] = []
        for block_id in ids:
            rng = np.random.default_rng((self._seed, block_id))
            tokens += rng.integers(*self._token_ids, self._size).tolist()
        return tokens[:num_tokens]


def arrivals_s(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Draw times of arrival, as vLLM does: the last is at ``count / rate``; 0 if all come at once.

    Args:
        count: of requests.
        rate: requests a second; infinite: all at once.
        burstiness: shape of the gamma distribution of the time between two.
        seed: of the draw.
    """
    if not math.isfinite(rate):
        return [0.0] * count
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.gamma(burstiness, 1 / (rate * burstiness), count))
    return (times * (count / rate / times[-1])).tolist()


def scaled(length: int, scale: float) -> int:
    """Scale a number of tokens, of which one is left at least."""
    return max(1, round(length * scale))
