"""What a sender knows of the transfers that it offers, and of those who ask for them."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

import mooncake_kernels as mk

from .messages import MAX_WANTS, Ask
from .strips import NOTHING, START, Computed, Cursor

Places = dict[str, range]  # by group: in the block table of the sender


class Piece(NamedTuple):
    """What one write carries.

    Attributes:
        places: the blocks.
        layers: of these; None: all.
    """

    places: Places
    layers: range | None = None


@dataclass(eq=False)
class Reception:
    """What an engine that receives a transfer has asked for, all its ranks together.

    Attributes:
        num_ranks: that ask.
        done: those that need it no longer.
        has_failed: whether it cannot be complete any more.
    """

    num_ranks: int
    done: set[str] = field(default_factory=set)
    has_failed: bool = False

    @property
    def is_complete(self) -> bool:
        return len(self.done) >= self.num_ranks


@dataclass(eq=False)
class Transfer:
    """A request that is offered, and its blocks so far."""

    transfer_id: str
    digest: bytes
    num_tokens: int
    block_ids: dict[str, list[int]] = field(default_factory=dict)
    computed: Computed = NOTHING
    after: torch.cuda.Event | None = None
    is_paused: bool = False
    num_packing: int = 0  # threads that read its blocks
    receptions: dict[str, Reception] = field(default_factory=dict)  # by receiving engine
    is_unwanted: bool = False  # no one will ask for it
    asks: list["Demand"] = field(default_factory=list)
    computed_s: float | None = None  # when all of it was computed
    is_released: bool = False  # no one needs its blocks any more

    @property
    def is_handed_over(self) -> bool:
        """Whether an engine has all of it, and none is still to ask for a part."""
        is_over = [one.is_complete or one.has_failed for one in self.receptions.values()]
        return all(is_over) and any(one.is_complete for one in self.receptions.values())

    def ids_of(self, places: Places) -> dict[str, list[int]] | None:
        """Return the blocks at these places; None if there is none at one of them."""
        ids = {name: [*self.block_ids[name][p.start : p.stop]] for name, p in places.items()}
        is_there = all(
            len(ids[name]) == len(of_group) and min(ids[name], default=0) >= 0
            for name, of_group in places.items()
        )
        return ids if is_there else None

    @property
    def is_needed(self) -> bool:
        """Whether a thread reads its blocks, or will."""
        return self.num_packing > 0 or any(not ask.is_over for ask in self.asks)


@dataclass(eq=False)
class Demand:
    """What one receiver rank wants of a transfer."""

    peer: str
    ask: Ask
    started_s: float
    heard_s: float
    transfer: Transfer | None = None
    reception: Reception | None = None  # that of its engine, once it has a transfer
    unit: int = 1  # tokens, of which chunks begin at multiples
    num_strips: int = 1  # of the cache
    tokens_of: Callable[[int], int] = int  # that fit in a slot, of so many strips
    cursor: Cursor = START  # of the groups that need all of the prefix
    tails: deque[Places] = field(default_factory=deque)  # of the others, at the end
    num_wanted: int = 0  # slots
    slots: deque[tuple[int, int]] = field(default_factory=deque)  # granted: number, address
    num_in_flight: int = 0
    moved_s: float = 0.0  # when a chunk was last on its way, or none was ready
    is_served: bool = False  # all of it was packed
    reason: str | None = None  # why it is over

    @property
    def key(self) -> tuple[str, int]:
        return self.peer, self.ask.number

    @property
    def is_over(self) -> bool:
        """Whether no chunk of it will be packed any more."""
        return self.is_served or self.reason is not None

    @property
    def num_ready(self) -> int:
        """Count the pieces that can be packed now, up to ``MAX_WANTS``."""
        if self.transfer is None or self.is_served:
            return 0
        count, step = 0, self._next(self.cursor)
        while step is not None and count < MAX_WANTS:
            count, step = count + 1, self._next(step[-1])
        return count + (len(self.tails) if self._has_all else 0)

    def take(self, groups: mk.CacheGroups, strips: Sequence[range]) -> Piece:
        """Return the next piece: of the groups that need all of the prefix first.

        Args:
            groups: the cache.
            strips: of its layers.
        """
        if (step := self._next(self.cursor)) is None:
            return Piece(self.tails.popleft())
        tokens, taken, self.cursor = step
        places = {
            name: range(tokens.start // size, -(-tokens.stop // size))
            for name, group in groups.items()
            if group.kind == "full"
            for size in [group.tokens_per_block]
        }
        if len(taken) == len(strips):
            return Piece(places)
        return Piece(places, range(strips[taken.start].start, strips[taken.stop - 1].stop))

    @property
    def _has_all(self) -> bool:
        transfer = self.transfer
        return (
            transfer is not None
            and not transfer.is_paused
            and transfer.computed.num_tokens >= self.ask.num_tokens
        )

    def _next(self, cursor: Cursor) -> tuple[range, range, Cursor] | None:
        transfer = self.transfer
        if transfer is None or transfer.is_paused:
            return None
        num_tokens, ahead, num_strips = transfer.computed
        computed = Computed(self._whole(num_tokens), self._whole(ahead), num_strips)
        return cursor.next(computed, self.num_strips, self.tokens_of)

    def _whole(self, num_tokens: int) -> int:
        """Return the tokens, of those computed, whose blocks are whole on both sides."""
        if num_tokens >= self.ask.num_tokens:
            return self.ask.num_tokens
        return num_tokens - num_tokens % self.unit
