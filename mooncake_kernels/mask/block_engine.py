"""The computation of tile classes: the engine, and its outputs."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from .. import _library
from ..reference import mask_blocks as reference

if TYPE_CHECKING:
    from .mask_rows import MaskRows

Kind: TypeAlias = Literal["partial", "full", "any"]
BITS = {"partial": 1, "full": 2, "any": 3}  # csrc/mask/block_map.h


@dataclass(frozen=True)
class BlockCall:
    """The request: the tiles of which mask, and of which size."""

    rows: "MaskRows"
    block_q: int
    block_kv: int
    whole: bool
    num_q_blocks: int


@dataclass(frozen=True)
class TileList:
    """Where to write the tiles of a kind: those of q-block i to ``indices[begins[i]:]``.

    An empty ``begins`` means rows of equal width; tiles that do not fit are left out.
    """

    kind: Kind
    indices: torch.Tensor
    begins: torch.Tensor


def run(
    call: BlockCall,
    engine: str,
    *,
    cu_q_blocks: torch.Tensor | None = None,
    ranges: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    lists: tuple[TileList, ...] = (),
) -> None:
    """Fill the given tensors; on CUDA one launch on the current stream."""
    if engine == "reference":
        return reference.block_map(call, cu_q_blocks, ranges, counts, lists)
    rows, batch = call.rows, call.rows.batch
    form = (rows.intervals, rows.tail_bits, rows.tail_base, batch.cu_q, batch.kv_lens)
    _library.call(
        _library.mask_block_map,
        *(*form, call.block_q, call.block_kv, call.whole, call.num_q_blocks),
        *(cu_q_blocks, ranges, counts),
        [each.indices for each in lists],
        [each.begins for each in lists],
        [BITS[each.kind] for each in lists],
    )
