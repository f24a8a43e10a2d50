"""Blocks beside the engine's, for keys and values of kept prompts; copies to and from them."""

from collections.abc import Sequence

import torch

import mooncake_kernels as mk

from .block_allocator import BlockAllocator
from .kv_cache import PagedKVCache
from .llama import Llama


class KeptPool:
    """Copy prompts' keys and values into a pool, and out of it in another order.

    Args:
        model: whose rotary frequencies the keys have.
        cache: of the engine. The pool has its layout, dtype, device and block size.
        num_blocks: of the pool.
    """

    def __init__(self, model: Llama, cache: PagedKVCache, num_blocks: int) -> None:
        self._pool = PagedKVCache(
            model.config,
            num_blocks,
            block_size=cache.block_size,
            axes=cache.axes,
            dtype=cache.dtype,
            device=cache.device,
        )
        self._allocator = BlockAllocator(self._pool.num_blocks)
        self._save = mk.CopyPlan(cache.view(), self._pool.view())
        rope = mk.Rope(inv_freq=model.weights.frequencies)
        self._load = mk.CopyPlan(self._pool.view(), cache.view(), rope=rope)

    @property
    def num_blocks(self) -> int:
        """Count the blocks of the pool."""
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        """Count the blocks that hold no prompt."""
        return self._allocator.num_free

    @property
    def num_bytes(self) -> int:
        """Count the pool's bytes."""
        return self._pool.num_bytes

    def num_blocks_for(self, num_tokens: int) -> int:
        """Count the blocks that a prompt needs."""
        return self._pool.num_blocks_for(num_tokens)

    def save(self, src_blocks: Sequence[int]) -> list[int]:
        """Copy whole blocks from the engine.

        Returns:
            The blocks of the pool, in order.

        Raises:
            OutOfBlocks: the pool has too few free ones.
        """
        block_ids = self._allocator.allocate(len(src_blocks))
        try:
            self._save.run(list(src_blocks), block_ids)
        except BaseException:
            self._allocator.free(block_ids)
            raise
        return block_ids

    def free(self, block_ids: Sequence[int]) -> None:
        """Free blocks of the pool."""
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
            src_blocks: of the pool, in order.
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
        block_size = self._pool.block_size
        blocks = torch.tensor(block_ids, dtype=torch.int64, device=positions.device)
        return blocks[positions // block_size] * block_size + positions % block_size
