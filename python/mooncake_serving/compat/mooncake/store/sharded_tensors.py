"""Tensors stored whole or as shards, read whole or as a shard of any other number or axis."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from mooncake_kernels.errors import InvalidArgument

from ..codes import Failed
from .codes import OBJECT_NOT_FOUND
from .objects import Objects
from .parallelism import Target
from .tensor_header import (
    HEADER_BYTES,
    Described,
    Shard,
    check_shape,
    decode,
    describe,
    header_of,
)
from .tensor_shard_calls import name_of_shard

_Box = list[tuple[int, int]]  # of each axis: from where to where


class _Piece(NamedTuple):
    """Elements ``box`` of a whole tensor, as the bytes of each: ``[*shape, itemsize]`` uint8."""

    box: _Box
    elements: np.ndarray


def read_tensor(
    op: str, objects: Objects, key: str, target: Target, room: Callable[[int], memoryview]
) -> torch.Tensor | None:
    """Read a tensor, or a shard of it, from wherever its elements are.

    Args:
        op: who asks.
        objects: with the tensor's value, or those of its shards.
        key: of the tensor.
        target: what to read.
        room: returns memory of so many bytes, for the header and the elements.

    Returns:
        The tensor in that memory; None if there is none of that name.

    Raises:
        InvalidArgument: it is something else, or cannot be cut in this way.
        Failed: some of its shards are missing, or are of another tensor.
    """
    name = key + target.suffix
    found = None if target.is_stored else _any_shard(objects, name, target.part)
    if found is not None:
        first = describe(found, len(found))
        if first.shard is None:
            raise InvalidArgument("the value must be a shard of a tensor, got a whole one")
    elif (found := objects.view(name)) is not None:
        first = describe(found, len(found))._replace(shard=None)
    else:
        return None

    whole = _whole_shape(first)
    wanted = _box_of(whole, target.part)
    shape = [end - begin for begin, end in wanted]
    memory = room(HEADER_BYTES + math.prod(shape) * first.dtype.itemsize)
    into = _Piece(wanted, _elements(memory, first.dtype, shape))
    left = _ranks_with(wanted, whole, first.shard)

    def copy(value: memoryview) -> int:
        one = describe(value, len(value))
        if first.shard is None:
            one = one._replace(shard=None)
        if _identity(one) != _identity(first):
            raise Failed(OBJECT_NOT_FOUND, f"the shards of {name!r:.80} are of different tensors")
        _copy(_Piece(_box_of(whole, one.shard), _elements(value, one.dtype, one.shape)), into)
        left.discard(0 if one.shard is None else one.shard.rank)
        return 0

    copy(found)
    del found  # a pool has a limited number of views
    if left:
        objects.get_each(op, [name_of_shard(name, rank) for rank in sorted(left)], copy)
    if left:
        raise Failed(OBJECT_NOT_FOUND, f"shards {sorted(left)[:8]} of {name!r:.80} are missing")
    memory[:HEADER_BYTES] = header_of(first.dtype, shape, target.part)
    return decode(memory)


def _any_shard(objects: Objects, name: str, part: Shard | None) -> memoryview | None:
    """The very shard that is asked for, as a rule; otherwise the first, which is the first to be
    replaced by one of another layout.
    """
    found = objects.view(name_of_shard(name, part.rank)) if part else None
    if found is not None and describe(found, len(found)).shard == part:
        return found
    return objects.view(name_of_shard(name, 0))


def _whole_shape(one: Described) -> tuple[int, ...]:
    """Shape of the tensor of which it is a shard."""
    shape = [*one.shape]
    if one.shard is not None:
        shape[one.shard.split_dim] *= one.shard.size
    check_shape(one.dtype, shape)
    return tuple(shape)


def _identity(one: Described) -> tuple:
    """What all shards of a tensor have in common."""
    return one.dtype, _whole_shape(one), one.shard and (one.shard.size, one.shard.split_dim)


def _box_of(shape: tuple[int, ...], part: Shard | None) -> _Box:
    box = [(0, length) for length in shape]
    if part is not None:
        rank, size, dim = part
        if dim >= len(shape) or shape[dim] % size:
            raise InvalidArgument(f"size {size} must divide axis {dim} of {shape}, got a tp axis")
        length = shape[dim] // size
        box[dim] = rank * length, (rank + 1) * length
    return box


def _common(one: _Box, other: _Box) -> _Box:
    return [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True)]


def _ranks_with(wanted: _Box, whole: tuple[int, ...], stored: Shard | None) -> set[int]:
    """The stored shards with elements of a box; 0 stands for a whole tensor."""
    if stored is None:
        return {0}
    begin, end = wanted[stored.split_dim]
    length = whole[stored.split_dim] // stored.size
    return {*range(begin // length, -(-end // length))} if begin < end else set()


def _elements(value: memoryview, dtype: torch.dtype, shape: Sequence[int]) -> np.ndarray:
    return np.frombuffer(value, np.uint8, offset=HEADER_BYTES).reshape(*shape, dtype.itemsize)


def _copy(source: _Piece, into: _Piece) -> None:
    """Copy the elements that both have."""
    both = _common(source.box, into.box)
    if all(begin < end for begin, end in both):
        into.elements[_within(both, into.box)] = source.elements[_within(both, source.box)]


def _within(part: _Box, box: _Box) -> tuple[slice, ...]:
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(part, box, strict=True))
