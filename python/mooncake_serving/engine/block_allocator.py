"""Allocation of the blocks of a paged cache."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mooncake_kernels.errors import InvalidArgument

from ..arguments import as_integer
from .arguments import as_integers, as_positive
from .errors import OutOfBlocks


class _Change(NamedTuple):
    """What an allocator is to be after a change: to set it again alters nothing."""

    num_holders: dict[int, int]  # of the blocks concerned
    num_kept: int  # of the list of free blocks
    freed: Sequence[int] = ()  # what follows there
    held: list[int] | None = None  # of a holder
    contents: Sequence[int] = ()  # of that list


class BlockAllocator:
    """Hand out block ids; a block is free again when all its holders have freed it.

    Not thread-safe: it belongs to one engine. A change that Ctrl-C interrupts has either not begun,
    or is completed by the next call.

    Args:
        num_blocks: ids are ``0 .. num_blocks - 1``; all are free at first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks = as_positive("BlockAllocator", "num_blocks", num_blocks)
        self._free = list(range(num_blocks - 1, -1, -1))  # taken from the end: warm blocks first
        self._num_holders = [0] * num_blocks
        self._change: _Change | None = None  # until it is complete

    @property
    def num_free(self) -> int:
        """Count the blocks that can be allocated now."""
        return len(self._free)

    def allocate(self, num_blocks: int, into: list[int] | None = None) -> list[int]:
        """Take ``num_blocks`` free blocks, all or none; their contents are undefined.

        Args:
            num_blocks: how many.
            into: a list for them, whose contents they replace: even Ctrl-C leaves no block that is
                taken but not in the list.

        Returns:
            The list, or a new one.

        Raises:
            OutOfBlocks: fewer are free.
        """
        self._complete()
        num_blocks = as_integer("allocate", "num_blocks", num_blocks)
        if num_blocks < 0:
            raise InvalidArgument(f"allocate: num_blocks must not be negative, got {num_blocks}")
        if num_blocks > len(self._free):
            raise OutOfBlocks(
                f"allocate: num_blocks must be at most the {len(self._free)} free blocks "
                f"of {self.num_blocks}, got {num_blocks}"
            )
        block_ids = [] if into is None else into
        kept = len(self._free) - num_blocks
        taken = self._free[kept:][::-1]
        self._change = _Change(dict.fromkeys(taken, 1), kept, [], block_ids, taken)
        self._complete()
        return block_ids

    def allocate_for(self, token_ids: Sequence[int], num_blocks: int, into: list[int]) -> int:
        """Take the blocks of a request, see ``allocate``; here all of its tokens are to compute.

        Returns:
            How many tokens at its beginning have their keys and values there: 0.
        """
        self.allocate(num_blocks, into)
        return 0

    def keep(self, token_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        """Note what blocks contain, for requests that begin alike; here it is forgotten."""

    def mark_approximate(self, block_ids: Sequence[int]) -> None:
        """Note that allocated blocks are to hold keys and values that ``keep`` must not keep: nor
        those behind them, which are computed from these. Forgotten when they are free again.
        """

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a holder to each block; it takes one more ``free`` to free it.

        Raises:
            InvalidArgument: a block is not allocated; nothing was shared.
        """
        self._complete()
        counts = Counter(self._check("share", block_ids))
        holders = {block_id: self._num_holders[block_id] + n for block_id, n in counts.items()}
        self._change = _Change(holders, len(self._free))
        self._complete()

    def free(self, block_ids: Iterable[int]) -> None:
        """Drop one holder of each block.

        Raises:
            InvalidArgument: a block is not allocated, or is named more often than it is held;
                nothing was freed.
        """
        self._complete()
        self._drop(block_ids, None)

    def free_all(self, held: list[int]) -> None:
        """Drop one holder of each block in a list, and empty the list: see ``free``.

        Even Ctrl-C leaves no block in the list that is free, nor one that is not and has left it.
        """
        self._complete()
        self._drop(held, held)

    def _drop(self, block_ids: Iterable[int], held: list[int] | None) -> None:
        counts = Counter(self._check("free", block_ids))
        holders = {block_id: self._num_holders[block_id] - n for block_id, n in counts.items()}
        for block_id, left in holders.items():
            if left < 0:
                raise InvalidArgument(f"free: block {block_id} is freed more often than it is held")
        freed = [block_id for block_id, left in holders.items() if not left]
        self._change = _Change(holders, len(self._free), freed, held)
        self._complete()

    def is_allocated(self, block_id: int) -> bool:
        """Tell whether a block has a holder; False for an id that does not exist."""
        return self.num_holders(block_id) > 0

    def num_holders(self, block_id: int) -> int:
        """Count the holders of a block; 0 for an id that does not exist."""
        return self._num_holders[block_id] if 0 <= block_id < self.num_blocks else 0

    def complete(self) -> None:
        """Complete a change that was interrupted; other calls do so, too."""
        self._complete()

    def _complete(self) -> None:
        """Make the change that was begun, all of it; again, if that was interrupted."""
        if (change := self._change) is not None:
            for block_id, count in change.num_holders.items():
                self._num_holders[block_id] = count
            self._free[change.num_kept :] = change.freed
            if change.held is not None:
                change.held[:] = change.contents
            self._change = None

    def _check(self, op: str, block_ids: Iterable[int]) -> list[int]:
        block_ids = as_integers(op, "block_ids", block_ids)
        for index, block_id in enumerate(block_ids):
            if not self.is_allocated(block_id):
                raise InvalidArgument(
                    f"{op}: block_ids[{index}] must be an allocated block, got {block_id}"
                )
        return block_ids
