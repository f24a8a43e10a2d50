"""Masks as one bit per pair, FlashInfer's form. Public as ``mooncake_kernels.mask.packed``."""

from typing import TYPE_CHECKING, NamedTuple

import torch

from .. import _library
from .._engine import Engine, choose
from .._tensors import upload
from ..reference import mask as reference
from .batch import ChunkBatch
from .program import check_arguments, compile_rule
from .request_rows import refuse_unfit
from .rule import Rule

if TYPE_CHECKING:
    from .mask_rows import MaskRows


class PackedMask(NamedTuple):
    """A mask in FlashInfer's form (``packed_custom_mask`` and its ``mask_indptr``, 0.7).

    Pair (query i, key k) of request b is bit ``n % 8``, counted from the lowest, of byte
    ``indptr[b] + n // 8``, where ``n = i * kv_lens[b] + k``. Rows follow each other without a gap;
    each request begins at a byte boundary, and the spare bits of its last byte are 0.

    Attributes:
        packed: uint8 ``[indptr[-1]]``.
        indptr: int64 ``[num_requests + 1]``, so 2**31 pairs and more are supported.
    """

    packed: torch.Tensor
    indptr: torch.Tensor


def packed(rule: Rule, batch: ChunkBatch, *, engine: Engine = "auto") -> PackedMask:
    """Return the mask of any rule as bits, without an intermediate dense mask.

    For rules that ``mask.rows`` refuses; for others ``mask.rows(rule, batch).packed()`` gives the
    same, faster. On CUDA one launch on the current stream, without waiting.

    Args:
        rule: what is seen.
        batch: the queries and keys.
        engine: "host", "cuda", "reference" or "auto", by where the batch is.

    Raises:
        InvalidArgument: a parameter of the rule does not have one value per request, or a tree has
            more drafts than its request has keys.
        Unavailable: the named engine is not available.
    """
    check_arguments("mask.packed", rule, batch)
    program = compile_rule(rule, batch.kv_lens_list, batch.device)
    if choose("mask.packed", engine, batch.device) == "reference":
        return _packed_of(reference.dense(rule, batch), batch)
    indptr, words = _empty(batch)
    positions = None if batch.positions is None else batch.query_positions()
    lengths = (batch.cu_q, batch.kv_lens, positions, batch.num_q)
    _library.call(_library.mask_pack_rule, program.words, *lengths, indptr, words)
    return PackedMask(words[: _num_bytes(batch)], indptr)


def packed_rows(rows: "MaskRows", engine: str) -> PackedMask:
    """Return the bits of rows; see ``MaskRows.packed``."""
    batch = rows.batch
    refuse_unfit("mask.packed", rows.intervals[: batch.num_q])
    if choose("mask.packed", engine, batch.device) == "reference":
        return _packed_of(rows.dense(), batch)
    indptr, words = _empty(batch)
    form = (rows.intervals, rows.tail_bits, rows.tail_base, batch.cu_q, batch.kv_lens)
    _library.call(_library.mask_pack_rows, *form, indptr, words)
    return PackedMask(words[: _num_bytes(batch)], indptr)


def _sizes(batch: ChunkBatch) -> list[int]:
    lengths = zip(batch.q_lens_list, batch.kv_lens_list, strict=True)
    return [-(-q_len * kv_len // 8) for q_len, kv_len in lengths]


def _num_bytes(batch: ChunkBatch) -> int:
    return sum(_sizes(batch))


def _empty(batch: ChunkBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indptr, and memory in whole words."""
    sizes = torch.tensor([0, *_sizes(batch)], dtype=torch.int64, device="cpu")
    room = -(-int(sizes.sum()) // 4) * 4
    words = torch.empty(room, dtype=torch.uint8, device=batch.device)
    return upload("mask.packed: indptr", sizes.cumsum(0), batch.device), words


def _packed_of(masks: list[torch.Tensor], batch: ChunkBatch) -> PackedMask:
    indptr, words = _empty(batch)
    bytes_of = [reference.packed_bits(mask) for mask in masks]
    result = torch.cat([torch.zeros(0, dtype=torch.uint8, device="cpu"), *bytes_of])
    return PackedMask(result.to(words.device), indptr)
