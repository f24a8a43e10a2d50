"""What a sender knows of the transfers that it offers, and of those who ask for them."""

from collections import deque
from dataclasses import dataclass, field

import torch

import mooncake_kernels as mk

from .messages import Ask

Pieces = dict[str, range]  # by group: places in the block table of the sender


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
    num_computed: int = 0
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

    def ids_of(self, pieces: Pieces) -> dict[str, list[int]] | None:
        """Return the blocks at these places; None if there is none at one of them."""
        ids = {name: [*self.block_ids[name][p.start : p.stop]] for name, p in pieces.items()}
        is_there = all(
            len(ids[name]) == len(places) and min(ids[name], default=0) >= 0
            for name, places in pieces.items()
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
    max_tokens: int = 0  # of a chunk
    next_token: int = 0  # of the groups that need all of the prefix
    tails: deque[Pieces] = field(default_factory=deque)  # of the others, at the end
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
    def num_available(self) -> int:
        """Tokens that are computed, and can be packed now."""
        transfer = self.transfer
        if transfer is None or transfer.is_paused:
            return 0
        stop = min(transfer.num_computed, self.ask.num_tokens)
        if stop < self.ask.num_tokens:
            stop -= stop % self.unit
        return max(0, stop - self.next_token)

    @property
    def num_ready(self) -> int:
        """Chunks that can be packed now."""
        transfer = self.transfer
        if transfer is None or transfer.is_paused or self.is_served:
            return 0
        count = -(-self.num_available // self.max_tokens) if self.max_tokens else 0
        return count + (len(self.tails) if transfer.num_computed >= self.ask.num_tokens else 0)

    def take(self, groups: mk.CacheGroups) -> Pieces:
        """Return the next chunk: of the groups that need all of the prefix first."""
        if count := min(self.num_available, self.max_tokens):
            first, stop = self.next_token, self.next_token + count
            self.next_token = stop
            return {
                name: range(first // group.tokens_per_block, -(-stop // group.tokens_per_block))
                for name, group in groups.items()
                if group.kind == "full"
            }
        return self.tails.popleft()
