"""The calls of ``MooncakeDistributedStore`` that copy a tensor into one of the caller's."""

from collections.abc import Sequence
from typing import Any

import torch

from mooncake_kernels.buffers import as_buffer
from mooncake_kernels.errors import InvalidArgument

from .buffer_calls import BufferCalls
from .codes import INVALID_PARAMS, returns_code, returns_instead
from .sessions import Wanted
from .tensor_calls import Tensors
from .tensor_header import HEADER_BYTES, describe


class TensorDeviceCalls(BufferCalls):
    """The caller's tensor is on a GPU, which copies after everything in torch's current stream, or
    in host memory.
    """

    @returns_code
    def get_tensor_into_cuda(self, key: str, tensor: torch.Tensor) -> int:
        """Copy a tensor's elements into a packed one of the same dtype and shape.

        Returns:
            The bytes of the elements; -704 if there is none, -600 if it is of another dtype or
            shape, and then nothing is copied.
        """
        return self._into_tensor("get_tensor_into_cuda", key, tensor)

    @returns_instead([INVALID_PARAMS])
    def batch_get_tensor_into_cuda(self, keys: Sequence[str], tensors_list: Tensors) -> list[int]:
        """``get_tensor_into_cuda`` for many, key by key."""
        op = "batch_get_tensor_into_cuda"
        return self._each(
            op, keys, (tensors_list,), lambda i: self._into_tensor(op, keys[i], tensors_list[i])
        )

    def _into_tensor(self, op: str, key: str, tensor: Any) -> int:
        buffer = as_buffer(tensor, argument="tensor")
        if not buffer.writable:
            raise InvalidArgument("tensor must be writable, got one that is not")
        objects = self._running().objects
        [reading] = objects.open_each(op, [key])  # so that header and elements are of one value
        if isinstance(reading, int):
            return reading
        header = memoryview(bytearray(HEADER_BYTES))
        [code] = objects.read_ranges(op, [Wanted(reading, [0], [header])])
        if code < 0:
            return code
        dtype, shape, _ = describe(header, reading.num_bytes)
        found = getattr(tensor, "dtype", None), tuple(getattr(tensor, "shape", ()))
        if found != (dtype, shape):
            raise InvalidArgument(
                f"tensor must be {[*shape]} of {dtype}, got {[*found[1]]} of {found[0]}"
            )
        [code] = objects.read_ranges(op, [Wanted(reading, [HEADER_BYTES], [buffer])])
        return code
