"""Copies an object that is not in a pool, as ``ObjectPool.get_into`` copies one that is."""

from collections.abc import Sequence
from typing import Any

from mooncake_kernels.buffers import as_buffer, copy_from_host
from mooncake_kernels.errors import InvalidArgument


def scatter(op: str, value: bytearray, buffers: Sequence[Any], offset: int | None) -> None:
    """Copy an object, or the part of it from ``offset`` on, into buffers in order.

    Raises:
        InvalidArgument: the buffers are too small, or the requested part is not in the object.
    """
    targets = [
        as_buffer(buffer, argument=f"{op}: buffers[{i}]") for i, buffer in enumerate(buffers)
    ]
    room = sum(target.num_bytes for target in targets)
    if offset is None and room < len(value):
        raise InvalidArgument(f"{op}: buffers must have room for {len(value)} bytes, got {room}")
    if offset is not None and offset + room > len(value):
        raise InvalidArgument(
            f"{op}: offset and buffers must be within the object's {len(value)} bytes, "
            f"got {room} from {offset}"
        )
    copy_from_host(memoryview(value)[offset or 0 :], targets)
