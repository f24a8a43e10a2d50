"""Who has memory to lend, and who owes whom: the global manager's policy, on plain data.

Infinite-LLM's gManager (arXiv:2401.02669): instances report by heartbeats, and one that is short of
memory gets a few candidates, those with the most free memory. The ledger is soft state. It may be
stale, because lenders decide for themselves, and a new one is complete after one heartbeat each.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from mooncake_kernels.errors import InvalidArgument, shown

from ..arguments import as_count, as_integer, as_seconds, refuse


@dataclass(frozen=True)
class Heartbeat:
    """What an instance reports of itself.

    Attributes:
        instance: its name.
        num_blocks: of its cache.
        num_free: blocks that it would lend now.
        lent: blocks that it has lent, by borrower.
        num_borrowed: blocks that it has borrowed, or is about to.

    Raises:
        InvalidArgument: a negative number, more free and lent than there are, or another type.
    """

    instance: str
    num_blocks: int
    num_free: int
    lent: Mapping[str, int] = field(default_factory=dict)
    num_borrowed: int = 0

    def __post_init__(self) -> None:
        """Check the names and numbers."""
        if not isinstance(self.lent, Mapping):
            refuse("Heartbeat", "lent", "blocks by borrower", self.lent)
        for name in (self.instance, *self.lent):
            if not isinstance(name, str):
                refuse("Heartbeat", "instance and the borrowers", "names", name)
        as_count("Heartbeat", "num_blocks", self.num_blocks, 0)
        as_integer("Heartbeat", "num_free", self.num_free)
        as_integer("Heartbeat", "num_borrowed", self.num_borrowed)
        for borrower, count in self.lent.items():
            as_integer("Heartbeat", f"lent[{shown(borrower)}]", count)
        counts = (self.num_free, self.num_borrowed, *self.lent.values())
        if min(counts) < 0 or self.num_free + sum(self.lent.values()) > self.num_blocks:
            raise InvalidArgument(
                f"Heartbeat: num_free and lent must be at least 0 and together at most the "
                f"{self.num_blocks} blocks, got {self.num_free} and {shown(dict(self.lent))}"
            )


class Offer(NamedTuple):
    """A candidate, with the blocks that it would lend."""

    instance: str
    num_blocks: int


class LoanLedger:
    """The latest heartbeat of every instance. Thread-safe.

    Args:
        max_candidates: that a borrower gets.
        stale_s: heartbeats that are older are not regarded.
        clock: seconds, for tests.

    Raises:
        InvalidArgument: a number is not positive, or infinite.
    """

    def __init__(
        self,
        *,
        max_candidates: int = 3,
        stale_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._max_candidates = as_count("LoanLedger", "max_candidates", max_candidates, 1)
        self._stale_s, self._clock = as_seconds("LoanLedger", "stale_s", stale_s), clock
        self._beats: dict[str, tuple[float, Heartbeat]] = {}
        self._lock = threading.Lock()

    def heartbeat(self, beat: Heartbeat) -> None:
        """Replace what is known of an instance.

        Raises:
            InvalidArgument: it is no ``Heartbeat``.
        """
        if not isinstance(beat, Heartbeat):
            refuse("heartbeat", "beat", "a Heartbeat", beat)
        with self._lock:
            self._beats[beat.instance] = (self._clock(), beat)

    def forget(self, instance: str) -> None:
        """An instance is gone, and what it has lent with it."""
        with self._lock:
            self._beats.pop(instance, None)

    def lenders(self, borrower: str, num_blocks: int) -> list[Offer]:
        """Return the candidates for a loan, most free memory first; [] if they have too little.

        ::

            for each other instance, by num_free descending, then by name:
                stop if there are max_candidates
                take it, unless it borrows itself, has nothing to lend, or its heartbeat is stale

        Those after the ones needed are for the case that one refuses.

        An instance that borrows lends to no one, so a loan is never passed on, and there are no
        cycles: of those in a cycle, each would have begun to borrow after the next one had.
        """
        as_count("lenders", "num_blocks", num_blocks, 1)
        candidates = [
            beat
            for beat in self._fresh()
            if beat.instance != borrower and beat.num_free and not beat.num_borrowed
        ]
        candidates.sort(key=lambda beat: (-beat.num_free, beat.instance))
        chosen = candidates[: self._max_candidates]
        if sum(beat.num_free for beat in chosen) < num_blocks:
            return []
        return [Offer(beat.instance, beat.num_free) for beat in chosen]

    def loans(self) -> dict[tuple[str, str], int]:
        """Return the blocks lent, by (borrower, lender); the lender's report counts."""
        with self._lock:
            beats = [beat for _, beat in self._beats.values()]
        return {
            (borrower, beat.instance): count
            for beat in beats
            for borrower, count in beat.lent.items()
            if count
        }

    def balance(self, instance: str) -> int:
        """Return what an instance has lent, less what it owes; the sum over all is 0."""
        loans = self.loans().items()
        lent = sum(count for (_, lender), count in loans if lender == instance)
        return lent - sum(count for (borrower, _), count in loans if borrower == instance)

    def _fresh(self) -> list[Heartbeat]:
        with self._lock:
            oldest = self._clock() - self._stale_s
            return [beat for at, beat in self._beats.values() if at >= oldest]
