"""What an instance reports of its cache."""

from dataclasses import dataclass

from ..errors import InvalidArgument, check_count, check_keys


@dataclass(frozen=True, slots=True)
class KVEvent:
    """One change of an instance's cache, as engines publish them; events may be late or duplicated.

    An instance numbers its events 0, 1, 2, ... after each start, and ``epoch`` distinguishes its
    starts. An index applies them in that order: an early event is kept until those before it have
    arrived, and a duplicate is ignored. A snapshot replaces all earlier events of its epoch, and
    ends the wait for them. The first event of a later epoch means that the instance has restarted,
    with an empty cache; events of earlier epochs are ignored.

    Keys may also be in lists or arrays; with tuples, as declared, it can be compared and hashed.

    Attributes:
        instance: whose cache it is.
        sequence: its number among the instance's events since its start.
        stored: chains, each from its first block, all of whose blocks are there now. Blocks after a
            gap in a chain are useless and are left out.
        removed: keys, in any order.
        snapshot: whether ``stored`` is everything that is there.
        epoch: identifies a start of the instance by a number that grows: a counter, or the time. If
            it is always the same, a restart must be reported by :meth:`Index.clear`.
    """

    instance: int
    sequence: int
    stored: tuple[tuple[int, ...], ...] = ()
    removed: tuple[int, ...] = ()
    snapshot: bool = False
    epoch: int = 0

    def __post_init__(self) -> None:
        """Check the numbers and the keys, so that an index that applies the event cannot fail."""
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
