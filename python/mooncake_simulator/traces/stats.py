"""Statistics of a trace."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

import numpy as np

from .errors import InvalidTrace
from .request import BLOCK_SIZE, TraceRequest


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean, percentiles and maximum of one kind of length, in tokens."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[int]) -> "Lengths":
        """Describe some lengths."""
        p50, p90, p99 = (float(p) for p in np.percentile(values, [50, 90, 99]))
        return cls(float(np.mean(values)), p50, p90, p99, float(max(values)))


@dataclass(frozen=True, slots=True)
class TraceStats:
    """Statistics of a trace; ``str(stats)`` is a table.

    Attributes:
        num_requests: in total.
        duration_s: from the first to the last.
        requests_per_s: over that time; 0 if it is zero.
        gap_variation: of the times between requests, standard deviation over mean: 1 for Poisson.
        input: tokens of prompts.
        output: tokens generated.
        num_blocks: hash ids in total.
        num_unique_blocks: different ones.
        seen_once: share of these that occur once.
        max_hit_rate: prompt tokens that an unlimited cache has, over all of them.
    """

    num_requests: int
    duration_s: float
    requests_per_s: float
    gap_variation: float
    input: Lengths
    output: Lengths
    num_blocks: int
    num_unique_blocks: int
    seen_once: float
    max_hit_rate: float

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers and dicts, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """Return a table."""
        rows = [
            f"requests      {self.num_requests} in {self.duration_s:.1f} s: "
            f"{self.requests_per_s:.3f}/s, variation of gaps {self.gap_variation:.2f}",
            "tokens            mean      p50      p90      p99      max",
        ]
        for name, lengths in (("input", self.input), ("output", self.output)):
            numbers = (lengths.mean, lengths.p50, lengths.p90, lengths.p99, lengths.max)
            rows.append(f"  {name:10}" + "".join(f"{number:10.0f}"[1:] for number in numbers))
        rows.append(
            f"blocks        {self.num_blocks}, {self.num_unique_blocks} different, "
            f"{self.seen_once:.0%} of them seen once"
        )
        rows.append(f"greatest possible hit rate  {self.max_hit_rate:.4f}")
        return "\n".join(rows)


def trace_stats(requests: Sequence[TraceRequest], *, block_size: int = BLOCK_SIZE) -> TraceStats:
    """Describe a trace.

    Args:
        requests: at least one, in the order of time.
        block_size: tokens that a hash id stands for.

    Raises:
        InvalidTrace: there is no request.
    """
    if not requests:
        raise InvalidTrace("trace_stats", 1, "a trace must hold at least one request")
    times = np.array([request.timestamp_ms for request in requests]) / 1e3
    duration_s = float(times[-1] - times[0])
    gaps = np.diff(times)
    uses = Counter(hash_id for request in requests for hash_id in request.hash_ids)
    hit_tokens = sum(
        min(num_blocks * block_size, request.input_length)
        for request, num_blocks in zip(requests, _seen_before(requests), strict=True)
    )
    return TraceStats(
        num_requests=len(requests),
        duration_s=duration_s,
        requests_per_s=len(requests) / duration_s if duration_s else 0.0,
        gap_variation=float(gaps.std() / gaps.mean()) if duration_s else 0.0,
        input=Lengths.of([request.input_length for request in requests]),
        output=Lengths.of([request.output_length for request in requests]),
        num_blocks=uses.total(),
        num_unique_blocks=len(uses),
        seen_once=sum(n == 1 for n in uses.values()) / len(uses) if uses else 0.0,
        max_hit_rate=hit_tokens / sum(request.input_length for request in requests),
    )


def _seen_before(requests: Sequence[TraceRequest]) -> Iterator[int]:
    """Yield for each request how many of its first blocks an earlier one had, too."""
    seen: set[int] = set()
    for request in requests:
        yield sum(1 for _ in takewhile(seen.__contains__, request.hash_ids))
        seen.update(request.hash_ids)
