"""The specification of block maps: tile classes from the dense mask."""

from itertools import groupby
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..mask.block_engine import BlockCall, TileList

EMPTY, PARTIAL, FULL = 0, 1, 2
CLASSES = {"partial": (PARTIAL,), "full": (FULL,), "any": (PARTIAL, FULL)}


def classes(call: "BlockCall") -> list[list[int]]:
    """Return the class of each tile of each q-block."""
    result = []
    for mask in call.rows.dense():
        for block in mask.split(call.block_q) if len(mask) else ():
            tiles = block.split(call.block_kv, dim=1) if mask.shape[1] else ()
            result.append([_class_of(call, tile) for tile in tiles])
    return result


def _class_of(call: "BlockCall", tile: torch.Tensor) -> int:
    if not tile.any():
        return EMPTY
    is_whole = tuple(tile.shape) == (call.block_q, call.block_kv)
    return FULL if tile.all() and (is_whole or not call.whole) else PARTIAL


def range_of(tiles: list[int]) -> tuple[int, int, int, int]:
    """Return ``(kv_begin, full_begin, full_end, kv_end)`` of one q-block."""
    visited = [tile for tile, kind in enumerate(tiles) if kind != EMPTY]
    if not visited:
        return 0, 0, 0, 0
    full_begin = full_end = visited[0]
    for is_full, group in groupby(enumerate(tiles), key=lambda entry: entry[1] == FULL):
        run = [tile for tile, _ in group]
        if is_full and len(run) > full_end - full_begin:
            full_begin, full_end = run[0], run[-1] + 1
    return visited[0], full_begin, full_end, visited[-1] + 1


def block_map(
    call: "BlockCall",
    cu_q_blocks: torch.Tensor | None,
    ranges: torch.Tensor | None,
    counts: torch.Tensor | None,
    lists: "tuple[TileList, ...]",
) -> None:
    """Fill the given tensors; see ``mask.block_engine.run``."""
    if cu_q_blocks is not None:
        blocks = [-(-q_len // call.block_q) for q_len in call.rows.batch.q_lens.tolist()]
        cu_q_blocks[1:] = torch.tensor(blocks, dtype=torch.int32, device="cpu").cumsum(0)
    for block, tiles in enumerate(classes(call)):
        if ranges is not None:
            ranges[block] = torch.tensor(range_of(tiles), device="cpu")
        if counts is not None:
            counts[block] = torch.tensor([tiles.count(PARTIAL), tiles.count(FULL)], device="cpu")
        for each in lists:
            chosen = [tile for tile, what in enumerate(tiles) if what in CLASSES[each.kind]]
            size, begin = len(each.indices), 0
            if len(each.begins):
                begin = int(each.begins[block])
            else:
                size //= call.num_q_blocks
                begin, chosen = block * size, chosen[:size]
            each.indices[begin : begin + len(chosen)] = torch.tensor(
                chosen, dtype=torch.int32, device="cpu"
            )
