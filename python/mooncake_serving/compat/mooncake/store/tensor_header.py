"""The header before the elements of a tensor that is stored as a value."""

import math
import struct

import torch

from mooncake_kernels.errors import InvalidArgument

_HEADER = struct.Struct("<8s16sB39x8q")  # the magic, the dtype, number of dimensions; the shape
_MAGIC = b"MKTENSOR"
_MAX_DIMS = 8
_QUANTIZED = (torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4)
HEADER_BYTES = _HEADER.size  # 128: elements are as aligned as values


def encode(tensor: torch.Tensor) -> bytes:
    """Make the header of a tensor.

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
    shape = (*tensor.shape, *[0] * (_MAX_DIMS - tensor.dim()))
    dtype = str(tensor.dtype).removeprefix("torch.").encode()
    return _HEADER.pack(_MAGIC, dtype, tensor.dim(), *shape)


def decode(value: bytearray | memoryview) -> torch.Tensor:
    """Make the tensor of a value in host memory, without a copy.

    Raises:
        InvalidArgument: the value is not a tensor.
    """
    if len(value) < HEADER_BYTES or bytes(value[: len(_MAGIC)]) != _MAGIC:
        raise InvalidArgument("the value must be one of put_tensor, got another")
    _, name, num_dims, *shape = _HEADER.unpack_from(value)
    dtype = getattr(torch, name.rstrip(b"\0").decode(errors="replace"), None)
    size = shape[:num_dims] if num_dims <= _MAX_DIMS and min(shape) >= 0 else None
    if not isinstance(dtype, torch.dtype) or dtype in _QUANTIZED or size is None:
        raise InvalidArgument("the value must be a tensor of this torch, got another")
    # The other axes of an empty tensor count, too: torch multiplies all of them.
    if math.prod(max(n, 1) for n in size) >= 2**63 // dtype.itemsize:
        raise InvalidArgument(f"the value must be a tensor of this torch, got one of {size}")
    if HEADER_BYTES + math.prod(size) * dtype.itemsize != len(value):
        raise InvalidArgument(f"the value must be {size} of {dtype}, got {len(value)} bytes")
    if math.prod(size) == 0:
        return torch.empty(size, dtype=dtype)
    return torch.frombuffer(value, dtype=dtype, offset=HEADER_BYTES).reshape(size)
