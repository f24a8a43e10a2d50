"""Packed blocks between a cache and the network: one registered buffer, allocated in rows."""

import torch

import mooncake_kernels as mk

from ..arguments import as_positive

AXES = "layer kv head token dim"  # of a block in transit: the layouts of the two caches differ


class StagingPool:
    """A host buffer ``[num_blocks, layer, kv, head, token, dim]``, allocated in contiguous rows.

    Rows of one request are adjacent, so that a request is one range to send and one packed buffer
    to scatter. First fit; the pool is only as large as the requests in flight.

    Args:
        view: the cache whose blocks pass through.
        num_blocks: rows.
    """

    def __init__(self, view: mk.KVView, num_blocks: int):
        num_blocks = as_positive("StagingPool", "num_blocks", num_blocks)
        self.view, self.num_blocks = view, num_blocks
        on_gpu = view.device.type == "cuda"
        shape = view.packed_shape(num_blocks, AXES)
        self.memory = torch.zeros(shape, dtype=view.dtype, pin_memory=on_gpu)
        self._free = [(0, num_blocks)]  # (first row, rows), in order, never touching

    def allocate(self, num_blocks: int) -> int | None:
        """Take adjacent rows and return the first one; None if too few are free now."""
        for i, (first, length) in enumerate(self._free):
            if length >= num_blocks:
                rest = (first + num_blocks, length - num_blocks)
                self._free[i : i + 1] = [rest] if rest[1] else []
                return first
        return None

    def free(self, first: int, num_blocks: int) -> None:
        """Free rows."""
        merged: list[tuple[int, int]] = []
        for start, length in sorted([*self._free, (first, num_blocks)]):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._free = merged

    def rows(self, first: int, num_blocks: int) -> torch.Tensor:
        """Return rows as a packed tensor, sharing memory."""
        return self.memory[first : first + num_blocks]

    def gather(self, block_ids: list[int], first: int) -> torch.Tensor:
        """Copy blocks of the cache into rows from ``first`` on; done when it returns."""
        rows = self.rows(first, len(block_ids))
        if self.view.device.type == "cpu":
            return mk.gather_blocks(self.view, block_ids, out=rows, axes=AXES)
        rows.copy_(mk.gather_blocks(self.view, block_ids, axes=AXES), non_blocking=True)
        torch.cuda.current_stream(self.view.device).synchronize()
        return rows

    def scatter(self, first: int, block_ids: list[int]) -> None:
        """Copy rows from ``first`` on into blocks of the cache; done when it returns."""
        rows = self.rows(first, len(block_ids))
        there = rows.to(self.view.device, non_blocking=True)
        mk.scatter_blocks(there, block_ids, self.view, axes=AXES)
        if self.view.device.type == "cuda":
            torch.cuda.current_stream(self.view.device).synchronize()
