"""The blocks of an engine that lends: its own thread and the member's take them."""

import threading
from collections.abc import Iterable

from ...engine.block_allocator import BlockAllocator
from ...engine.errors import OutOfBlocks


class SharedAllocator(BlockAllocator):
    """A ``BlockAllocator`` that is thread-safe, and lends: a ``Blocks``."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._lock = threading.Lock()

    def allocate(self, num_blocks: int, into: list[int] | None = None) -> list[int]:
        """See ``BlockAllocator``."""
        with self._lock:
            return super().allocate(num_blocks, into)

    def share(self, block_ids: Iterable[int]) -> None:
        """See ``BlockAllocator``."""
        with self._lock:
            super().share(block_ids)

    def free(self, block_ids: Iterable[int]) -> None:
        """See ``BlockAllocator``."""
        with self._lock:
            super().free(block_ids)

    def free_all(self, held: list[int]) -> None:
        """See ``BlockAllocator``."""
        with self._lock:
            super().free_all(held)

    def complete(self) -> None:
        """See ``BlockAllocator``."""
        with self._lock:
            super().complete()

    def take(self, num_blocks: int) -> list[int] | None:
        """Take free blocks; None if there are too few."""
        try:
            return self.allocate(num_blocks)
        except OutOfBlocks:
            return None

    def take_up_to(self, num_blocks: int, at_least: int) -> list[int] | None:
        """Take as many of ``num_blocks`` as are free; None if those are fewer than ``at_least``."""
        with self._lock:
            count = min(num_blocks, self.num_free)
            return super().allocate(count) if count >= at_least else None

    def give_back(self, block_ids: list[int]) -> None:
        """Free blocks that were taken."""
        self.free(block_ids)
