"""Masks for FlashAttention-4: its block-sparse tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ..errors import InvalidArgument, shown
from .batch import INT32_MAX

if TYPE_CHECKING:
    from .block_map import BlockMap


class FlashAttn4Blocks(NamedTuple):
    """The fields of FlashAttention-4's ``BlockSparseTensorsTorch``, which takes them by name.

    ``BlockSparseTensorsTorch(**blocks._asdict())``. All tensors are int32. ``mask`` are the partial
    blocks, for which the kernel calls a ``mask_mod``; ``full`` those for which it does not.

    For ``B`` requests of equal length, ``M = ceil(q_len / block_q)``::

        cnt [B, 1, M]    idx [B, 1, M, N]    N: as many as the fullest row has

    Otherwise, with ``M_b`` and ``N_b`` blocks of request ``b``::

        cnt [1, cu_total_m_blocks[-1]]    row m of request b is cu_total_m_blocks[b] + m
        idx [1, sum(M_b * N_b)]           its list begins at cu_block_idx_offsets[b] + m * N_b
    """

    mask_block_cnt: torch.Tensor
    mask_block_idx: torch.Tensor
    full_block_cnt: torch.Tensor
    full_block_idx: torch.Tensor
    cu_total_m_blocks: torch.Tensor | None
    cu_block_idx_offsets: torch.Tensor | None
    block_size: tuple[int, int]


def to_flash_attn4(block_map: BlockMap, *, varlen: bool | None = None) -> FlashAttn4Blocks:
    """Return the lists of blocks for ``flash_attn_func`` or ``flash_attn_varlen_func``.

    Lists ascend, and indices count from the request's first key. A block that extends past the last
    key may be full: the kernel cuts off the first block it takes from either list, which is the
    last. Heads share the lists (a dimension of 1). Verified against flash-attn-4 4.0.0b36,
    ``flash_attn/cute/block_sparsity.py`` and ``block_sparse_utils.py``: there ``block_q`` must be a
    multiple of ``q_stage * tile_m`` (for varlen, equal to it), and ``block_kv`` must be ``tile_n``.
    The ``mask_mod`` for partial blocks is a function in CuTe's language and is not made here; its
    input is ``rows.intervals``.

    Args:
        block_map: the mask by blocks.
        varlen: which of the two forms; None for the first if all lengths are equal.

    Raises:
        InvalidArgument: the first form for requests of several lengths; or 2**31 entries or more.

    On CUDA this waits for the counts.
    """
    batch = block_map.rows.batch
    lengths = set(zip(batch.q_lens_list, batch.kv_lens_list, strict=True))
    if varlen is None:
        varlen = len(lengths) != 1
    if varlen:
        return _varlen(block_map)
    if len(lengths) != 1:
        raise InvalidArgument(
            "to_flash_attn4: varlen must be True for requests of several lengths, got "
            f"{shown(varlen)} and (q_len, kv_len) of {shown(sorted(lengths))}"
        )
    shape = (batch.num_requests, 1, -(-batch.q_lens_list[0] // block_map.block_q))
    there = slice(batch.num_requests * shape[2])  # the map may have spare rows
    partial, full = block_map.indices("partial"), block_map.indices("full")
    return FlashAttn4Blocks(
        block_map.num_partial[there].view(shape),
        partial[there].view(*shape, partial.shape[1]),
        block_map.num_full[there].view(shape),
        full[there].view(*shape, full.shape[1]),
        None,
        None,
        (block_map.block_q, block_map.block_kv),
    )


def _varlen(block_map: BlockMap) -> FlashAttn4Blocks:
    partial, offsets = block_map.varlen_indices("partial")
    full, _ = block_map.varlen_indices("full")
    if len(partial) > INT32_MAX:
        raise InvalidArgument(
            "to_flash_attn4: block_map must have less than 2**31 pairs of q-blocks and kv-blocks, "
            f"got {len(partial)}"
        )
    return FlashAttn4Blocks(
        block_map.num_partial[None],
        partial[None],
        block_map.num_full[None],
        full[None],
        block_map.cu_q_blocks,
        offsets.to(torch.int32),
        (block_map.block_q, block_map.block_kv),
    )
