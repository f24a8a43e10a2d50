"""Allocation of the blocks of a paged cache."""

from collections import Counter
from collections.abc import Iterable

from mooncake_kernels.errors import InvalidArgument

from .arguments import as_integer, as_integers, as_positive
from .errors import OutOfBlocks


class BlockAllocator:
    """Hand out block ids; a block is free again when all its holders have freed it.

    Not thread-safe: it belongs to one engine.

    Args:
        num_blocks: ids are ``0 .. num_blocks - 1``; all are free at first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks = as_positive("BlockAllocator", "num_blocks", num_blocks)
        self._free = list(range(num_blocks - 1, -1, -1))  # taken from the end: warm blocks first
        self._num_holders = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Count the blocks that can be allocated now."""
        return len(self._free)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take ``num_blocks`` free blocks, all or none; their contents are undefined.

        Raises:
            OutOfBlocks: fewer are free.
        """
        num_blocks = as_integer("allocate", "num_blocks", num_blocks)
        if num_blocks < 0:
            raise InvalidArgument(f"allocate: num_blocks must not be negative, got {num_blocks}")
        if num_blocks > len(self._free):
            raise OutOfBlocks(
                f"allocate: num_blocks must be at most the {len(self._free)} free blocks "
                f"of {self.num_blocks}, got {num_blocks}"
            )
        block_ids = [self._free.pop() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._num_holders[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a holder to each block; it takes one more ``free`` to free it.

        Raises:
            InvalidArgument: a block is not allocated; nothing was shared.
        """
        block_ids = self._check("share", block_ids)
        for block_id in block_ids:
            self._num_holders[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Drop one holder of each block.

        Raises:
            InvalidArgument: a block is not allocated, or is named more often than it is held;
                nothing was freed.
        """
        block_ids = self._check("free", block_ids)
        for block_id, count in Counter(block_ids).items():
            if count > self._num_holders[block_id]:
                raise InvalidArgument(f"free: block {block_id} is freed more often than it is held")
        for block_id in block_ids:
            self._num_holders[block_id] -= 1
            if not self._num_holders[block_id]:
                self._free.append(block_id)

    def is_allocated(self, block_id: int) -> bool:
        """Tell whether a block has a holder; False for an id that does not exist."""
        return self.num_holders(block_id) > 0

    def num_holders(self, block_id: int) -> int:
        """Count the holders of a block; 0 for an id that does not exist."""
        return self._num_holders[block_id] if 0 <= block_id < self.num_blocks else 0

    def _check(self, op: str, block_ids: Iterable[int]) -> list[int]:
        block_ids = as_integers(op, "block_ids", block_ids)
        for index, block_id in enumerate(block_ids):
            if not self.is_allocated(block_id):
                raise InvalidArgument(
                    f"{op}: block_ids[{index}] must be an allocated block, got {block_id}"
                )
        return block_ids
