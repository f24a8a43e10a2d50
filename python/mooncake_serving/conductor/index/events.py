"""What an instance tells of its cache."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVEvent:
    """One change of an instance's cache, as engines publish them; they may come late or twice.

    An instance numbers its events 0, 1, 2, ... An index applies them in that order: one that comes
    early is kept until those before it have come, one that came already is passed over. A snapshot
    stands for all events before it, and ends the wait for them.

    Attributes:
        instance: whose cache it is.
        sequence: its number among the instance's events.
        stored: chains, each from its first block, all of whose blocks are there now. What lies
            after a hole in a chain is of no use to anybody and is left out.
        removed: keys, in any order.
        snapshot: whether ``stored`` is all that is there.
    """

    instance: int
    sequence: int
    stored: tuple[tuple[int, ...], ...] = ()
    removed: tuple[int, ...] = ()
    snapshot: bool = False
