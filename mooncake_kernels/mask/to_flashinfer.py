"""Masks for FlashInfer's block-sparse attention: its tiles, and the mask within them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from .._arguments import as_integer
from ..errors import InvalidArgument, shown
from .batch import INT32_MAX
from .request_rows import sees

if TYPE_CHECKING:
    from .block_map import BlockMap


class FlashInferBlocks(NamedTuple):
    """Arguments of FlashInfer's ``BlockSparseAttentionWrapper.plan``, which takes them by name.

    ``plan(**blocks._asdict(), num_qo_heads=..., num_kv_heads=..., head_dim=...)``. Row i of blocks
    is ``q[i * R : (i + 1) * R]``, and block j ``k[j * C : (j + 1) * C]``.
    """

    indptr: torch.Tensor  # int32 [ceil(M / R) + 1]
    indices: torch.Tensor  # int32 [indptr[-1]]
    M: int
    N: int
    R: int
    C: int
    mask: torch.Tensor | None  # bool [indptr[-1], R, C]; None: all pairs are seen


def to_flashinfer(
    block_map: BlockMap, block_table: torch.Tensor | None = None, *, num_blocks: int | None = None
) -> FlashInferBlocks:
    """Return the tiles that are not empty, and which of their pairs are seen.

    FlashInfer has one list of tiles and, if any is partial, a mask of each. It packs the mask into
    bits itself. Verified against FlashInfer 0.7.2, ``flashinfer/sparse.py``: of its backends, "fa2"
    and "auto" take a mask.

    Args:
        block_map: the mask by blocks.
        block_table: the locations of the keys in ``k_cache.flatten(0, 1)``, in blocks of
            ``block_kv`` keys; as in ``physical_bsr``. None: requests are stored consecutively, each
            padded to whole blocks, so that a request with whole blocks has no padding.
        num_blocks: of the cache; required with a table.

    Raises:
        InvalidArgument: a request other than the last has a number of queries that is not a
            multiple of ``block_q`` (all rows of blocks but the last must be full); or as in
            ``physical_bsr``.

    On CUDA this waits for the lists.
    """
    op = "to_flashinfer"
    batch = block_map.rows.batch
    with_queries = [(b, q_len) for b, q_len in enumerate(batch.q_lens_list) if q_len]
    for request, q_len in with_queries[:-1]:
        if q_len % block_map.block_q:
            raise InvalidArgument(
                f"{op}: block_q must divide the queries of all requests but the last, got "
                f"{block_map.block_q} and {q_len} of request {request}"
            )
    if (block_table is None) != (num_blocks is None):
        raise InvalidArgument(
            f"{op}: block_table and num_blocks must be given together, or neither, got "
            f"{shown(block_table)} and {shown(num_blocks)}"
        )
    if block_table is None:
        tiles = block_map.num_kv_blocks
        indptr, indices = block_map.bsr()
        request_of = torch.repeat_interleave(block_map.request_of(), block_map.work, dim=0)
        indices = indices + (torch.cumsum(tiles, 0) - tiles).to(torch.int32)[request_of]
        num_blocks = sum(-(-kv_len // block_map.block_kv) for kv_len in batch.kv_lens_list)
    else:
        indptr, indices = block_map.physical_bsr(block_table, num_blocks=num_blocks)
    num_keys = as_integer(op, "N", (num_blocks or 0) * block_map.block_kv, 0, INT32_MAX)
    mask = tile_masks(block_map)
    there = -(-batch.num_q // block_map.block_q)  # the map may have spare rows
    return FlashInferBlocks(
        indptr[: there + 1],
        indices,
        batch.num_q,
        num_keys,
        block_map.block_q,
        block_map.block_kv,
        None if bool(mask.all()) else mask,
    )


def tile_masks(block_map: BlockMap) -> torch.Tensor:
    """Return which pairs of each tile are seen: bool ``[tiles, block_q, block_kv]``.

    The tiles are those of ``block_map.bsr()``, in its order. Pairs past the last query or key of a
    request are not seen.
    """
    rows, device = block_map.rows, block_map.ranges.device
    _, tiles = block_map.bsr()
    blocks = torch.arange(block_map.num_q_blocks, device=device)
    block = torch.repeat_interleave(blocks, block_map.work)
    request = block_map.request_of()[block]
    first_row = (block - block_map.cu_q_blocks[request]) * block_map.block_q
    row = first_row[:, None] + torch.arange(block_map.block_q, device=device)
    is_row = row < rows.batch.q_lens[request][:, None]
    row = torch.where(is_row, row + rows.batch.cu_q[request][:, None], 0)
    keys = torch.arange(block_map.block_kv, device=device)
    key = tiles[:, None, None].to(torch.int64) * block_map.block_kv + keys
    lo0, hi0, lo1, hi1 = rows.intervals[row][:, :, :, None].unbind(2)
    tail_bits, tail_base = rows.tail_bits[row][:, :, None], rows.tail_base[request][:, None, None]
    seen = sees(lo0, hi0, lo1, hi1, tail_bits, tail_base, key)
    in_request = is_row[:, :, None] & (key < rows.batch.kv_lens[request][:, None, None])
    return seen & in_request
