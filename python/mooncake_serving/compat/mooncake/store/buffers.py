"""Callers' memory, by address."""

import bisect
import ctypes
import threading
from dataclasses import replace
from typing import Any

from mooncake_kernels.buffers import Buffer, gpu_memory_at
from mooncake_kernels.errors import InvalidArgument

from ..codes import as_natural
from ..mapped import MappedMemory

Memory = memoryview | Buffer  # of the host; of a GPU


class Buffers:
    """Registered memory, and all other memory of this process. Thread-safe.

    A range that is not registered is looked up among all mappings, and in the memory of GPUs, at
    each use: as with Mooncake's tcp it may be used, and an invalid address is an error, not a
    crash.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Start addresses of ranges; their memory, and whether it is writable. Replaced and never
        # changed, so
        # that readers take no lock.
        self._registered: tuple[tuple[int, ...], tuple[tuple[Memory, bool], ...]] = (), ()

    def register(self, address: Any, num_bytes: Any) -> Memory:
        """Remember a range, which must not overlap any other.

        Raises:
            InvalidArgument: it overlaps, or is not memory that this process can read.
        """
        begin = as_natural("buffer_ptr", address, minimum=1)
        size = as_natural("size", num_bytes, minimum=1)
        memory, writable = _mapped(begin, size)
        with self._lock:
            begins, ranges = self._registered
            place = bisect.bisect(begins, begin)
            if (place > 0 and begins[place - 1] + size_of(ranges[place - 1][0]) > begin) or (
                place < len(begins) and begin + size > begins[place]
            ):
                raise InvalidArgument(
                    f"buffer_ptr must not overlap what is registered, got {_shown(begin, size)}"
                )
            self._registered = (
                (*begins[:place], begin, *begins[place:]),
                (*ranges[:place], (memory, writable), *ranges[place:]),
            )
        return memory

    def unregister(self, address: Any) -> None:
        """Forget the range that begins there.

        Raises:
            InvalidArgument: none does.
        """
        begin = as_natural("buffer_ptr", address)
        with self._lock:
            begins, ranges = self._registered
            if begin not in begins:
                raise InvalidArgument(
                    f"buffer_ptr must be where a registered buffer begins, got {begin:#x}"
                )
            place = begins.index(begin)
            self._registered = (
                begins[:place] + begins[place + 1 :],
                ranges[:place] + ranges[place + 1 :],
            )

    def view(self, address: Any, num_bytes: Any, *, writes: bool) -> Memory:
        """The bytes of a range.

        Raises:
            InvalidArgument: it is not memory of this process with the required access.
        """
        begin, size = as_natural("buffer_ptr", address), as_natural("size", num_bytes)
        begins, ranges = self._registered
        place = bisect.bisect(begins, begin) - 1
        if place >= 0:
            memory, writable = ranges[place]
            offset = begin - begins[place]
            if offset + size <= size_of(memory) and (writable or not writes):
                return _part(memory, offset, size)
        memory, writable = _mapped(begin, size)
        if writes and not writable:
            raise InvalidArgument(f"buffer_ptr must be writable, got {_shown(begin, size)}")
        return memory


def size_of(memory: Memory) -> int:
    """Its size in bytes."""
    return memory.num_bytes if isinstance(memory, Buffer) else len(memory)


def too_small(value_bytes: int, num_bytes: int) -> str:
    """Why a value is not copied into memory of ``num_bytes``."""
    return f"size must be at least the value's {value_bytes} bytes, got {num_bytes}"


def _part(memory: Memory, offset: int, num_bytes: int) -> Memory:
    if isinstance(memory, Buffer):
        return replace(memory, address=memory.address + offset, num_bytes=num_bytes)
    return memory[offset : offset + num_bytes]


def _mapped(address: int, num_bytes: int) -> tuple[Memory, bool]:
    if allowed := MappedMemory().access(address, num_bytes) if address else "":
        view = memoryview((ctypes.c_ubyte * num_bytes).from_address(address)).cast("B")
        return view, allowed == "rw"
    if (memory := gpu_memory_at(address, num_bytes)) is not None:
        return memory, True
    raise InvalidArgument(
        "buffer_ptr must be memory of this process that it can read, or of a GPU, "
        f"got {_shown(address, num_bytes)}"
    )


def _shown(address: int, num_bytes: int) -> str:
    return f"{address:#x} + {num_bytes} bytes"
