"""Memory of callers by its address."""

import bisect
import ctypes
import threading
from typing import Any

from mooncake_kernels.errors import InvalidArgument

from ..codes import as_natural
from ..mapped import MappedMemory


class Buffers:
    """What is registered, and what else is memory of this process. Thread-safe.

    A range that is not registered is looked up among all that is mapped, at each use: as with
    Mooncake's tcp it may be used, and an address that is none is an error, not a crash.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Where ranges begin; their bytes, and whether they can be written to. Replaced and never
        # changed, so that readers take no lock.
        self._registered: tuple[tuple[int, ...], tuple[tuple[memoryview, bool], ...]] = (), ()

    def register(self, address: Any, num_bytes: Any) -> memoryview:
        """Remember a range, which must overlap no other.

        Raises:
            InvalidArgument: it does, or is not memory that this process can read.
        """
        begin = as_natural("buffer_ptr", address, minimum=1)
        size = as_natural("size", num_bytes, minimum=1)
        view, writable = _mapped(begin, size)
        with self._lock:
            begins, ranges = self._registered
            place = bisect.bisect(begins, begin)
            if (place > 0 and begins[place - 1] + len(ranges[place - 1][0]) > begin) or (
                place < len(begins) and begin + size > begins[place]
            ):
                raise InvalidArgument(
                    f"buffer_ptr must not overlap what is registered, got {_shown(begin, size)}"
                )
            self._registered = (
                (*begins[:place], begin, *begins[place:]),
                (*ranges[:place], (view, writable), *ranges[place:]),
            )
        return view

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

    def view(self, address: Any, num_bytes: Any, *, writes: bool) -> memoryview:
        """The bytes of a range.

        Raises:
            InvalidArgument: it is not memory of this process that may be used so.
        """
        begin, size = as_natural("buffer_ptr", address), as_natural("size", num_bytes)
        begins, ranges = self._registered
        place = bisect.bisect(begins, begin) - 1
        if place >= 0:
            view, writable = ranges[place]
            offset = begin - begins[place]
            if offset + size <= len(view) and (writable or not writes):
                return view[offset : offset + size]
        view, writable = _mapped(begin, size)
        if writes and not writable:
            raise InvalidArgument(f"buffer_ptr must be writable, got {_shown(begin, size)}")
        return view


def _mapped(address: int, num_bytes: int) -> tuple[memoryview, bool]:
    allowed = MappedMemory().access(address, num_bytes) if address else ""
    if not allowed:
        raise InvalidArgument(
            "buffer_ptr must be host memory that this process can read, "
            f"got {_shown(address, num_bytes)}"
        )
    view = memoryview((ctypes.c_ubyte * num_bytes).from_address(address)).cast("B")
    return view, allowed == "rw"


def _shown(address: int, num_bytes: int) -> str:
    return f"{address:#x} + {num_bytes} bytes"
