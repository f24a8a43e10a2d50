"""Blocks next to the engine's, for keys and values of kept prompts; copies to and from them."""

from collections.abc import Sequence

import torch

import mooncake_kernels as mk

from .block_allocator import BlockAllocator
from .kv_cache import PagedKVCache
from .llama import Llama


class RetainedBlocks:
    """Copy prompts' keys and values into blocks of its own, and out of these in another order.

    Args:
        model: whose rotary frequencies the keys have.
        cache: of the engine. The blocks have its layout, dtype, device and block size.
        num_blocks: how many.
    """

    def __init__(self, model: Llama, cache: PagedKVCache, num_blocks: int) -> None:
        self._cache = PagedKVCache(
            model.config,
            num_blocks,
            block_size=cache.block_size,
            axes=cache.axes,
            dtype=cache.dtype,
            device=cache.device,
        )
        self._allocator = BlockAllocator(self._cache.num_blocks)
        self._save = mk.CopyPlan(cache.view(), self._cache.view())
        rope = mk.Rope(inv_freq=model.weights.frequencies)
        self._load = mk.CopyPlan(self._cache.view(), cache.view(), rope=rope)

    @property
    def num_blocks(self) -> int:
        """Count the blocks."""
        return self._cache.num_blocks

    @property
    def num_free(self) -> int:
        """Count the blocks that hold no prompt."""
        return self._allocator.num_free

    @property
    def num_bytes(self) -> int:
        """Count the blocks' bytes."""
        return self._cache.num_bytes

    def num_blocks_for(self, num_tokens: int) -> int:
        """Count the blocks that a prompt needs."""
        return self._cache.num_blocks_for(num_tokens)

    def save(self, src_blocks: Sequence[int]) -> list[int]:
        """Copy whole blocks from the engine.

        Returns:
            The blocks, in order.

        Raises:
            OutOfBlocks: too few are free.
        """
        block_ids = self._allocator.allocate(len(src_blocks))
        try:
            self._save.run(list(src_blocks), block_ids)
        except BaseException:
            self._allocator.free(block_ids)
            raise
        return block_ids

    def free(self, block_ids: Sequence[int]) -> None:
        """Free blocks."""
        self._allocator.free(block_ids)

    def rearrange(
        self, src_blocks: Sequence[int], index: torch.Tensor, dst_blocks: Sequence[int]
    ) -> None:
        """Copy tokens' keys and values to the engine, keys turned to their new positions.

        Equivalent to::

            for position, kept in enumerate(index):
                if kept != -1:
                    copy token `kept` of src_blocks to token `position` of dst_blocks,
                    its keys rotated by position - kept

        Args:
            src_blocks: of these, in order.
            index: int64 ``[num_tokens]``, -1 for a token that is left as it is.
            dst_blocks: of the engine, in order.
        """
        positions = torch.arange(len(index), device=index.device)
        kept = index.clamp(min=0)
        self._load.run_slots(
            self._slots(src_blocks, kept).masked_fill(index < 0, -1),
            self._slots(dst_blocks, positions),
            src_positions=kept,
            dst_positions=positions,
        )

    def _slots(self, block_ids: Sequence[int], positions: torch.Tensor) -> torch.Tensor:
        block_size = self._cache.block_size
        blocks = torch.tensor(block_ids, dtype=torch.int64, device=positions.device)
        return blocks[positions // block_size] * block_size + positions % block_size
