"""How a step's keys are written and attended to: by the kernels, or on a GPU by torch.

For every request b and each of its queries i, at position kv_lens[b] - q_lens[b] + i::

    out[b, i] = softmax(q[b, i] @ k[b, : position + 1].T / sqrt(head_dim)) @ v[b, : position + 1]

Any layout of the cache gives the same bits.
"""

from typing import Protocol

import torch

import mooncake_kernels as mk

from .batch import Batch
from .sdpa_attention import SdpaAttention


class Attention(Protocol):
    """Made once per step, and used for every layer, in their order."""

    def append(
        self, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> None:
        """Write the batch's keys and values to its slots of one layer's cache.

        Args:
            k: ``[num_tokens, num_kv_heads, head_dim]``.
            v: the same.
            k_cache: ``[block, token, num_kv_heads, head_dim]``, with any strides.
            v_cache: the same.
        """

    def attend(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        """Attend to one layer's cache, which already has the batch's own keys.

        Args:
            q: ``[num_tokens, num_heads, head_dim]``.
            k_cache: as above.
            v_cache: as above.

        Returns:
            ``[num_tokens, num_heads, head_dim]``, q's dtype.
        """


class PagedAttention:
    """``mk.paged_attention``: the bits of a row depend only on its request.

    Args:
        batch: the step.
        selected: its queries are not a request's last tokens but those at ``batch.positions``.
    """

    def __init__(self, batch: Batch, *, selected: bool = False) -> None:
        device = batch.positions.device
        positions = batch.positions if selected else None
        step = mk.ChunkBatch(batch.q_lens, batch.kv_lens, positions, device=device)
        self._rows = mk.mask.rows(mk.mask.causal(), step)
        self._table = batch.block_tables.int()
        self._slots = batch.slots

    def append(
        self, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> None:
        mk.append_kv(k, v, k_cache, v_cache, self._slots)

    def attend(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        return mk.paged_attention(q, k_cache, v_cache, self._table, self._rows)[0]


def attention_of(batch: Batch, *, selected: bool = False) -> Attention:
    """Return the kernels on the CPU; torch on a GPU, where the kernels have never run."""
    if batch.positions.device.type == "cpu":
        return PagedAttention(batch, selected=selected)
    return SdpaAttention(batch)  # always by the batch's positions
