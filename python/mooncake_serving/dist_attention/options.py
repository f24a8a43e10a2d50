"""How an instance lends and borrows."""

from dataclasses import dataclass

from ..arguments import as_count, as_seconds, refuse


@dataclass(frozen=True)
class LoanOptions:
    """How an instance lends and borrows.

    Attributes:
        max_lent_blocks: that it lends at a time; None: all.
        num_staged_blocks: that are moved at a time, in buffers of that size for each peer.
        lease_s: a loan ends that its borrower has not renewed for that long; below 2**32 ms.
        answer_s: how long an answer may take, before the instance counts as gone.
        heartbeat_s: between reports, and between renewals; below half of the ``lease_s`` of any
            lender, so that one renewal may come late.

    Raises:
        InvalidArgument: an argument out of range; the message names it.
    """

    max_lent_blocks: int | None = None
    num_staged_blocks: int = 16
    lease_s: float = 30.0
    answer_s: float = 10.0
    heartbeat_s: float = 1.0

    def __post_init__(self) -> None:
        """Check the arguments."""
        op = "LoanOptions"
        if self.max_lent_blocks is not None:
            as_count(op, "max_lent_blocks", self.max_lent_blocks, 0)
        as_count(op, "num_staged_blocks", self.num_staged_blocks, 1)
        for name in ("answer_s", "lease_s", "heartbeat_s"):
            as_seconds(op, name, getattr(self, name))
        if not self.lease_s < 4e6:
            refuse(op, "lease_s", "below 4e6", self.lease_s)
        half = self.lease_s / 2
        if not self.heartbeat_s < half:
            refuse(op, "heartbeat_s", f"below half of lease_s, {half:g}", self.heartbeat_s)
