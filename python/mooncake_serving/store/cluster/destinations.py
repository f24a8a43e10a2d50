"""Destinations of an object that is read from another node."""

import enum
import logging
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from mooncake_kernels.buffers import HOST, BounceBuffers, Buffer, as_buffer, as_writable
from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import Key, ObjectPut, PutResult, checksum_of
from mooncake_kernels.transfer import WHOLE

from ..checks import check_number
from ..store import Store
from .directory_entries import CopyMarks, DirectoryEntries
from .put_batch import HARD, PUT_OPTIONS, put_arguments

ANY_SIZE = (1 << 64) - 1
DEFAULT_OPTIONS: np.void = np.zeros(1, PUT_OPTIONS)[0]
logger = logging.getLogger(__name__)

GONE = "it was removed meanwhile"


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


class PoolDestination(Destination):
    """This node's pool: room is made there as for any put.

    Args:
        store: of the pool.
        key: in it.
        copies: where it is marked, unless it is a put.
        options: a row of ``PUT_OPTIONS``: how it is kept.

    Attributes:
        result: of the put; None while there is none.
    """

    was_compared = False
    places: Places | None = None

    def __init__(
        self,
        store: Store,
        key: Key,
        copies: CopyMarks | None = None,
        options: np.void = DEFAULT_OPTIONS,
    ):
        self._store = store
        self._key = key
        self._copies = copies
        self._options = options
        self._put: ObjectPut | None = None
        self._stored_id = 0
        self.wanted = WHOLE, store.pool.capacity_bytes
        self.location = store.pool.buffer.location
        self.result: PutResult | None = None

    def open(self, num_bytes: int) -> Places | None:
        if num_bytes > self._store.pool.capacity_bytes:
            self.result = PutResult.FULL
            return None
        begun = self._store.begin_key(self._key, num_bytes, **put_arguments(self._options))
        if begun is PutResult.EXISTS:
            self.exists()
            return None
        if isinstance(begun, PutResult):
            self.result = begun
            return None
        self._put = begun
        if self._copies is not None:
            self._copies.begin(begun.id)
        return [(begun.buffer.address, num_bytes)] if num_bytes else []

    def exists(self) -> None:
        """Take the object for the one that is there already. A copy of one that is never evicted
        makes that one so, too: the other may go in its favour.
        """
        self.result = PutResult.EXISTS
        if self._copies is not None and self._options["retention"] == HARD:
            self._store.pool.retain(self._key, "hard")

    def checksum(self) -> int:
        """Checksum of the bytes, before they are committed."""
        return checksum_of() if self._put is None else checksum_of(self._put.buffer)

    def commit(self) -> None:
        if self._put is not None:
            try:
                self._put.commit()
            except BaseException:
                self.abort()
                raise
            if self._copies is not None:
                self._copies.commit(self._put.id)
            self.result = PutResult.STORED
            self._stored_id, self._put = self._put.id, None

    def retract(self) -> None:
        """Remove what was committed, if it is still there; then there is no result."""
        self.result = None
        if self._stored_id:
            self._store.remove_exactly(self._key, self._stored_id)
            self._unmark(self._stored_id)

    def abort(self) -> None:
        put, self._put = self._put, None
        if put is not None:
            self._unmark(put.id)  # it never becomes visible
            put.abort()

    def _unmark(self, object_id: int) -> None:
        if self._copies is not None:
            self._copies.end(np.array([object_id], np.uint64))


def first_bytes(places: Places, num_bytes: int) -> Places:
    """The first bytes of memory."""
    first: Places = []
    for address, size in places:
        if part := min(size, num_bytes):
            first.append((address, part))
            num_bytes -= part
    return first


def keep_copies(
    store: Store,
    entries: DirectoryEntries,
    keys: np.ndarray,
    destinations: Sequence[PoolDestination],
) -> list[int]:
    """Publish those of n objects read into the pool that are still here, with its ``copies``.

    Objects that were removed meanwhile are taken back, and then have no result.

    Returns:
        Which are still here.
    """
    is_new = np.array(
        [destination.result is PutResult.STORED for destination in destinations], bool
    )
    is_old = np.array(
        [destination.result is PutResult.EXISTS for destination in destinations], bool
    )
    store.age_tail_first(keys[is_new])
    here = np.flatnonzero(is_new | is_old)
    gone = here[~entries.publish_copies(keys[here])].tolist()
    for i in gone:
        try:
            destinations[i].retract()
        except OSError as error:  # a stopped process holds the pool; the next look does it
            logger.warning("what was removed is still here: %s", error)
            entries.is_stale = True
    return gone
