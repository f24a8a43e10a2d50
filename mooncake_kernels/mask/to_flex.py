"""Masks for torch's FlexAttention: an exact ``BlockMask`` of full and partial blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..errors import InvalidArgument
from .batch import INT32_MAX
from .request_rows import TAIL_BITS, sees, sees_intervals

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from .block_map import BlockMap
    from .mask_rows import MaskRows

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def to_flex(block_map: BlockMap, *, compute_q_blocks: bool = False) -> BlockMask:
    """Return the mask for ``flex_attention``, eager or compiled: one batch entry, all heads.

    The requests are one packed sequence: row ``r`` of the batch is query ``r``, and key ``k`` of
    request ``b`` is at ``sum(kv_lens[:b]) + k``. So q is ``[1, heads, num_q, dim]``, and k and v
    are ``[1, heads, sum(kv_lens), dim]``. Blocks are those that ``create_block_mask`` would find
    for ``(block_q, block_kv)``: one that extends past the end is partial. FlexAttention's blocks
    lie on one grid, so those of a batch of several requests are not the map's: they are counted
    again, in ``num_q + num_blocks`` steps.

    Args:
        block_map: the mask and the sizes of blocks; for ``flex_attention`` on a GPU, 128.
        compute_q_blocks: whether to make the lists by key that a backward pass needs.

    Raises:
        InvalidArgument: 2**31 keys or more in all.

    Verified against torch 2.13, ``torch/nn/attention/flex_attention.py``. On CUDA this waits for
    the rows: ``mask_mod`` omits the tail bits if there are none.
    """
    from torch.nn.attention.flex_attention import BlockMask  # slow: not at package import

    rows, block_q, block_kv = block_map.rows, block_map.block_q, block_map.block_kv
    num_keys = sum(rows.batch.kv_lens_list)
    if num_keys > INT32_MAX:
        raise InvalidArgument(f"to_flex: kv_lens must sum to less than 2**31, got {num_keys}")
    if rows.batch.num_requests == 1 and rows.batch.num_q > 0:
        num_tiles = -(-num_keys // block_kv)
        whole = rows.block_map(block_q, block_kv, whole=True, width=num_tiles)
        num_partial, partial = whole.num_partial, whole.partial_indices
        num_full, full = whole.num_full, whole.full_indices
    else:
        pairs = _seen_pairs(rows, num_keys, block_q, block_kv)
        is_full = pairs == block_q * block_kv
        num_partial, partial = _ordered((pairs > 0) & ~is_full)
        num_full, full = _ordered(is_full)
    return BlockMask.from_kv_blocks(
        num_partial[None, None],
        partial[None, None],
        num_full[None, None],
        full[None, None],
        BLOCK_SIZE=(block_q, block_kv),
        mask_mod=mask_mod_of(rows),
        seq_lengths=(rows.batch.num_q, num_keys),
        compute_q_blocks=compute_q_blocks,
    )


def mask_mod_of(rows: MaskRows) -> MaskMod:
    """Return FlexAttention's predicate for the packed sequence, which looks up the rows."""
    lo0, hi0, lo1, hi1, tail_bits, tail_base = _packed_columns(rows)

    def sees_by_intervals(
        b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor
    ) -> torch.Tensor:
        return sees_intervals(lo0[q], hi0[q], lo1[q], hi1[q], kv)

    def sees_by_rows(
        b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor
    ) -> torch.Tensor:
        return sees(lo0[q], hi0[q], lo1[q], hi1[q], tail_bits[q], tail_base[q], kv)

    return sees_by_rows if bool(tail_bits.any()) else sees_by_intervals


def _packed_columns(rows: MaskRows) -> list[torch.Tensor]:
    """Return the rows as six columns, ``[num_q]``, with all requests' keys as one sequence."""
    request = rows.batch.request_of()
    first_key = (rows.batch.kv_lens.cumsum(0) - rows.batch.kv_lens)[request].to(torch.int32)
    there = slice(rows.batch.num_q)  # a MaskBuilder may have spare rows
    edges = [(edge + first_key).contiguous() for edge in rows.intervals[there].unbind(1)]
    return [*edges, rows.tail_bits[there], rows.tail_base[request] + first_key]


def _seen_pairs(rows: MaskRows, num_keys: int, block_q: int, block_kv: int) -> torch.Tensor:
    """Count the seen pairs in each block, int64 ``[q-blocks, kv-blocks]``.

    A run of keys is the keys before its end minus those before its begin. The keys before an edge
    are ``block_kv`` pairs in each block left of the edge's, and the rest in that one: a sum from
    the right.
    """
    lo0, hi0, lo1, hi1, tail_bits, tail_base = _packed_columns(rows)
    bits = torch.arange(TAIL_BITS, device=tail_bits.device)
    tail_row, bit = ((tail_bits[:, None] >> bits) & 1).nonzero().unbind(1)
    tail_key = tail_base[tail_row] + bit
    row = torch.arange(rows.batch.num_q, device=tail_bits.device)
    q_block = torch.cat([row, row, tail_row]) // block_q
    begin, end = torch.cat([lo0, lo1, tail_key]), torch.cat([hi0, hi1, tail_key + 1])

    num_blocks = (-(-rows.batch.num_q // block_q), -(-num_keys // block_kv))
    steps = q_block.new_zeros(num_blocks[0], num_blocks[1] + 2)  # step t + 1 belongs to block t
    for edge, sign in ((end, 1), (begin, -1)):
        block, rest = edge // block_kv, edge % block_kv
        steps.index_put_((q_block, block + 1), (sign * rest).long(), accumulate=True)
        steps.index_put_((q_block, block), (sign * (block_kv - rest)).long(), accumulate=True)
    return steps.flip(1).cumsum(1).flip(1)[:, 1:-1]


def _ordered(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many tiles each row has, and which: those first, ascending, then the others."""
    order = tiles.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return tiles.sum(1, dtype=torch.int32), order.to(torch.int32)
