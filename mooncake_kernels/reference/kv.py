"""The specification of paged KV movement."""

from typing import Protocol

import torch

from .._bad_ids import BadIds
from .._layout import Selection

HOLE = -1


class Planes(Protocol):
    """A cache, as far as the specification needs one."""

    num_blocks: int

    def plane(self, layer: int, kv: int) -> torch.Tensor:
        """Return one layer's k or v as ``[block, head, token, dim]``."""


def copy_blocks(
    src: Planes,
    dst: Planes,
    selection: Selection,
    src_blocks: torch.Tensor | None,
    dst_blocks: torch.Tensor | None,
    bad: BadIds,
) -> None:
    """Copy blocks plane by plane; a side without ids takes its blocks in order."""
    src_ids = _ids(src_blocks, dst_blocks)
    dst_ids = _ids(dst_blocks, src_blocks)
    for side, ids, num_blocks in ((1, src_ids, src.num_blocks), (2, dst_ids, dst.num_blocks)):
        for index, block_id in enumerate(ids):
            if block_id != HOLE and not 0 <= block_id < num_blocks:
                raise bad.error(side, index, block_id)

    src_heads = slice(selection.src_head, selection.src_head + selection.num_heads)
    dst_heads = slice(selection.dst_head, selection.dst_head + selection.num_heads)
    with torch.inference_mode():  # caches that were made in it may only be written in it
        for src_block, dst_block in zip(src_ids, dst_ids, strict=True):
            if src_block == HOLE or dst_block == HOLE:
                continue
            for src_layer, dst_layer in selection.layers:
                for kv in range(selection.num_kv):
                    source = src.plane(src_layer, kv)[src_block, src_heads]
                    dst.plane(dst_layer, kv)[dst_block, dst_heads] = source


def _ids(ids: torch.Tensor | None, other: torch.Tensor | None) -> list[int]:
    if ids is not None:
        return ids.tolist()
    assert other is not None, "one side has ids"
    return list(range(other.numel()))
