"""Values that are written or read range by range: layer by layer for example."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from mooncake_kernels.buffers import Buffer, as_buffer, copy_from_host, copy_to_host
from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import ObjectPut, PinnedObject

from ..codes import Failed
from .buffers import Memory, size_of
from .codes import NO_AVAILABLE_HANDLE, OBJECT_ALREADY_EXISTS, code_of
from .replicate_config import PutOptions

if TYPE_CHECKING:  # it needs an extra, which a pool of one host does not need
    from mooncake_serving.store.cluster import ClusterPut

    AnyPut = ObjectPut | ClusterPut

Session = TypeVar("Session")

MAX_READING = 2048  # per store: a pool has 4096 pins for all readers


class WriteSession:
    """A value that is not visible yet. Thread-safe.

    Args:
        name: of it.
        put: its object, in host memory.
        start: where it begins in that, after the header.
        options: how it is kept.
    """

    def __init__(self, name: str, put: "AnyPut", start: int, options: PutOptions):
        self.name = name
        self.options = options
        self.num_bytes = put.num_bytes - start
        self._put = put
        self._target: memoryview | None = put.view[start:]
        self._lock = threading.Lock()
        self._gaps = [(0, self.num_bytes)]  # ranges not written yet: from, to

    def write(self, offsets: Sequence[int], parts: Sequence[Memory]) -> int:
        """Copy parts to their offsets; returns how many bytes.

        Raises:
            InvalidArgument: a part is not within the value, or the session is over; none of these
                parts was copied.
        """
        places = within("dst_offsets", offsets, parts, self.num_bytes)
        with self._lock:
            if self._target is None:
                raise InvalidArgument("keys must have a put session, got one that is over")
            for (first, last), part in zip(places, parts, strict=True):
                if first < last:
                    copy_from_host(_in_host(part), [self._target[first:last]])
                    self._fill_gaps(first, last)
        return sum(map(size_of, parts))

    def finish(self) -> "AnyPut":
        """Return its object, to be committed. Bytes that were not written are zeroed.

        Raises:
            InvalidArgument: it is over.
        """
        with self._lock:
            target, self._target = self._target, None
            if target is None:
                raise InvalidArgument("keys must have a put session, got one that is over")
            whole = np.frombuffer(target, np.uint8)
            for first, last in self._gaps:
                whole[first:last] = 0
            del whole
            target.release()
            return self._put

    def abort(self) -> int:
        """Discard the value: 0. No effect after a commit."""
        with self._lock:
            if self._target is not None:
                self._target.release()
                self._target = None
            self._put.abort()
        return 0

    def _fill_gaps(self, first: int, last: int) -> None:
        self._gaps = [
            (begin, end)
            for low, high in self._gaps
            for begin, end in ((low, min(high, first)), (max(low, last), high))
            if begin < end
        ]


@dataclass(frozen=True)
class ReadSession:
    """A value that is being read.

    Attributes:
        name: of it.
        num_bytes: size of the value.
        header: of its object, unique to it.
        pinned: its object, which stays as long as this; None: it is on another host.
    """

    name: str
    num_bytes: int
    header: bytes
    pinned: PinnedObject | None

    @property
    def start(self) -> int:
        """Where it begins in its object, after the header."""
        return len(self.header)

    @property
    def address(self) -> int:
        """Where the value is in this process; 0: it is on another host."""
        return self.pinned.buffer.address + self.start if self.pinned is not None else 0


class ReadSpec(NamedTuple):
    """Ranges of a value that is read: their offsets, and the memory to fill."""

    reading: ReadSession
    offsets: Sequence[int]
    parts: Sequence[Memory]

    def places(self) -> list[tuple[int, int]]:
        """Start and end of each range in the value.

        Raises:
            InvalidArgument: one is not within it.
        """
        return within("src_offsets", self.offsets, self.parts, self.reading.num_bytes)

    def read(self) -> int:
        """Fill the memory from the object pinned here; returns the number of bytes."""
        start, pinned = self.reading.start, self.reading.pinned
        assert pinned is not None
        for (first, last), part in zip(self.places(), self.parts, strict=True):
            if first < last:
                copy_from_host(pinned.view[start + first : start + last], [part])
        return sum(map(size_of, self.parts))


@dataclass
class OpenSessions:
    """The values of a store that are being written or read. Thread-safe."""

    _writing: dict[str, WriteSession] = field(default_factory=dict)
    _reading: dict[str, ReadSession] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def check_unwritten(self, name: str) -> None:
        """Refuse a value that is being written in this store."""
        if _key(name) in self._writing:
            raise InvalidArgument(f"keys must have no put session yet, got {name!r:.80}")

    def begin_writing(self, writing: WriteSession) -> int:
        """Start to write a value: 0.

        Raises:
            Failed: another call has begun to write it meanwhile; this one is aborted.
        """
        with self._lock:
            known = self._writing.setdefault(writing.name, writing)
        if known is not writing:
            writing.abort()
            raise Failed(OBJECT_ALREADY_EXISTS, f"{writing.name!r:.80} is being written here")
        return 0

    def writing(self, name: str) -> WriteSession:
        """A value that is being written.

        Raises:
            InvalidArgument: it is not.
        """
        return _session_of(self._writing.get(_key(name)), "put", name)

    def end_writing(self, name: str) -> WriteSession:
        """The same, and end its session."""
        with self._lock:
            return _session_of(self._writing.pop(_key(name), None), "put", name)

    def begin_reading(self, reading: ReadSession) -> int:
        """Start to read a value; replaces an earlier session of this name: 0.

        Raises:
            Failed: too many are being read already.
        """
        with self._lock:
            if len(self._reading) >= MAX_READING and reading.name not in self._reading:
                raise Failed(NO_AVAILABLE_HANDLE, f"{MAX_READING} values are being read")
            self._reading[reading.name] = reading
        return 0

    def reading(self, name: str) -> ReadSession:
        """A value that is being read.

        Raises:
            InvalidArgument: it is not.
        """
        return _session_of(self._reading.get(_key(name)), "get", name)

    def end_reading(self, name: str) -> None:
        """End the session of a value, if it is being read."""
        with self._lock:
            self._reading.pop(_key(name), None)

    def close(self) -> None:
        """End all sessions: values that are being written are discarded."""
        with self._lock:
            open_puts, self._writing, self._reading = [*self._writing.values()], {}, {}
        for writing in open_puts:
            code_of("close", writing.abort)


def within(
    argument: str, offsets: Sequence[int], parts: Sequence[Memory], num_bytes: int
) -> list[tuple[int, int]]:
    """Start and end of each part in a value of this many bytes.

    Raises:
        InvalidArgument: one is not within it.
    """
    places = [(offset, offset + size_of(part)) for offset, part in zip(offsets, parts, strict=True)]
    for first, last in places:
        if last > num_bytes:
            raise InvalidArgument(
                f"{argument} and sizes must be within the value's {num_bytes} bytes, "
                f"got {last - first} from {first}"
            )
    return places


def _key(name: Any) -> str:
    """A name as the key of a session."""
    if not isinstance(name, str):
        raise InvalidArgument(f"key must be a string, got {name!r:.80}")
    return name


def _in_host(memory: Memory) -> Buffer:
    held = as_buffer(memory)
    return held if held.is_host else as_buffer(copy_to_host([held]))


def _session_of(session: Session | None, kind: str, name: str) -> Session:
    if session is None:
        raise InvalidArgument(f"keys must have a {kind} session, got {name!r:.80} without")
    return session
