"""How an instance lends and borrows."""

from dataclasses import dataclass

from mooncake_kernels.errors import InvalidArgument


@dataclass(frozen=True)
class PoolOptions:
    """How an instance lends and borrows.

    Attributes:
        max_lent_blocks: that it lends at a time; None: all.
        num_staged_blocks: that are moved at a time, in buffers of that size for each peer.
        lease_s: a loan ends that its debtor has not renewed for so long; below 2**32 ms.
        answer_s: how long an answer may take, before the instance counts as gone.
        heartbeat_s: between reports, and between renewals; below half of the ``lease_s`` of any
            creditor, so that one renewal may come late.

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
        if self.max_lent_blocks is not None and self.max_lent_blocks < 0:
            _refuse("max_lent_blocks", "at least 0, or None", self.max_lent_blocks)
        if self.num_staged_blocks < 1:
            _refuse("num_staged_blocks", "at least 1", self.num_staged_blocks)
        if not self.answer_s > 0:
            _refuse("answer_s", "positive", self.answer_s)
        if not 0 < self.lease_s < 4e6:
            _refuse("lease_s", "positive and below 4e6", self.lease_s)
        half = self.lease_s / 2
        if not 0 < self.heartbeat_s < half:
            wanted = f"positive and below half of lease_s, {half:g}"
            _refuse("heartbeat_s", wanted, self.heartbeat_s)


def _refuse(name: str, wanted: str, value: object) -> None:
    raise InvalidArgument(f"PoolOptions: {name} must be {wanted}, got {value!r}")
