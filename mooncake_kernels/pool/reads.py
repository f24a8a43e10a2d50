"""Buffers of a pool's reads and writes, and the outcome of a read."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np

from .. import _host
from .._arguments import as_integer, as_integers
from ..buffers import Buffer, as_buffer, place_of
from ..errors import ChecksumError, InvalidArgument, shown
from .values import END, Key

DONE, ABSENT, TOO_SMALL, OUT_OF_RANGE, DAMAGED = range(5)  # of csrc/store/objects.h

Result = TypeVar("Result")


def with_buffers(
    op: str, buffers: Iterable[Any], writable: bool, call: Callable[..., Result], *options: Any
) -> Result:
    """Call with the buffers as the host code takes them, and options; raise for one that is
    wrong.
    """
    listed = list(buffers)
    try:
        if all(map(_is_taken, listed)):
            return call(listed, *options)
    except (BufferError, ValueError) as error:
        if isinstance(error, InvalidArgument):  # not about a buffer
            raise
    owners = [_as_buffer(op, i, buffer, writable) for i, buffer in enumerate(listed)]
    return call([place_of(owner) for owner in owners], *options)


def _is_taken(buffer: Any) -> bool:
    """Whether the host code takes it directly; for others it gets address and size."""
    kind = type(buffer)
    if kind is memoryview:
        return "O" not in buffer.format
    if kind is bytes or kind is bytearray:
        return True
    if isinstance(buffer, np.ndarray):
        return not buffer.dtype.hasobject
    return isinstance(buffer, bytes | bytearray)


def _as_buffer(op: str, i: int, buffer: Any, writable: bool) -> Buffer:
    owner = as_buffer(buffer, argument=f"{op}: buffers[{i}]")
    if writable and not owner.writable:
        raise InvalidArgument(f"{op}: buffers[{i}] must be writable, got read-only memory")
    return owner


def checksum_of(*buffers: Any) -> int:
    """Return the checksum of an object that consists of these buffers, see
    ``PinnedObject.checksum``.

    Args:
        *buffers: packed memory, the consecutive parts of the object.

    Returns:
        XXH3-64 of all the bytes; 1 where that is 0.

    Raises:
        InvalidArgument: a buffer is not as above.
    """
    return with_buffers("checksum_of", buffers, False, _host.checksum)


def as_headed(
    op: str, num_objects: int, heads: Any, addresses: Any, sizes: Any
) -> tuple[list[bytes], np.ndarray, np.ndarray]:
    """The heads of objects, and two tables ``[n, w]`` of the places of what follows them."""
    listed = list(heads)
    if len(listed) != num_objects or not set(map(type, listed)) <= {bytes}:
        raise InvalidArgument(f"{op}: heads must be bytes for each key, got {shown(heads)}")
    starts = as_integers(op, "addresses", addresses, "[n, w]")
    counts = as_integers(op, "sizes", sizes, "[n, w]")
    if starts.shape != counts.shape or starts.ndim != 2 or len(starts) != num_objects:
        raise InvalidArgument(
            f"{op}: addresses and sizes must be [n, w] for {num_objects} keys, got shapes "
            f"{starts.shape} and {counts.shape}"
        )
    return listed, starts, counts


def as_offset(offset: Any) -> int:
    return as_integer("get_into", "offset", offset, 0, END - 1)


def failed_read(
    outcome: int, object_bytes: int, key: Key, offset: int | None, buffers: Iterable[Any]
) -> InvalidArgument | ChecksumError:
    """The error of a read that is neither ``DONE`` nor finds it ``ABSENT``."""
    wanted = sum(as_buffer(buffer).num_bytes for buffer in buffers)
    if outcome == TOO_SMALL:
        return InvalidArgument(
            f"get_into: buffers must have room for {object_bytes} bytes, got {wanted}"
        )
    if outcome == OUT_OF_RANGE:
        return InvalidArgument(
            f"get_into: offset and buffers must be within the object's {object_bytes} bytes, got "
            f"{wanted} from {offset}"
        )
    return ChecksumError(f"get_into: object {shown(key)} is not what its checksum says")
