"""Messages between the launcher and its instances: plain data over a pipe."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from os import PathLike

from ...arguments import as_seconds, refuse
from ...engine.arguments import as_integers, as_positive, check_params
from ...engine.process import Failed
from ...engine.request import FinishReason
from ...engine.sampling import SamplingParams
from .. import Heartbeat, LoanOptions, Offer

START_S = 600.0  # imports take minutes where other work has the processors and the disk
BETWEEN_PROCESSES = ("shm", "tcp")  # transports that instances can reach each other by


@dataclass(frozen=True)
class InstanceOptions:
    """Options of every instance.

    Attributes:
        model: a path as ``load_model`` takes it; None: the default model.
        transports: by which the instances reach each other.
        num_blocks, block_size: of one instance's cache; a block is ``block_size`` tokens.
        chunk_tokens: tokens of one prompt in one step.
        min_own_blocks: a request that borrows has at least this many at its own instance.
        loan_options: how the instances lend and borrow.
        threads: of torch, in each instance.
        wait_s: how long the next request waits for memory while nothing runs at its instance.
        deadline_s: without any report of an instance with unfinished jobs, after which a run is
            given up; heartbeats count.
        start_s: without any report of an instance that starts: it reports when its imports are
            done, and each part of the weights.
        secret: of the instances' transfer engines: only who has it reaches their memory. None: each
            ``DistAttentionCluster`` draws one of its own.

    Raises:
        InvalidArgument: an argument out of range; the message names it.
    """

    model: str | None = None
    transports: tuple[str, ...] = ("tcp",)
    num_blocks: int = 128
    block_size: int = 16
    chunk_tokens: int = 128
    min_own_blocks: int = 4
    loan_options: LoanOptions = field(default_factory=LoanOptions)
    threads: int = 1
    wait_s: float = 30.0
    deadline_s: float = 60.0
    start_s: float = START_S
    secret: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Check the arguments before a process is started."""
        for name in ("num_blocks", "block_size", "chunk_tokens", "min_own_blocks", "threads"):
            as_positive("InstanceOptions", name, getattr(self, name))
        self._check_reach()
        if not isinstance(self.loan_options, LoanOptions):
            refuse("InstanceOptions", "loan_options", "LoanOptions", self.loan_options)
        if self.min_own_blocks > self.num_blocks:
            wanted = f"at most num_blocks, {self.num_blocks}"
            refuse("InstanceOptions", "min_own_blocks", wanted, self.min_own_blocks)
        for name in ("wait_s", "deadline_s", "start_s"):
            as_seconds("InstanceOptions", name, getattr(self, name))

    def _check_reach(self) -> None:
        """Check what is no number: where the model is, and how instances reach each other."""
        op, transports, secret = "InstanceOptions", self.transports, self.secret
        if not isinstance(self.model, str | PathLike | None):
            refuse(op, "model", "a path or None", self.model)
        known = {"local", *BETWEEN_PROCESSES}
        are_names = isinstance(transports, tuple | list | set | frozenset) and known >= {
            name if isinstance(name, str) else "" for name in transports
        }
        if not are_names:
            refuse(op, "transports", f"among {', '.join(BETWEEN_PROCESSES)}", transports)
        if not set(transports) & set(BETWEEN_PROCESSES):
            refuse(op, "transports", "between processes: there are several", transports)
        if secret is not None and not (isinstance(secret, str) and 16 <= len(secret) <= 1024):
            wanted = "a string of 16 to 1024 characters, or None"
            refuse(op, "secret", wanted, type(secret).__name__)


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
class Submit:
    """To an instance: serve a request."""

    request_id: int
    job: Job


@dataclass(frozen=True)
class Candidates:
    """To an instance: the ledger's answer to ``AskLedger``."""

    offers: Sequence[Offer]


@dataclass(frozen=True)
class Abort:
    """To an instance: forget a request; one that is not there is no error."""

    request_id: int


@dataclass(frozen=True)
class Started:
    """From an instance: its process runs, and has imported what it needs."""


@dataclass(frozen=True)
class Loading:
    """From an instance: progress of loading its weights."""

    done: int
    total: int


@dataclass(frozen=True)
class Ready:
    """From an instance: it accepts commands now."""

    engine_name: str


@dataclass(frozen=True)
class NewToken:
    """From an instance: a token of a request."""

    request_id: int
    token_id: int
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class AskLedger:
    """From an instance: it is short of that many blocks."""

    num_blocks: int


@dataclass(frozen=True)
class Left:
    """From an instance: it lends nothing any more."""


Command = Submit | Abort | Candidates
Report = Started | Loading | Ready | NewToken | Failed | Heartbeat | AskLedger | Left
