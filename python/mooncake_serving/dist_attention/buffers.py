"""The registered memory through which a borrower and a lender exchange what they send.

Each side has one of either buffer for the other: a borrower sends from its ``RequestBuffer`` into
the lender's, and the lender from its ``ResultBuffer`` into the borrower's. The layouts are equal,
so that one address describes a buffer.
"""

import math

import torch

from mooncake_kernels.closeable import Closeable
from mooncake_kernels.transfer import TransferEngine

from ..rpc import Descriptors
from .geometry import Geometry

ALIGNMENT = 64


class _Buffer(Closeable):
    """Two arrays, one after the other, in memory that is registered."""

    def __init__(
        self,
        transfer: TransferEngine,
        arrays: list[tuple[tuple[int, ...], torch.dtype]],
        *,
        is_in: bool,
    ):
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in arrays]
        starts = [0, -(-sizes[0] // ALIGNMENT) * ALIGNMENT]
        memory = torch.zeros(starts[1] + sizes[1], dtype=torch.uint8)
        self._arrays = [
            memory[start : start + size].view(dtype).view(shape)
            for start, size, (shape, dtype) in zip(starts, sizes, arrays, strict=True)
        ]
        self._starts = starts
        self._region = transfer.register(memory, access="write" if is_in else "read")
        self.address = self._region.address

    def close(self) -> None:
        """Deregister the memory: nothing that is still under way lands in it."""
        self._region.close()

    def _descriptor(self, index: int, count: int, to: int) -> tuple[int, int, int]:
        start = self._starts[index]
        return self.address + start, to + start, self._arrays[index][:count].nbytes


class RequestBuffer(_Buffer):
    """What a borrower sends: queries, and packed blocks.

    Attributes:
        queries: ``[max_rows, num_heads, head_dim]``.
        staged: ``[num_staged, layer, kv, head, token, dim]``.
    """

    def __init__(
        self, transfer: TransferEngine, geometry: Geometry, num_staged: int, *, is_in: bool
    ):
        queries = (geometry.max_rows, *geometry.row_shape())
        blocks = (num_staged, *geometry.block_shape())
        super().__init__(
            transfer, [(queries, geometry.dtype), (blocks, geometry.dtype)], is_in=is_in
        )
        self.queries, self.staged = self._arrays

    def send_queries(self, num_rows: int, to: int) -> Descriptors:
        """Return what to write so that the peer's buffer at ``to`` has the first queries."""
        return [self._descriptor(0, num_rows, to)]

    def send_staged(self, num_blocks: int, to: int) -> Descriptors:
        """Return what to write so that the peer's buffer at ``to`` has the first blocks."""
        return [self._descriptor(1, num_blocks, to)]


class ResultBuffer(_Buffer):
    """What a lender sends: partial attention.

    Attributes:
        out: ``[max_rows, num_heads, head_dim]``.
        lse: float32 ``[max_rows, num_heads]``.
    """

    def __init__(self, transfer: TransferEngine, geometry: Geometry, *, is_in: bool):
        out = (geometry.max_rows, *geometry.row_shape())
        super().__init__(transfer, [(out, geometry.dtype), (out[:2], torch.float32)], is_in=is_in)
        self.out, self.lse = self._arrays

    def send(self, num_rows: int, to: int) -> Descriptors:
        """Return what to write so that the peer's buffer at ``to`` has the first rows of both."""
        return [self._descriptor(0, num_rows, to), self._descriptor(1, num_rows, to)]
