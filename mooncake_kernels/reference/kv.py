"""The specification of paged KV movement."""

import ctypes
from collections.abc import Iterator
from itertools import product
from typing import Protocol

import torch

from ..bad_ids import BAD_CHECKSUM, BadIds
from ..kv.layout import Selection
from ..kv.row_plan import RowCall, RowPlan
from .kv_rows import checksum, transformed, words_of

HOLE = -1


class Planes(Protocol):
    """A cache, as far as the specification depends on it."""

    num_blocks: int

    def plane(self, layer: int, kv: int) -> torch.Tensor:
        """Return one layer's k or v as ``[block, head, token, dim]``."""


def copy_blocks(
    src: Planes,
    dst: Planes,
    selection: Selection,
    src_ids: torch.Tensor | None,
    dst_ids: torch.Tensor | None,
    bad: BadIds,
) -> None:
    """Copy the tokens that src's ids name, in order, to the places that dst's ids name.

    A side without ids takes its blocks in order. Ids of blocks name each of a block's tokens.
    """
    src_list, dst_list = _ids(src_ids, dst_ids), _ids(dst_ids, src_ids)
    src_places = _places(1, src_list, src, selection.by_slot, bad)
    dst_places = _places(2, dst_list, dst, selection.by_slot, bad)
    pairs = [  # up to the shorter side
        (src_place, dst_place)
        for src_place, dst_place in zip(src_places, dst_places, strict=False)
        if HOLE not in (src_place[0], dst_place[0])
    ]
    src_heads = slice(selection.src_head, selection.src_head + selection.num_heads)
    dst_heads = slice(selection.dst_head, selection.dst_head + selection.num_heads)
    with torch.inference_mode():  # caches made in inference mode may be written only in it
        for src_layer, dst_layer in selection.layers:
            for kv in range(selection.num_kv):
                source, target = src.plane(src_layer, kv), dst.plane(dst_layer, kv)
                for (src_block, src_token), (dst_block, dst_token) in pairs:
                    row = source[src_block, src_heads, src_token]
                    target[dst_block, dst_heads, dst_token] = row


def transform_blocks(
    src: Planes,
    dst: Planes,
    plan: RowPlan,
    src_ids: torch.Tensor,
    dst_ids: torch.Tensor,
    call: RowCall,
    bad: BadIds,
) -> None:
    """Copy like ``copy_blocks``, row by row, applying the plan's transforms."""
    selection, first = plan.selection, plan.first_words[1]
    src_places = _places(1, src_ids.tolist(), src, selection.by_slot, bad)
    dst_places = _places(2, dst_ids.tolist(), dst, selection.by_slot, bad)
    one = torch.ones((), device="cpu")
    src_size, dst_size = (_tokens_per_id(cache, selection.by_slot) for cache in (src, dst))
    pairs = [
        HOLE not in (src_place[0], dst_place[0])
        for src_place, dst_place in zip(src_places, dst_places, strict=False)
    ]
    _check_sums(call, src_ids, src_size, pairs, bad)
    with torch.inference_mode():
        for i, copied in enumerate(pairs):
            if not copied:
                continue
            (src_block, src_token), (dst_block, dst_token) = src_places[i], dst_places[i]
            delta = 0
            if call.src_positions is not None and call.dst_positions is not None:
                src_position = int(call.src_positions[i // src_size]) + i % src_size
                delta = int(call.dst_positions[i // dst_size]) + i % dst_size - src_position
            written = []
            for row, layers, kv, head in _rows(selection):
                source = src.plane(layers[0], kv)[src_block, selection.src_head + head, src_token]
                target = dst.plane(layers[1], kv)[dst_block, selection.dst_head + head, dst_token]
                scale = one if plan.scales is None else plan.scales.flatten()[row].to(source.device)
                rope = plan.rope if kv == 0 else None
                target.copy_(transformed(source, target.dtype, scale, rope, delta))
                word = words_of(target.nbytes) * (row * dst_size + i % dst_size)
                written.append((first + word, target))
            if call.sums is not None:
                call.sums[i // dst_size] += checksum(written)


def add_checksums(
    view: Planes, plan: RowPlan, ids: torch.Tensor, sums: torch.Tensor, bad: BadIds
) -> None:
    """Add to each of ``sums`` the checksum of what the plan reads of a block."""
    selection, first = plan.selection, plan.first_words[0]
    places = _places(1, ids.tolist(), view, selection.by_slot, bad)
    size = _tokens_per_id(view, selection.by_slot)
    for i, (block, offset) in enumerate(places):
        rows = []
        for row, layers, kv, head in _rows(selection):
            if block != HOLE:
                source = view.plane(layers[0], kv)[block, selection.src_head + head, offset]
                rows.append((first + words_of(source.nbytes) * (row * size + i % size), source))
        sums[i // size] += checksum(rows)


def _rows(selection: Selection) -> Iterator[tuple[int, tuple[int, int], int, int]]:
    """Yield the number, (src, dst) layer, kv and head of each row of a token."""
    for number, (layers, kv, head) in enumerate(
        product(selection.layers, range(selection.num_kv), range(selection.num_heads))
    ):
        yield number, layers, kv, head


def _tokens_per_id(cache: Planes, by_slot: bool) -> int:
    return 1 if by_slot else cache.plane(0, 0).shape[2]


def _check_sums(
    call: RowCall, src_ids: torch.Tensor, src_size: int, pairs: list[bool], bad: BadIds
) -> None:
    """Refuse checksum mismatches of the blocks from which a token is copied."""
    if call.expected is None or call.actual is None:
        return
    wrong = (call.expected != call.actual).tolist()
    for index, copied in enumerate(pairs):
        if copied and wrong[index // src_size]:
            raise bad.error(BAD_CHECKSUM, index // src_size, int(src_ids[index // src_size]))


def copy_batch(src_ptrs: torch.Tensor, dst_ptrs: torch.Tensor, sizes: torch.Tensor) -> None:
    """Copy ``sizes[i]`` bytes from address ``src_ptrs[i]`` to ``dst_ptrs[i]``, in host memory."""
    lists = (src_ptrs.tolist(), dst_ptrs.tolist(), sizes.tolist())
    for src, dst, size in zip(*lists, strict=True):
        ctypes.memmove(dst, src, size)


def _places(
    side: int, ids: list[int], cache: Planes, by_slot: bool, bad: BadIds
) -> list[tuple[int, int]]:
    """Return (block, token in it) of every token that the ids name, skipping HOLE blocks."""
    block_size = cache.plane(0, 0).shape[2]
    places = []
    for index, number in enumerate(ids):
        if number == HOLE:
            places += [(HOLE, 0)] * (1 if by_slot else block_size)
        elif not 0 <= number < cache.num_blocks * (block_size if by_slot else 1):
            raise bad.error(side, index, number)
        elif by_slot:
            places.append(divmod(number, block_size))
        else:
            places += [(number, token) for token in range(block_size)]
    return places


def _ids(ids: torch.Tensor | None, other: torch.Tensor | None) -> list[int]:
    if ids is not None:
        return ids.tolist()
    assert other is not None, "one side has ids"
    return list(range(other.numel()))
