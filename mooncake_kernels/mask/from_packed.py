"""Convert FlashInfer's packed bits to rows."""

from itertools import accumulate

import torch

from .._arguments import as_instance
from ..errors import InvalidArgument, shown
from .batch import ChunkBatch
from .from_dense import build_rows
from .mask_rows import MaskRows
from .packed import PackedMask


def rows_from_packed(mask: PackedMask, batch: ChunkBatch) -> MaskRows:
    """Return the rows that see what packed bits say: the inverse of ``MaskRows.packed``.

    Args:
        mask: the bits and where each request's begin; ``PackedMask`` gives the layout.
        batch: whose masks these are.

    Raises:
        InvalidArgument: a tensor has another type or shape, or a row does not fit two intervals
            and 64 bits.

    It builds the dense mask; on CUDA it waits for the bits.
    """
    op = "rows_from_packed"
    packed, indptr = as_instance(op, "mask", mask, PackedMask, "a PackedMask")
    for name, tensor in (("packed", packed), ("indptr", indptr)):
        as_instance(op, f"mask.{name}", tensor, torch.Tensor, "a tensor")
    as_instance(op, "batch", batch, ChunkBatch, "a ChunkBatch")
    q_lens, kv_lens = batch.q_lens_list, batch.kv_lens_list
    if packed.dtype != torch.uint8 or packed.dim() != 1:
        raise InvalidArgument(
            f"{op}: mask.packed must be uint8 of one dimension, got {shown(packed.dtype)} of shape "
            f"{tuple(packed.shape)}"
        )
    sizes = [-(-q_len * kv_len // 8) for q_len, kv_len in zip(q_lens, kv_lens, strict=True)]
    begins = [0, *accumulate(sizes)]
    if indptr.tolist() != begins or begins[-1] > len(packed):
        raise InvalidArgument(
            f"{op}: mask.indptr must be the sums of ceil(q_len * kv_len / 8), {shown(begins)}, "
            f"within the {len(packed)} bytes of mask.packed, got {shown(indptr.tolist())}"
        )
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    masks = []
    for begin, size, q_len, kv_len in zip(begins, sizes, q_lens, kv_lens, strict=False):
        bits = packed[begin : begin + size, None] >> shifts & 1
        masks.append(bits.view(-1)[: q_len * kv_len].view(q_len, kv_len).bool())
    return build_rows(op, masks, batch)
