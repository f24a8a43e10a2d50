"""Tensors as values: stored whole or as shards, read whole or as a shard of any other layout."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from mooncake_kernels.errors import InvalidArgument

from ..codes import Failed, as_natural
from .backend import LocalBackend
from .batches import Value
from .codes import OBJECT_NOT_FOUND
from .naming import encoded
from .tensor_layout import (
    HEADER_BYTES,
    MAX_RANKS,
    Described,
    Shard,
    Target,
    check_shape,
    decode,
    describe,
    encode,
    header_of,
    layout_of,
    shard_of,
)

_Box = list[tuple[int, int]]  # of each axis: from where to where


class _Piece(NamedTuple):
    """Elements ``box`` of a whole tensor, as the bytes of each: ``[*shape, itemsize]`` uint8."""

    box: _Box
    elements: np.ndarray


def value_of(key: str, tensor: torch.Tensor, shard: Shard | None = None) -> Value:
    """The value of a tensor; ``shard``: which part of another it is."""
    header = encode(tensor, shard)
    return Value(key, [header, tensor.detach().resolve_conj().resolve_neg().contiguous()])


def copied(value: memoryview) -> torch.Tensor:
    """The tensor of a value, in memory of its own."""
    return decode(bytearray(value))


def shards_of(key: str, tensor: torch.Tensor, tp_size: int, split_dim: int) -> list[Value]:
    """The values of a tensor's shards, one for each rank.

    Raises:
        InvalidArgument: it cannot be cut in this way.
    """
    if as_natural("tp_size", tp_size, minimum=1) == 1:
        return [value_of(key, tensor)]
    encoded(key)  # refuses invalid names
    return values_of_shards(key, tensor, tp_size, split_dim)


def values_of_shards(name: str, tensor: torch.Tensor, tp_size: int, split_dim: int) -> list[Value]:
    """The same, also with a single rank."""
    return [
        value_of(name_of_shard(name, rank), shard, Shard(rank, tp_size, split_dim))
        for rank, shard in enumerate(cut(tensor, tp_size, split_dim))
    ]


def shard_key(key: str, tp_rank: int, tp_size: int) -> str:
    """Key of a rank's shard.

    Raises:
        InvalidArgument: the rank is invalid.
    """
    encoded(key)  # refuses invalid names
    if as_natural("tp_size", tp_size, minimum=1) == 1:
        return key
    if (rank := as_natural("tp_rank", tp_rank)) >= tp_size:
        raise InvalidArgument(f"tp_rank must be below tp_size {tp_size}, got {tp_rank}")
    return name_of_shard(key, rank)


def name_of_shard(name: str, rank: int) -> str:
    """The name of a shard of a tensor of this name."""
    return f"{name}_tp_{rank}"


def cut(tensor: torch.Tensor, tp_size: int, split_dim: int) -> Sequence[torch.Tensor]:
    """The shards of a tensor.

    Raises:
        InvalidArgument: it cannot be cut in this way.
    """
    encode(tensor)  # refuses values that are not tensors
    if type(split_dim) is not int or not 0 <= split_dim < tensor.dim():
        raise InvalidArgument(
            f"split_dim must be an axis of the tensor's {tensor.dim()}, got {split_dim!r:.80}"
        )
    if tensor.shape[split_dim] % tp_size or tp_size > max(tensor.shape[split_dim], 1):
        raise InvalidArgument(
            f"tp_size must divide axis {split_dim} of {tuple(tensor.shape)}, got {tp_size}"
        )
    if tp_size > MAX_RANKS:
        raise InvalidArgument(f"tp_size must be at most {MAX_RANKS}, got {tp_size}")
    return tensor.chunk(tp_size, split_dim)


def values_of(
    key: str,
    tensor: torch.Tensor,
    parallelism: Any,
    writer_partition: Any,
    *,
    all_shards: bool = False,
) -> list[Value]:
    """What is stored of a tensor; ``all_shards``: it is whole, and those of all TP ranks are.

    Raises:
        InvalidArgument: the layout is wrong, or the tensor cannot be cut in this way.
    """
    encoded(key)  # refuses invalid names
    if parallelism is not None and writer_partition is not None:
        raise InvalidArgument("parallelism or writer_partition must be None, got both")
    if writer_partition is not None:
        return [_one_shard(key, tensor, shard_of("writer_partition", writer_partition))]
    if parallelism is None:
        return [value_of(key, tensor)]
    suffix, shard = layout_of(parallelism)
    name = key + suffix
    if shard is None:
        return [value_of(name, tensor)]
    if all_shards:
        return values_of_shards(name, tensor, shard.size, shard.split_dim)
    if suffix:
        return [_one_shard(name, tensor, shard)]
    value = value_of(name_of_shard(name, shard.rank), tensor, shard)
    if shard.split_dim >= tensor.dim():
        raise InvalidArgument(
            f"split_dim must be an axis of the tensor's {tensor.dim()}, got {shard.split_dim}"
        )
    return [value]


def _one_shard(name: str, tensor: torch.Tensor, shard: Shard) -> Value:
    """The value of a shard of a whole tensor."""
    rank, size, split_dim = shard
    return value_of(name_of_shard(name, rank), cut(tensor, size, split_dim)[rank], shard)


def read_tensor(
    op: str, backend: LocalBackend, key: str, target: Target, room: Callable[[int], memoryview]
) -> torch.Tensor | None:
    """Read a tensor, or a shard of it, from wherever its elements are.

    Args:
        op: name of the call, for the log.
        backend: with the tensor's value, or those of its shards.
        key: of the tensor.
        target: what to read.
        room: returns memory of that many bytes, for the header and the elements.

    Returns:
        The tensor in that memory; None if there is none of that name.

    Raises:
        InvalidArgument: it is something else, or cannot be cut in this way.
        Failed: some of its shards are missing, or are of another tensor.
    """
    name = key + target.suffix
    found = None if target.is_stored else _any_shard(backend, name, target.part)
    if found is not None:
        first = describe(found, len(found))
        if first.shard is None:
            raise InvalidArgument("the value must be a shard of a tensor, got a whole one")
    elif (found := backend.view(name)) is not None:
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
        backend.get_each(op, [name_of_shard(name, rank) for rank in sorted(left)], copy)
    if left:
        raise Failed(OBJECT_NOT_FOUND, f"shards {sorted(left)[:8]} of {name!r:.80} are missing")
    memory[:HEADER_BYTES] = header_of(first.dtype, shape, target.part)
    return decode(memory)


def _any_shard(backend: LocalBackend, name: str, part: Shard | None) -> memoryview | None:
    """The very shard that is asked for, as a rule; otherwise the first, which is the first to be
    replaced by one of another layout.
    """
    found = backend.view(name_of_shard(name, part.rank)) if part else None
    if found is not None and describe(found, len(found)).shard == part:
        return found
    return backend.view(name_of_shard(name, 0))


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
