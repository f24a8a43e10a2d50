"""The results of all requests of a simulation."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from mooncake_serving.conductor import InvalidArgument

from .job import Job


@dataclass(frozen=True)
class Report:
    """The result of a simulation.

    Attributes:
        jobs: every request, served or refused.
        num_events: of the clock.
        peak_tokens: for each instance, the most memory it had reserved, in tokens.
        sent_bytes: over the network, in total.
    """

    jobs: Sequence[Job]
    num_events: int
    peak_tokens: Sequence[int] = ()
    sent_bytes: float = 0.0
    _ttft_s: np.ndarray = field(init=False, repr=False)
    _tbt_s: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        served = [job for job in self.jobs if job.finished_s is not None]
        refused = [job for job in self.jobs if job.rejected is not None]
        if len(served) + len(refused) != len(self.jobs):
            raise InvalidArgument(
                f"Report: jobs must be served or refused, each of {len(self.jobs)}, "
                f"got {len(served)} and {len(refused)}"
            )
        object.__setattr__(self, "_ttft_s", np.array([job.ttft_s for job in served], float))
        object.__setattr__(self, "_tbt_s", np.array([job.tbt_s() for job in served], float))

    @property
    def simulated_s(self) -> float:
        """From the first arrival to the last token; whatever happens later does not count."""
        finished = [job.finished_s for job in self.jobs if job.finished_s is not None]
        return max(finished) - self.jobs[0].arrival_s if finished else 0.0

    @property
    def ttft_s(self) -> np.ndarray:
        """TTFT of each request that was served, in the order of arrival."""
        return self._ttft_s

    @property
    def tbt_s(self) -> np.ndarray:
        """TBT of each request that was served: the mean of its longest tenth of gaps."""
        return self._tbt_s

    def num_effective(self, ttft_s: float, tbt_s: float) -> int:
        """Count the requests that met both limits."""
        return int(((self._ttft_s <= ttft_s) & (self._tbt_s <= tbt_s)).sum())

    @property
    def prefill_gpu_s(self) -> float:
        """Instance time of prefill: how long prefill alone would have kept instances busy."""
        return sum(job.gpu_s for job in self.jobs)

    @property
    def hit_rate(self) -> float:
        """Reused tokens over the input tokens of all prefilled requests."""
        prefilled = [job for job in self.jobs if job.first_token_s is not None]
        tokens = sum(job.request.input_length for job in prefilled)
        return sum(job.prefix_tokens for job in prefilled) / tokens if tokens else 0.0

    def summary(self) -> dict[str, Any]:
        """Everything above as one flat JSON object; latencies are None if nothing was served."""
        figures = {
            "requests": len(self.jobs),
            "served": len(self._ttft_s),
            "rejected": sum(job.rejected is not None for job in self.jobs),
            "hit_rate": self.hit_rate,
            "prefill_gpu_s": self.prefill_gpu_s,
            "fetched_tokens": sum(job.fetched_tokens for job in self.jobs),
            "restarts": sum(job.restarts for job in self.jobs),
            "sent_bytes": self.sent_bytes,
            "simulated_s": self.simulated_s,
            "events": self.num_events,
        }
        for name, values in (("ttft", self._ttft_s), ("tbt", self._tbt_s)):
            figures |= {f"{name}_{key}": v for key, v in asdict(Spread.of(values)).items()}
        return figures


@dataclass(frozen=True)
class Spread:
    """Mean and quantiles of some values, in seconds; None of no values."""

    mean_s: float | None
    p50_s: float | None
    p90_s: float | None
    p99_s: float | None

    @classmethod
    def of(cls, values: np.ndarray) -> "Spread":
        """Describe values."""
        if not len(values):
            return cls(None, None, None, None)
        return cls(float(values.mean()), *(float(q) for q in np.quantile(values, (0.5, 0.9, 0.99))))
