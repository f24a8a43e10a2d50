"""What a holder reports of objects, and where their bytes go."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from mooncake_kernels.buffers import Buffer
from mooncake_kernels.errors import FailureKind, TransferError
from mooncake_kernels.pool import checksum_of

from ..directory import Member
from . import messages
from .destinations import Destination, Range
from .fetcher import Fetch
from .messages import Pinned


class Outcome(enum.Enum):
    """Result of reading an object."""

    DONE = 0
    ABSENT = 1
    DAMAGED = 2
    NOT_TAKEN = 3  # refused by its destination
    UNREACHED = 4  # the holder cannot be reached
    BUSY = 5  # too much is pinned there
    SPOILED = 6  # it, or an object read with it, was damaged on its way


OUTCOMES = {
    messages.PINNED: Outcome.DONE,  # unless the read fails
    messages.ABSENT: Outcome.ABSENT,
    messages.DAMAGED: Outcome.DAMAGED,
    messages.BUSY: Outcome.BUSY,
}
NOT_PINNED = (messages.ABSENT, messages.DAMAGED, messages.BUSY)


@dataclass(frozen=True)
class PendingRead:
    """An object that is being read, or a part of it.

    Attributes:
        destination: which has accepted it.
        address: where it is at its holder.
        ranges: where it goes.
        checksum: as reported by its holder; 0: none.
    """

    destination: Destination
    address: int
    ranges: Sequence[Range]
    checksum: int

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.ranges)

    def fetches(self) -> list[Fetch]:
        return [(self.address, part) for part in self.ranges]

    def check(self, member: Member) -> None:
        at = self.destination.location
        here = [Buffer(part.address, part.num_bytes, at, True, None) for part in self.ranges]
        if checksum_of(*here) != self.checksum:
            what = "checksum: what has arrived is not what was stored"
            raise TransferError(member.name, what, kind=FailureKind.CHECKSUM)


def open_destinations(
    answer: Pinned, destinations: Sequence[Destination], opened: list[PendingRead], member: Member
) -> list[Outcome]:
    """Each object's result; those that their destinations accept are appended to ``opened``."""
    rows = answer.rows().tolist()
    if len(rows) != len(destinations):
        what = f"pin: {len(rows)} answers to {len(destinations)} keys"
        raise TransferError(member.name, what, kind=FailureKind.INCOMPATIBLE)
    results: list[Outcome] = []
    for destination, (status, address, num_bytes, checksum) in zip(destinations, rows, strict=True):
        outcome = OUTCOMES.get(status, Outcome.UNREACHED)
        if outcome is Outcome.DONE:
            if num_bytes > member.capacity_bytes or address + num_bytes >= 1 << 64:
                what = f"pin: an object of {num_bytes} bytes"
                raise TransferError(member.name, what, kind=FailureKind.INCOMPATIBLE)
            ranges = destination.open(num_bytes)
            if ranges is None:
                outcome = Outcome.NOT_TAKEN
            else:
                opened.append(PendingRead(destination, address, ranges, checksum))
        results.append(outcome)
    return results
