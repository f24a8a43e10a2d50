"""The blocks that an instance has lent: who may use which, and until when."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from .errors import Refusal


class Blocks(Protocol):
    """The blocks of a cache; thread-safe."""

    @property
    def num_blocks(self) -> int:
        """Count all of them."""

    @property
    def num_free(self) -> int:
        """Count those that can be taken now."""

    def take(self, num_blocks: int) -> list[int] | None:
        """Take free blocks, all or none."""

    def give_back(self, block_ids: list[int]) -> None:
        """Free blocks that were taken."""


@dataclass
class Loan:
    """Blocks lent to one borrower; the first ``num_stored`` have contents."""

    block_ids: list[int]
    renewed_s: float
    num_stored: int = 0

    @property
    def stored_ids(self) -> list[int]:
        """Return the blocks with contents, in order."""
        return self.block_ids[: self.num_stored]


class Loans:
    """Loans by borrower and number: a borrower reaches only blocks that it has reserved.

    One thread lends; others may count.

    Args:
        blocks: where they come from.
        max_lent_blocks: to all borrowers together.
        lease_s: a loan that is not renewed for that long ends.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        blocks: Blocks,
        max_lent_blocks: int,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._blocks, self._lease_s, self._clock = blocks, lease_s, clock
        self._max_lent = max_lent_blocks
        self._loans: dict[tuple[str, int], Loan] = {}
        self._lock = threading.Lock()

    def lent(self) -> dict[str, int]:
        """Count the blocks lent to each borrower."""
        counts: dict[str, int] = {}
        with self._lock:
            for (borrower, _), loan in self._loans.items():
                counts[borrower] = counts.get(borrower, 0) + len(loan.block_ids)
        return counts

    @property
    def num_lent(self) -> int:
        """Count the blocks that are lent."""
        return sum(self.lent().values())

    @property
    def num_free(self) -> int:
        """Count the blocks that could be lent now."""
        return max(0, min(self._blocks.num_free, self._max_lent - self.num_lent))

    def reserve(self, borrower: str, number: int, num_blocks: int) -> Loan:
        """Lend blocks.

        Raises:
            Refusal: no or too many blocks, or a number that the borrower has used.
        """
        if (borrower, number) in self._loans:
            raise Refusal(f"loan {number} is there already")
        free = self.num_free
        block_ids = self._blocks.take(num_blocks) if 1 <= num_blocks <= free else None
        if block_ids is None:
            raise Refusal(f"num_blocks must be in [1, {free}], got {num_blocks}")
        loan = Loan(block_ids, self._clock())
        with self._lock:
            self._loans[borrower, number] = loan
        return loan

    def use(self, borrower: str, number: int) -> Loan:
        """Return a loan, and renew it.

        Raises:
            Refusal: the borrower has none of that number, or its lease has ended: this instance may
                have been stopped, and the borrower has given it up since.
        """
        loan = self._loans.get((borrower, number))
        if loan is None or loan.renewed_s < self._clock() - self._lease_s:
            raise Refusal(f"loan {number} must be one of {borrower} that has not ended")
        loan.renewed_s = self._clock()
        return loan

    def renew(self, borrower: str, numbers: Sequence[int]) -> list[int]:
        """Renew loans; return those that are there, and whose lease has not ended."""
        renewed = []
        for number in numbers:
            with suppress(Refusal):
                self.use(borrower, number)
                renewed.append(number)
        return renewed

    def free(self, borrower: str, number: int) -> bool:
        """End a loan; False if there is none."""
        with self._lock:
            loan = self._loans.pop((borrower, number), None)
        if loan is not None:
            self._blocks.give_back(loan.block_ids)
        return loan is not None

    def free_all(self, borrower: str) -> None:
        """End all loans of a borrower."""
        for owner, number in list(self._loans):
            if owner == borrower:
                self.free(owner, number)

    def free_expired(self) -> set[str]:
        """End loans that were not renewed; return their borrowers."""
        oldest = self._clock() - self._lease_s
        expired = [key for key, loan in self._loans.items() if loan.renewed_s < oldest]
        for borrower, number in expired:
            self.free(borrower, number)
        return {borrower for borrower, _ in expired}
