"""The header before the elements of a tensor that is stored as a value."""

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from mooncake_kernels.errors import InvalidArgument

# The magic, the dtype, number of dimensions; of a shard: axis, rank and number; the shape.
_HEADER = struct.Struct("<8s16sBBII30x8q")
_MAGIC = b"MKTENSOR"
_MAX_DIMS = 8
_QUANTIZED = (torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4)
MAX_RANKS = 1 << 16
HEADER_BYTES = _HEADER.size  # 128: elements are as aligned as values


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
