"""One request in a simulated cluster, and its results."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mooncake_serving.conductor import Decision, InvalidArgument

from .network import Flow
from .running_batch import RunningBatch
from .traces import TraceRequest


@dataclass(slots=True, eq=False)
class Job:
    """A request and its times, in simulated seconds; None is what has not happened.

    ``decision`` is the conductor's last one, ``rejected`` says why it was not served.
    ``prefix_tokens`` are those whose KV was reused, ``gpu_s`` is the GPU time of its prefill. After
    a failure it starts over: ``restarts``.
    """

    job_id: int
    request: TraceRequest
    arrival_s: float
    prefill_instance: int | None = None
    decode_instance: int | None = None
    prefix_tokens: int = 0
    fetched_tokens: int = 0
    gpu_s: float = 0.0
    first_token_s: float | None = None
    finished_s: float | None = None
    decision: Decision | None = None
    rejected: str | None = None
    restarts: int = 0
    ready: bool = True  # what it fetches is there
    fetch: Flow | None = None  # if it is not
    expected_s: float = 0.0  # of its prefill, by the conductor
    fetched_s: float = 0.0  # when what it fetches is there, by the conductor
    _batch: "RunningBatch[Job] | None" = field(default=None, repr=False)
    _first_step: int = 0
    _before_first_step_s: float = 0.0

    @property
    def num_decode_steps(self) -> int:
        """Number of steps after the prefill, which yields the first token."""
        return max(0, self.request.output_length - 1)

    @property
    def num_kv_tokens(self) -> int:
        """Tokens whose KV it needs in the end."""
        return self.request.input_length + self.request.output_length

    @property
    def ttft_s(self) -> float | None:
        """From arrival to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    def join(self, batch: "RunningBatch[Job]", now: float) -> None:
        """Be decoded in a batch from now on."""
        assert self.first_token_s is not None
        self._before_first_step_s = now - self.first_token_s - batch.pending_stall_s
        self._batch = batch
        self._first_step = batch.join(self, self.request.input_length, self.num_decode_steps)

    def restart(self) -> None:
        """Forget all progress; the instance that had it has failed."""
        self.restarts += 1
        self.first_token_s = self._batch = None
        self.prefill_instance = self.decode_instance = None

    def gaps_s(self) -> np.ndarray:
        """Seconds between its tokens; the first gap starts at the end of its prefill."""
        if self._batch is None:
            return np.zeros(0)
        gaps = self._batch.gaps_s(self._first_step, self.num_decode_steps).copy()
        gaps[:1] += self._before_first_step_s
        return gaps

    def tbt_s(self) -> float:
        """Mean of the longest tenth of the gaps, as FAST'25 (section 5.1) measures TBT."""
        gaps = self.gaps_s()
        if not len(gaps):
            return 0.0
        top = -(-len(gaps) // 10)
        return float(np.partition(gaps, len(gaps) - top)[-top:].mean())


def jobs_of(op: str, requests: Sequence[TraceRequest]) -> list[Job]:
    """Make a job of each request of a trace, numbered from 0; each arrives at its own time.

    Raises:
        InvalidArgument: a request is earlier than the one before it in the list, or than 0.
    """
    previous_ms = 0.0
    for number, request in enumerate(requests):
        if not previous_ms <= request.timestamp_ms < math.inf:
            raise InvalidArgument(
                f"{op}: requests must be in the order of their times, the first at 0 ms or later, "
                f"got request {number} at {request.timestamp_ms:g} ms after {previous_ms:g} ms"
            )
        previous_ms = request.timestamp_ms
    return [Job(i, request, request.timestamp_ms / 1000) for i, request in enumerate(requests)]
