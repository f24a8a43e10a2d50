"""What an instance tells of its cache."""

from dataclasses import dataclass

from ..errors import InvalidArgument, check_count, check_keys


@dataclass(frozen=True, slots=True)
class KVEvent:
    """One change of an instance's cache, as engines publish them; they may come late or twice.

    An instance numbers its events 0, 1, 2, ... from each start anew, and with ``epoch`` tells its
    starts apart. An index applies them in that order: one that comes early is kept until those
    before it have come, one that came already is passed over. A snapshot stands for all events of
    its epoch before it, and ends the wait for them. The first event of a later epoch says that the
    instance has restarted, with nothing in its cache; those of earlier ones are passed over.

    Attributes:
        instance: whose cache it is.
        sequence: its number among the instance's events since it was started.
        stored: chains, each from its first block, all of whose blocks are there now. What lies
            after a hole in a chain is of no use to anybody and is left out.
        removed: keys, in any order.
        snapshot: whether ``stored`` is all that is there.
        epoch: which start of the instance it was, by a number that grows with each: a count, or
            the time. Where it is always the same, :meth:`Index.clear` has to tell of a restart.
    """

    instance: int
    sequence: int
    stored: tuple[tuple[int, ...], ...] = ()
    removed: tuple[int, ...] = ()
    snapshot: bool = False
    epoch: int = 0

    def __post_init__(self) -> None:
        """Check the numbers and the keys, so that an index that follows it can finish."""
        check_count("KVEvent", "instance", self.instance, 0)
        check_count("KVEvent", "sequence", self.sequence, 0)
        check_count("KVEvent", "epoch", self.epoch, 0)
        if not isinstance(self.stored, (tuple, list)):
            raise InvalidArgument(
                f"KVEvent: stored must be a tuple of chains of keys, got {self.stored!r:.80}"
            )
        for chain in self.stored:
            check_keys("KVEvent", "stored", chain)
        check_keys("KVEvent", "removed", self.removed)
