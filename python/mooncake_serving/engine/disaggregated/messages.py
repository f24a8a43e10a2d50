"""Messages between the launcher and its workers: plain data over a pipe; and the handover."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from os import PathLike
from typing import Any

from ...arguments import as_integer, as_seconds, refuse
from ..arguments import as_integers, check_params, check_text
from ..request import FinishReason
from ..sampling import SamplingParams
from .life import Step

START_S = 600.0  # imports take minutes where other work has the processors and the disk
BETWEEN_PROCESSES = ("shm", "tcp")  # transports that the workers can reach each other by


@dataclass(frozen=True)
class WorkerOptions:
    """Options of a worker.

    Attributes:
        model: a path as ``load_model`` takes it; None: the default model.
        device: where the model and the cache are.
        transports: those that the transfer engine may use.
        axes: the cache's layout; prefill and decode may differ.
        num_blocks, block_size: of the cache; a block is ``block_size`` tokens.
        num_staging_blocks: of the packed buffer that peers write to, or that is sent.
        max_requests: that decode has room for, from the reservation to the last token.
        chunk_tokens: tokens of one prefill chunk.
        threads: of torch, in each worker.
        deadline_s: of one transfer, and of the silence of both workers after which they are given
            up, once both have started.
        start_s: of the silence while they start, which is mostly imports and the reading of
            weights: a worker reports when its imports are done, and each part of the weights.
        secret: of the workers' transfer engines: only who has it reaches their memory. None: each
            ``Cluster`` draws one of its own.

    Raises:
        InvalidArgument: an argument out of range; the message names it.
    """

    model: str | None = None
    device: str = "cpu"
    transports: tuple[str, ...] = ("tcp",)
    axes: str = "kv block token head dim"
    num_blocks: int = 512
    block_size: int = 16
    num_staging_blocks: int = 512
    chunk_tokens: int = 128
    max_requests: int = 64
    threads: int = 1
    deadline_s: float = 60.0
    start_s: float = START_S
    secret: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Check the arguments before a process is started."""
        for name in (
            "num_blocks",
            "block_size",
            "num_staging_blocks",
            "chunk_tokens",
            "max_requests",
            "threads",
        ):
            if as_integer("WorkerOptions", name, getattr(self, name)) < 1:
                refuse("WorkerOptions", name, "at least 1", getattr(self, name))
        for name in ("deadline_s", "start_s"):
            as_seconds("WorkerOptions", name, getattr(self, name))
        check_text("WorkerOptions", "device", self.device)
        check_text("WorkerOptions", "axes", self.axes)
        check_reach("WorkerOptions", self.model, self.transports, self.secret)


def check_reach(op: str, model: Any, transports: Any, secret: Any) -> None:
    """Check what the options of all processes have in common, but for the numbers."""
    if not isinstance(model, str | PathLike | None):
        refuse(op, "model", "a path or None", model)
    known = {"local", *BETWEEN_PROCESSES}
    are_names = isinstance(transports, tuple | list | set | frozenset) and known >= {
        name if isinstance(name, str) else "" for name in transports
    }
    if not are_names:
        refuse(op, "transports", f"among {', '.join(BETWEEN_PROCESSES)}", transports)
    if not set(transports) & set(BETWEEN_PROCESSES):
        refuse(op, "transports", "between processes: there are several", transports)
    if secret is not None and not (isinstance(secret, str) and 16 <= len(secret) <= 1024):
        refuse(op, "secret", "a string of 16 to 1024 characters, or None", type(secret).__name__)


@dataclass(frozen=True)
class Job:
    """One prompt and how to answer it.

    Raises:
        InvalidArgument: the prompt is empty or not of integers, or ``params`` are none; whether the
            model has such tokens, its process tells.
    """

    prompt_tokens: list[int]
    params: SamplingParams

    def __post_init__(self) -> None:
        """Check the types here, not first in the process that serves it."""
        tokens = as_integers("Job", "prompt_tokens", self.prompt_tokens)
        if not tokens:
            refuse("Job", "prompt_tokens", "at least one token", self.prompt_tokens)
        object.__setattr__(self, "prompt_tokens", tokens)
        check_params("Job", self.params)


def as_jobs(jobs: Iterable[Job]) -> list[Job]:
    """Return the jobs of a run as a list; one that is wrong is refused before any is served."""
    if not isinstance(jobs, Iterable):
        refuse("run", "jobs", "Jobs", jobs)
    listed = list(jobs)
    for index, job in enumerate(listed):
        if not isinstance(job, Job):
            refuse("run", f"jobs[{index}]", "a Job", job)
    return listed


@dataclass(frozen=True)
class Target:
    """Where a prompt's blocks are to be written: packed, at an address of the decode worker."""

    engine_name: str
    address: int
    num_bytes: int


@dataclass(frozen=True)
class Reserve:
    """To decode: reserve room for a request."""

    request_id: int
    job: Job


@dataclass(frozen=True)
class Sender:
    """To decode: the transfer engine of prefill. Of no other does a handover count."""

    engine_name: str


@dataclass(frozen=True)
class Prefill:
    """To prefill: compute a prompt and send its blocks."""

    request_id: int
    job: Job
    target: Target


@dataclass(frozen=True)
class Abort:
    """To both: forget a request and free what it holds; one that is not there is no error."""

    request_id: int


@dataclass(frozen=True)
class Started:
    """From a worker: its process runs, and has imported what it needs."""


@dataclass(frozen=True)
class Loading:
    """From a worker: progress of loading its weights."""

    done: int
    total: int


@dataclass(frozen=True)
class Ready:
    """From a worker: it accepts commands now."""

    engine_name: str


@dataclass(frozen=True)
class Reserved:
    """From decode: there is room."""

    request_id: int
    target: Target


@dataclass(frozen=True)
class Computed:
    """From prefill: that many tokens of a prompt are done; a long one would look like silence."""

    request_id: int
    num_tokens: int


@dataclass(frozen=True)
class PrefillEnded:
    """From prefill: it will write no more of a request's blocks, which are sent or aborted."""

    request_id: int


@dataclass(frozen=True)
class NewToken:
    """From decode: a token of a request."""

    request_id: int
    token_id: int
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class Failed:
    """From a worker: a request failed, or with None the worker itself."""

    request_id: int | None
    reason: str


@dataclass(frozen=True)
class Handover:
    """From prefill to decode, as the notification of the write: a request's blocks are there."""

    request_id: int
    first_token: int
    last_key: int | None  # the name of the prompt's last full block; None if it has none

    def encode(self) -> bytes:
        """Return it as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, message: bytes) -> "Handover":
        """Return what ``encode`` was called on.

        Raises:
            InvalidArgument: it is something else.
        """
        try:
            values = json.loads(message)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict) or set(values) != {*cls.__dataclass_fields__}:
            refuse("Handover", "message", f"JSON of {list(cls.__dataclass_fields__)}", message)
        for name, value in values.items():
            if value is not None or name != "last_key":
                as_integer("Handover", name, value)
        return cls(**values)


Command = Sender | Reserve | Prefill | Abort
Report = Started | Loading | Ready | Reserved | Computed | PrefillEnded | NewToken | Failed | Step
