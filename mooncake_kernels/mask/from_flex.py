"""Convert FlexAttention's ``BlockMask`` to rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .._arguments import as_instance
from ..errors import InvalidArgument
from .batch import ChunkBatch
from .from_dense import batch_of, build_rows
from .mask_rows import MaskRows

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def rows_from_flex(block_mask: BlockMask, batch: ChunkBatch | None = None) -> MaskRows:
    """Return the rows that see what ``flex_attention`` attends to under a ``BlockMask``.

    Query ``q`` sees key ``kv`` if their block is full, or partial and ``mask_mod`` says so.

    Args:
        block_mask: of one head (one for all), whose ``mask_mod`` is called with head 0.
        batch: whose mask this is, as one packed sequence (see ``to_flex``); None for one request
            per batch entry, with the queries at its end.

    Raises:
        InvalidArgument: several heads; lengths that differ from the batch's; a query that sees a
            key of another request; or a row that does not fit two intervals and 64 bits.

    It builds the dense mask. Verified against torch 2.13's source.
    """
    from torch.nn.attention.flex_attention import BlockMask

    op = "rows_from_flex"
    as_instance(op, "block_mask", block_mask, BlockMask, "a BlockMask")
    num_entries, num_heads = block_mask.kv_num_blocks.shape[:2]
    num_q, num_keys = block_mask.seq_lengths
    if num_heads != 1:
        raise InvalidArgument(f"{op}: block_mask must have one head, got {num_heads}")
    dense = _dense(block_mask, num_entries, num_q, num_keys)
    if batch is None:
        return build_rows(op, list(dense), batch_of(list(dense)))
    as_instance(op, "batch", batch, ChunkBatch, "a ChunkBatch")
    lengths = (1, batch.num_q, sum(batch.kv_lens_list))
    if (num_entries, num_q, num_keys) != lengths:
        raise InvalidArgument(
            f"{op}: block_mask must be of one entry, as many queries and as many keys as the batch "
            f"{lengths}, got {(num_entries, num_q, num_keys)}"
        )
    return build_rows(op, _unpacked(op, dense[0], batch), batch)


def _dense(block_mask: BlockMask, num_entries: int, num_q: int, num_keys: int) -> torch.Tensor:
    """Return which pairs are attended to, bool ``[num_entries, num_q, num_keys]``."""
    from torch.nn.attention.flex_attention import create_mask

    device = block_mask.kv_num_blocks.device
    mask = create_mask(block_mask.mask_mod, num_entries, 1, num_q, num_keys, device)[:, 0]
    lists = [(block_mask.kv_num_blocks, block_mask.kv_indices)]
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        lists.append((block_mask.full_kv_num_blocks, block_mask.full_kv_indices))
    num_blocks = -(-num_keys // block_mask.BLOCK_SIZE[1])
    partial, *full = (
        _pairs_of(_tiles(count[:, 0], indices[:, 0], num_blocks), block_mask.BLOCK_SIZE)
        for count, indices in lists
    )
    attended = partial[:, :num_q, :num_keys] & mask
    return attended | full[0][:, :num_q, :num_keys] if full else attended


def _tiles(count: torch.Tensor, indices: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Return which blocks are listed, bool ``[num_entries, q-blocks, num_blocks]``."""
    is_listed = torch.arange(indices.shape[-1], device=count.device) < count[..., None]
    listed = torch.where(is_listed, indices, num_blocks).long()
    tiles = is_listed.new_zeros(*count.shape, num_blocks + 1)
    return tiles.scatter_(-1, listed, True)[..., :num_blocks]


def _pairs_of(tiles: torch.Tensor, block_size: tuple[int, int]) -> torch.Tensor:
    return tiles.repeat_interleave(block_size[0], 1).repeat_interleave(block_size[1], 2)


def _unpacked(op: str, mask: torch.Tensor, batch: ChunkBatch) -> list[torch.Tensor]:
    masks, first_row, first_key = [], 0, 0
    for q_len, kv_len in zip(batch.q_lens_list, batch.kv_lens_list, strict=True):
        rows = mask[first_row : first_row + q_len]
        masks.append(rows[:, first_key : first_key + kv_len])
        strangers = (rows.sum(1) > masks[-1].sum(1)).nonzero()
        if strangers.numel():
            row = first_row + int(strangers[0])
            raise InvalidArgument(
                f"{op}: block_mask must let queries see keys of their own request only, got row "
                f"{row}, of request {len(masks) - 1}, which sees others"
            )
        first_row, first_key = first_row + q_len, first_key + kv_len
    return masks
