"""Messages between the launcher and its instances: plain data over a pipe."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...arguments import as_seconds, refuse
from ...engine.arguments import as_positive
from ...engine.disaggregated.messages import (
    START_S,
    Abort,
    Failed,
    Job,
    Loading,
    NewToken,
    Ready,
    Started,
    check_reach,
)
from .. import Heartbeat, LoanOptions, Offer


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
        check_reach("InstanceOptions", self.model, self.transports, self.secret)
        if not isinstance(self.loan_options, LoanOptions):
            refuse("InstanceOptions", "loan_options", "LoanOptions", self.loan_options)
        if self.min_own_blocks > self.num_blocks:
            wanted = f"at most num_blocks, {self.num_blocks}"
            refuse("InstanceOptions", "min_own_blocks", wanted, self.min_own_blocks)
        for name in ("wait_s", "deadline_s", "start_s"):
            as_seconds("InstanceOptions", name, getattr(self, name))


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
class AskLedger:
    """From an instance: it is short of that many blocks."""

    num_blocks: int


@dataclass(frozen=True)
class Left:
    """From an instance: it lends nothing any more."""


Command = Submit | Abort | Candidates
Report = Started | Loading | Ready | NewToken | Failed | Heartbeat | AskLedger | Left
