"""An object that is not in a pool, copied as ``ObjectPool.get_into`` copies one that is."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mooncake_kernels.errors import InvalidArgument

from ..ssd.arguments import as_arrays


def scatter(op: str, value: bytearray, buffers: Sequence[Any], offset: int | None) -> None:
    """Copy an object, or the part of it from ``offset`` on, into buffers, one behind the other.

    Raises:
        InvalidArgument: the buffers are too small, or what is asked for is not in the object.
    """
    arrays = as_arrays(op, "buffers", buffers, len(buffers), writable=True)
    room = sum(map(len, arrays))
    if offset is None and room < len(value):
        raise InvalidArgument(f"{op}: buffers must have room for {len(value)} bytes, got {room}")
    if offset is not None and offset + room > len(value):
        raise InvalidArgument(
            f"{op}: offset and buffers must be within the object's {len(value)} bytes, "
            f"got {room} from {offset}"
        )
    rest = np.frombuffer(value, np.uint8)[offset or 0 :]
    for array in arrays:
        part, rest = rest[: len(array)], rest[len(array) :]
        array[: len(part)] = part
