"""The specification of paged KV movement."""

import ctypes
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
    pairs = [  # as far as both sides go
        (src_place, dst_place)
        for src_place, dst_place in zip(src_places, dst_places, strict=False)
        if HOLE not in (src_place[0], dst_place[0])
    ]
    src_heads = slice(selection.src_head, selection.src_head + selection.num_heads)
    dst_heads = slice(selection.dst_head, selection.dst_head + selection.num_heads)
    with torch.inference_mode():  # caches that were made in it may only be written in it
        for src_layer, dst_layer in selection.layers:
            for kv in range(selection.num_kv):
                source, target = src.plane(src_layer, kv), dst.plane(dst_layer, kv)
                for (src_block, src_token), (dst_block, dst_token) in pairs:
                    row = source[src_block, src_heads, src_token]
                    target[dst_block, dst_heads, dst_token] = row


def copy_batch(src_ptrs: torch.Tensor, dst_ptrs: torch.Tensor, sizes: torch.Tensor) -> None:
    """Copy ``sizes[i]`` bytes from address ``src_ptrs[i]`` to ``dst_ptrs[i]``, in host memory."""
    lists = (src_ptrs.tolist(), dst_ptrs.tolist(), sizes.tolist())
    for src, dst, size in zip(*lists, strict=True):
        ctypes.memmove(dst, src, size)


def _places(
    side: int, ids: list[int], cache: Planes, by_slot: bool, bad: BadIds
) -> list[tuple[int, int]]:
    """Return (block, token in it) of every token that the ids name; HOLE for a block skips it."""
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
