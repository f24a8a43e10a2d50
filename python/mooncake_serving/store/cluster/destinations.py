"""Destinations of an object that is read from another node."""

import enum
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from mooncake_kernels.buffers import HOST, BounceBuffers, Buffer, as_buffer, as_writable
from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.transfer import WHOLE

from ..checks import check_number

ANY_SIZE = (1 << 64) - 1


class Outcome(enum.Enum):
    """Result of reading an object."""

    DONE = 0
    ABSENT = 1
    DAMAGED = 2
    NOT_TAKEN = 3  # refused by its destination
    UNREACHED = 4  # the holder cannot be reached
    BUSY = 5  # too much is pinned there
    SPOILED = 6  # it, or an object read with it, was damaged on its way
    BY_ADDRESS = 7  # the holder's engine leaves it to its node


Places = list[tuple[int, int]]  # pieces of local memory, to be filled in order: address, bytes


class Destination(Protocol):
    """Takes one object. ``open`` may be called again after ``abort``, for another copy of it.

    Attributes:
        wanted: offset of the wanted part in the object, or ``WHOLE``, and its maximum size.
        was_compared: whether the holder has compared the object with its checksum, and need not do
            so again for a part of it.
        location: its memory, as in ``Buffer``.
        places: where a whole object of any size goes that is accepted, if that is known before it
            is opened: then ``arrive`` may be called instead of ``open`` and ``commit``.
    """

    wanted: tuple[int, int]
    was_compared: bool
    location: str
    places: Places | None

    def arrive(self, num_bytes: int) -> None:
        """Accept an object of this size, which is in ``places``."""
        self.open(num_bytes)
        self.commit()

    def open(self, num_bytes: int) -> Places | None:
        """Return where the bytes wanted of an object of this size go; None: it is refused."""

    def commit(self) -> None:
        """Accept the bytes: they are there, and right."""

    def abort(self) -> None:
        """Discard the bytes: they are not there, or may be wrong."""


class BufferDestination:
    """Packed, writable memory of the caller, filled as ``ObjectPool.get_into`` does.

    Data for a GPU goes to host memory first, until it is delivered.

    Attributes:
        num_bytes: size of the memory.
        object_bytes: size of the object, once it is known.
    """

    location = HOST

    def __init__(
        self,
        op: str,
        buffers: Sequence[Any],
        offset: int | None = None,
        *,
        was_compared: bool = False,
    ):
        held: Sequence[Buffer] = as_writable(op, buffers)
        if offset is not None:
            check_number(op, "offset", offset)
            offset = int(offset)  # one of numpy's would overflow
        self._bounce: BounceBuffers | None = None
        for buffer in held:
            if buffer.location != HOST:
                self._bounce = BounceBuffers(held)
                held = self._bounce.buffers
                break
        places: Places = []
        num_bytes = 0
        for buffer in held:
            places.append((buffer.address, buffer.num_bytes))
            num_bytes += buffer.num_bytes
        self._buffers = held  # as long as they are written to
        self._places = places
        self._offset = offset
        self.places = places if offset is None else None
        self.wanted = WHOLE if offset is None else offset, num_bytes
        self.was_compared = was_compared
        self.num_bytes = num_bytes
        self.object_bytes = 0

    def arrive(self, num_bytes: int) -> None:
        self.object_bytes = num_bytes

    def open(self, num_bytes: int) -> Places | None:
        self.object_bytes = num_bytes
        if self._offset is None:
            if num_bytes < self.num_bytes:
                return first_bytes(self._places, num_bytes)
            return self._places if num_bytes == self.num_bytes else None
        return self._places if self._offset + self.num_bytes <= num_bytes else None

    def refusal(self, op: str) -> InvalidArgument:
        """What ``ObjectPool.get_into`` raises if the object does not fit."""
        need = (
            f"must have room for {self.object_bytes} bytes, got {self.num_bytes}"
            if self._offset is None
            else f"and offset must be within the object's {self.object_bytes} bytes, got "
            f"{self.num_bytes} from {self._offset}"
        )
        return InvalidArgument(f"{op}: buffers {need}")

    def commit(self) -> None:
        pass  # it is in place, once it is delivered

    def deliver(self) -> None:
        """Copy to the GPUs what is in host memory on their behalf.

        Raises:
            Unavailable, CudaError: of the driver.
        """
        if self._bounce is not None:
            self._bounce.deliver(self.object_bytes if self._offset is None else self.num_bytes)

    def abort(self) -> None:
        pass  # the content of the buffers is undefined


class BytesDestination(Destination):
    """New memory, as large as the object."""

    location = HOST
    wanted = WHOLE, ANY_SIZE
    was_compared = False
    places: Places | None = None

    def __init__(self) -> None:
        self._array = np.empty(0, np.uint8)

    def open(self, num_bytes: int) -> Places | None:
        self._array = np.empty(num_bytes, np.uint8)
        return [(as_buffer(self._array).address, num_bytes)]

    def commit(self) -> None:
        pass

    def abort(self) -> None:
        pass

    def value(self) -> bytes:
        return self._array.tobytes()


def first_bytes(places: Places, num_bytes: int) -> Places:
    """The first bytes of memory."""
    first: Places = []
    for address, size in places:
        if part := min(size, num_bytes):
            first.append((address, part))
            num_bytes -= part
    return first
