"""Attention of a step some of whose keys are at other instances."""

from collections.abc import Sequence

import torch

import mooncake_kernels as mk

from ...engine.attention import PagedAttention
from ...engine.batch import Batch
from .. import Borrowed, Borrower, DistAttention


class DistPagedAttention(PagedAttention):
    """An ``Attention``: the kernels over this cache, merged with the lenders' parts.

    Args:
        batch: of the step.
        borrower: asks the lenders.
        loans: of each request of the batch.
    """

    def __init__(
        self, batch: Batch, borrower: Borrower, loans: Sequence[Sequence[Borrowed]]
    ) -> None:
        super().__init__(batch)
        self._elsewhere = DistAttention(borrower, batch.q_lens, loans)
        self._layer_index = 0  # of the next call

    def attend(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        def here(queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return mk.paged_attention(queries, k_cache, v_cache, self._table, self._rows)

        out, _ = self._elsewhere.attend(self._layer_index, q, here)
        self._layer_index += 1
        return out
