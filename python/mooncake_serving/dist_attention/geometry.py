"""What a lender and a borrower must agree on: the shapes of queries, results and blocks."""

from dataclasses import dataclass
from typing import Protocol

import torch

from mooncake_kernels import KVView
from mooncake_kernels.errors import InvalidArgument

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BLOCK_AXES = "layer kv head token dim"  # of a block in transit: layouts of caches may differ


class Cache(Protocol):
    """A paged cache of one instance."""

    num_layers: int
    block_size: int
    dtype: torch.dtype

    def layer(self, layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one layer's keys and values, ``[block, token, kv_head, dim]``, any strides."""

    def view(self) -> KVView:
        """Describe the whole cache."""


@dataclass(frozen=True)
class Geometry:
    """Shapes of what moves between two instances; the weights are the borrower's own business.

    Attributes:
        num_layers, num_kv_heads, block_size, head_dim: of the cache.
        num_heads: of a query.
        max_rows: queries of one step.
        dtype: of queries, results and blocks.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    max_rows: int
    dtype: torch.dtype

    @classmethod
    def of(cls, cache: Cache, num_heads: int, max_rows: int) -> "Geometry":
        """Read the shapes of a cache.

        Raises:
            InvalidArgument: its dtype is none that queries can have.
        """
        if cache.dtype not in DTYPES:
            raise InvalidArgument(
                f"Geometry: cache must be float32, float16 or bfloat16, got {cache.dtype}"
            )
        k, _ = cache.layer(0)
        _, block_size, num_kv_heads, head_dim = k.shape
        return cls(
            cache.num_layers, num_heads, num_kv_heads, head_dim, block_size, max_rows, cache.dtype
        )

    def numbers(self) -> tuple[int, int, int, int, int, int, int]:
        """Return it as a message carries it."""
        sizes = (self.num_layers, self.num_heads, self.num_kv_heads, self.head_dim)
        return (*sizes, self.block_size, DTYPES.index(self.dtype), self.max_rows)

    def row_shape(self) -> tuple[int, int]:
        """Return the shape of one query, and of its result."""
        return self.num_heads, self.head_dim

    def block_shape(self) -> tuple[int, ...]:
        """Return the shape of one packed block, in the order of ``BLOCK_AXES``."""
        return self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim
