"""Memory: that of callers by address, ``BufferHandle`` and ``MooncakeHostMemAllocator``."""

import bisect
import ctypes
import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from mooncake_kernels.buffers import Buffer, gpu_memory_at, shared_memory
from mooncake_kernels.errors import InvalidArgument

from ...mapped_memory import MappedMemory
from ..codes import as_natural

log = logging.getLogger(__package__)

Memory = memoryview | Buffer  # of the host; of a GPU

_LISTS = (list, tuple, np.ndarray)


class Places(NamedTuple):
    """Host memory of many values, in pieces: ``[n, w]`` uint64 each."""

    addresses: np.ndarray
    sizes: np.ndarray

    def views(self, i: int) -> list[Memory]:
        """The pieces of one value, to be written."""
        pieces = zip(self.addresses[i].tolist(), self.sizes[i].tolist(), strict=True)
        return [Buffer(*piece, "cpu:0", True, None) for piece in pieces]


class Buffers:
    """Registered memory, and all other memory of this process. Thread-safe.

    A registration is a bound: a range that begins in one must end in the same one, whatever lies
    behind it. A range that begins in none is looked up among all mappings, and in the memory of
    GPUs, at each use: as with Mooncake's tcp it may be used, and an invalid address is an error,
    not a crash.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Start addresses of ranges; their memory, its size, and whether it is writable. Replaced
        # and never changed, so that readers take no lock.
        self._registered: tuple[tuple[int, ...], tuple[tuple[Memory, int, bool], ...]] = (), ()
        # Of the same: start addresses, and how many bytes of each are host memory to read or write.
        self._tables = _tables(*self._registered)

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
            if (place > 0 and begins[place - 1] + ranges[place - 1][1] > begin) or (
                place < len(begins) and begin + size > begins[place]
            ):
                raise InvalidArgument(
                    f"buffer_ptr must not overlap what is registered, got {_shown(begin, size)}"
                )
            self._registered = (
                (*begins[:place], begin, *begins[place:]),
                (*ranges[:place], (memory, size, writable), *ranges[place:]),
            )
            self._tables = _tables(*self._registered)
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
            self._tables = _tables(*self._registered)

    def view(self, address: Any, num_bytes: Any, *, writes: bool, skipped: int = 0) -> Memory:
        """The bytes of a range.

        Args:
            address: of memory. If it is in a registration, the range must be in the same one.
            num_bytes: size of the range.
            writes: whether it must be writable.
            skipped: bytes between the address and the range, 0 or more.

        Raises:
            InvalidArgument: it leaves the registration, or is not memory of this process with the
                required access.
        """
        begin = address if type(address) is int else as_natural("buffer_ptr", address)
        size = num_bytes if type(num_bytes) is int else as_natural("size", num_bytes)
        begins, ranges = self._registered
        place = bisect.bisect(begins, begin) - 1
        if place >= 0 and size >= 0:
            memory, room, writable = ranges[place]
            offset = begin - begins[place]
            if offset < room and (end := offset + skipped + size) > room:
                raise InvalidArgument(
                    f"buffer_ptr and size must stay within the registered buffer, "
                    f"{_shown(begins[place], room)}, got {_shown(begin + skipped, size)}"
                )
            if offset < room and (writable or not writes):
                if type(memory) is memoryview:
                    return memory[end - size : end]
                return replace(memory, address=begin + skipped, num_bytes=size)
        if skipped:
            return self.view(begin + skipped, size, writes=writes)
        begin, size = as_natural("buffer_ptr", begin), as_natural("size", size)
        memory, writable = _mapped(begin, size)
        if writes and not writable:
            raise InvalidArgument(f"buffer_ptr must be writable, got {_shown(begin, size)}")
        return memory

    def places(self, pointers: Any, sizes: Any, depth: int, *, writes: bool) -> Places | None:
        """Addresses and sizes of many values: two lists, or two lists of lists (a depth of 2).

        Returns:
            None unless all are plain integers and each is within one registration of host memory,
            as usual; ``view`` says what it is otherwise.
        """
        addresses, counts = _table(pointers, depth), _table(sizes, depth)
        if addresses is None or counts is None or addresses.shape != counts.shape:
            return None
        begins, *rooms = self._tables
        at = begins.searchsorted(addresses, "right") - 1
        offsets, room = addresses - begins[at], rooms[writes][at]
        if not ((offsets < room) & (counts - 1 < room - offsets)).all():
            return None
        return Places(addresses, counts)


def size_of(memory: Memory) -> int:
    """Its size in bytes."""
    return memory.num_bytes if isinstance(memory, Buffer) else len(memory)


def too_small(value_bytes: int, num_bytes: int) -> str:
    """Why a value is not copied into memory of ``num_bytes``."""
    return f"size must be at least the value's {value_bytes} bytes, got {num_bytes}"


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


def _tables(
    begins: Sequence[int], ranges: Sequence[tuple[Memory, int, bool]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Start addresses, from 0 on, and for each how many bytes can be read, and written."""
    rooms = [0, *(size if isinstance(one, memoryview) else 0 for one, size, _ in ranges)]
    writable = [False, *(writable for *_, writable in ranges)]
    readable = np.array(rooms, np.uint64)
    return np.array([0, *begins], np.uint64), readable, readable * np.array(writable)


def _table(values: Any, depth: int) -> np.ndarray | None:
    """``[n, w]`` uint64 of n integers, or with a depth of 2 of n lists of as many; None if it is
    anything else. What is negative is above 2**63.
    """
    if not isinstance(values, _LISTS) or (
        depth > 1 and not all(isinstance(one, _LISTS) for one in values)
    ):
        return None
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError):  # lists of different lengths, for example
        return None
    if array.dtype.kind not in "iu" or array.ndim != depth or array.size == 0:
        return None
    return array.astype(np.uint64).reshape(len(array), -1)


class _Size(int):
    """What Mooncake has as a method and arrays as an attribute: ``size() == size``."""

    def __call__(self) -> int:
        return int(self)


class BufferHandle(np.ndarray):
    """The bytes of an object, not a copy; read-only. They stay for as long as the handle lives.

    An array, so that it supports the buffer protocol (``memoryview(handle)``, ``np.frombuffer``),
    which a Python class can do by itself only from 3.12 on. It is shown and compared as Mooncake's
    is, which is none; its parts, and what is calculated from it, are plain arrays.
    """

    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__  # type: ignore[assignment]

    def ptr(self) -> int:
        """Address of the bytes."""
        return self.ctypes.data

    @property
    def size(self) -> _Size:
        """Number of bytes, and a method that returns it, as Mooncake's."""
        return _Size(self.nbytes)

    def __bool__(self) -> bool:
        return True  # it exists

    def __repr__(self) -> str:
        return f"<BufferHandle of {self.nbytes} bytes>"

    def __str__(self) -> str:
        return repr(self)

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __getitem__(self, index: Any) -> Any:
        return np.asarray(self)[index]

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return array[()] if return_scalar else array


def handle_of(view: memoryview) -> BufferHandle:
    """Make the handle of a value, which it keeps alive."""
    return np.frombuffer(view, np.uint8).view(BufferHandle)


class MooncakeHostMemAllocator:
    """Allocates memory that engines of this machine copy to and from without a system call.

    Thread-safe. Memory that is not freed lives as long as the process, as Mooncake's does.
    """

    _allocated: ClassVar[dict[int, torch.Tensor]] = {}  # by address, of all allocators
    _lock = threading.Lock()

    def alloc(self, size: int) -> int:
        """Return the address of ``size`` zeroed bytes.

        Raises:
            RuntimeError: the size is not a positive integer, or there is not enough memory.
        """
        try:
            memory = shared_memory(as_natural("size", size, minimum=1))
        except (InvalidArgument, OSError, MemoryError) as error:
            raise RuntimeError(f"alloc: {error}") from error
        with self._lock:
            self._allocated[memory.data_ptr()] = memory
        return memory.data_ptr()

    def free(self, address: int) -> int:
        """Free what ``alloc`` returned, once it is not registered any more.

        Returns:
            0; -1 for any other address.
        """
        with self._lock:
            known = isinstance(address, Integral) and address in self._allocated
            memory = self._allocated.pop(int(address)) if known else None
        if memory is None:
            log.error("free: address must be what alloc has returned, got %.80r", address)
        return -1 if memory is None else 0
