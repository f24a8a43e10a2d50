"""How a tensor is stored: the header before its elements, and the place of a shard in it."""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from mooncake_kernels.errors import InvalidArgument

from ..codes import as_natural
from .codes import check_list

# The magic, the dtype, number of dimensions; of a shard: axis, rank and number; the shape.
_HEADER = struct.Struct("<8s16sBBII30x8q")
_MAGIC = b"MKTENSOR"
_MAX_DIMS = 8
_QUANTIZED = (torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4)
MAX_RANKS = 1 << 16
HEADER_BYTES = _HEADER.size  # 128: elements are as aligned as values
_OTHERS = {
    "dp": None,
    "ep": "expert_id",
    "pp": "stage_id",
}  # axes, and what they need


class Shard(NamedTuple):
    """Part ``rank`` of the ``size`` equal parts of a tensor along an axis."""

    rank: int
    size: int
    split_dim: int


class Described(NamedTuple):
    """What a header says: the shape is that of the value; ``shard``: None for a whole tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    shard: Shard | None


def encode(tensor: torch.Tensor, shard: Shard | None = None) -> bytes:
    """Make the header of a tensor, or of a shard.

    Raises:
        InvalidArgument: it is not a tensor, not in host memory, not dense, quantized, or has too
            many dimensions.
    """
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgument(f"tensor must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.device.type != "cpu":
        raise InvalidArgument(f"tensor must be in host memory, got one on {tensor.device}")
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else "sparse"
        raise InvalidArgument(f"tensor must be dense and not quantized, got a {kind} one")
    if tensor.dim() > _MAX_DIMS:
        raise InvalidArgument(f"tensor must have at most {_MAX_DIMS} axes, got {tensor.dim()}")
    return header_of(tensor.dtype, tensor.shape, shard)


def header_of(dtype: torch.dtype, shape: Sequence[int], shard: Shard | None) -> bytes:
    """Make the header of elements of this dtype and shape."""
    lengths = (*shape, *[0] * (_MAX_DIMS - len(shape)))
    rank, size, split_dim = shard or (0, 0, 0)
    name = str(dtype).removeprefix("torch.").encode()
    return _HEADER.pack(_MAGIC, name, len(shape), split_dim, rank, size, *lengths)


def describe(value: bytes | bytearray | memoryview, num_bytes: int) -> Described:
    """Read the header of a value of this size.

    Raises:
        InvalidArgument: the value is not a tensor.
    """
    if len(value) < HEADER_BYTES or bytes(value[: len(_MAGIC)]) != _MAGIC:
        raise InvalidArgument("the value must be one of put_tensor, got another")
    _, name, num_dims, split_dim, rank, size, *lengths = _HEADER.unpack_from(value)
    dtype = getattr(torch, name.rstrip(b"\0").decode(errors="replace"), None)
    shape = tuple(lengths[:num_dims]) if num_dims <= _MAX_DIMS and min(lengths) >= 0 else None
    if not isinstance(dtype, torch.dtype) or dtype in _QUANTIZED or shape is None:
        raise InvalidArgument("the value must be a tensor of this torch, got another")
    if size and not (rank < size <= MAX_RANKS and split_dim < num_dims):
        raise InvalidArgument(
            f"the value must be a shard of a tensor, got {rank} of {size} on axis {split_dim}"
        )
    check_shape(dtype, shape)
    if HEADER_BYTES + math.prod(shape) * dtype.itemsize != num_bytes:
        raise InvalidArgument(f"the value must be {[*shape]} of {dtype}, got {num_bytes} bytes")
    return Described(dtype, shape, Shard(rank, size, split_dim) if size else None)


def check_shape(dtype: torch.dtype, shape: Sequence[int]) -> None:
    """Refuse a shape of more elements than torch counts."""
    # The other axes of an empty tensor count, too: torch multiplies all of them.
    if HEADER_BYTES + math.prod(max(n, 1) for n in shape) * dtype.itemsize >= 2**63:
        raise InvalidArgument(f"the value must be a tensor of this torch, got one of {[*shape]}")


def decode(value: bytearray | memoryview) -> torch.Tensor:
    """Make the tensor of a value in host memory, without a copy.

    Raises:
        InvalidArgument: the value is not a tensor.
    """
    dtype, shape, _ = describe(value, len(value))
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(value, dtype=dtype, offset=HEADER_BYTES).reshape(shape)


@dataclass(slots=True, eq=False)
class ParallelAxis:
    """A rank of one kind of parallelism. Mooncake's names and defaults; checked when used.

    Attributes:
        kind: ``tp``, ``dp``, ``ep`` or ``pp``.
        rank: below ``size``.
        split_dim: of ``tp``: the axis along which tensors are cut.
        expert_id: of ``ep``.
        stage_id: of ``pp``.
    """

    kind: str = ""
    rank: int = 0
    size: int = 1
    split_dim: int | None = None
    expert_id: int | None = None
    stage_id: int | None = None


@dataclass(slots=True, eq=False)
class TensorParallelism:
    """The place of a shard: its axes, one of each kind at most."""

    axes: list[ParallelAxis] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class ReadTarget:
    """What is read of a tensor.

    Attributes:
        mode: ``as_stored``: the value of the key; ``full``: the whole tensor; ``shard``: the shard
            of ``parallelism``.
        parallelism: whose shards are read, except by ``as_stored``.
    """

    mode: str = "as_stored"
    parallelism: TensorParallelism | None = None


class Layout(NamedTuple):
    """A checked ``TensorParallelism``: the end of names for its other axes, and its shard."""

    suffix: str
    tp: Shard | None


class Target(NamedTuple):
    """A checked ``ReadTarget``: the part that is read; ``is_stored``: only the value itself."""

    suffix: str
    part: Shard | None
    is_stored: bool


def layout_of(parallelism: Any) -> Layout:
    """Check a ``TensorParallelism``, or anything with its attributes.

    Raises:
        InvalidArgument: it is not one, or its axes are wrong.
    """
    (axes,) = _attributes("parallelism", parallelism, ("axes",))
    check_list("parallelism.axes", axes)
    shard: Shard | None = None
    suffixes: dict[str, str] = {}
    kinds = [*map(_kind_of, axes)]
    if not kinds or len({*kinds}) != len(kinds):
        raise InvalidArgument(f"parallelism must have axes, one of each kind, got {kinds}")
    for kind, axis in zip(kinds, axes, strict=True):
        if kind == "tp":
            shard = shard_of("a tp axis", axis)
        else:
            suffixes[kind] = _suffix_of(kind, axis)
    return Layout("".join(suffixes[kind] for kind in _OTHERS if kind in suffixes), shard)


def shard_of(argument: str, place: Any) -> Shard:
    """Check an object with ``rank``, ``size`` and ``split_dim``."""
    rank, size, split_dim = _attributes(argument, place, ("rank", "size", "split_dim"))
    return Shard(*_rank_of(argument, rank, size), as_natural(f"split_dim of {argument}", split_dim))


def target_of(target: Any) -> Target:
    """Check a ``ReadTarget``, or anything with its attributes; None: the value of the key.

    Raises:
        InvalidArgument: it is not one, or has a parallelism that it must not have, or lacks one.
    """
    mode, parallelism = (
        ("as_stored", None)
        if target is None
        else _attributes("target", target, ("mode", "parallelism"))
    )
    mode = mode.lower() if isinstance(mode, str) else mode
    if mode not in ("as_stored", "shard", "full"):
        raise InvalidArgument(f"target.mode must be as_stored, shard or full, got {mode!r:.80}")
    if (mode == "as_stored") > (parallelism is None) or (mode == "shard") > (
        parallelism is not None
    ):
        raise InvalidArgument(
            f"target.parallelism must be None for as_stored and given for shard, "
            f"got {parallelism!r:.80} for {mode}"
        )
    layout = Layout("", None) if parallelism is None else layout_of(parallelism)
    part = layout.tp if mode == "shard" else None
    return Target(layout.suffix, part, mode == "as_stored")


def _kind_of(axis: Any) -> str:
    (kind,) = _attributes("an axis", axis, ("kind",))
    if not isinstance(kind, str) or kind.lower() not in ("tp", *_OTHERS):
        raise InvalidArgument(f"an axis must be tp, dp, ep or pp, got {kind!r:.80}")
    return kind.lower()


def _suffix_of(kind: str, axis: Any) -> str:
    names = "rank", "size", "split_dim", "expert_id", "stage_id"
    rank, size, split_dim, expert_id, stage_id = _attributes("an axis", axis, names)
    if split_dim is not None:
        raise InvalidArgument(f"split_dim must be None on a {kind} axis, got {split_dim!r:.80}")
    rank, size = _rank_of(f"a {kind} axis", rank, size)
    suffix = f"__{kind}_{rank}of{size}"
    for name, short, value in (("expert_id", "eid", expert_id), ("stage_id", "sid", stage_id)):
        if value is not None or _OTHERS[kind] == name:
            suffix += f"_{short}{as_natural(f'{name} of a {kind} axis', value)}"
    return suffix


def _rank_of(argument: str, rank: Any, size: Any) -> tuple[int, int]:
    size = as_natural(f"size of {argument}", size, minimum=1)
    rank = as_natural(f"rank of {argument}", rank)
    if rank >= size or size > MAX_RANKS:
        raise InvalidArgument(
            f"rank of {argument} must be below its size, at most {MAX_RANKS}, got {rank} of {size}"
        )
    return rank, size


def _attributes(argument: str, value: Any, names: Sequence[str]) -> list[Any]:
    try:
        return [getattr(value, name) for name in names]
    except AttributeError:
        raise InvalidArgument(
            f"{argument} must have {', '.join(names)}, got {value!r:.80}"
        ) from None
