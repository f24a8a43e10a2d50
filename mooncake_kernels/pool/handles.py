"""The objects an ``ObjectPool`` returns: to read an object, to write one, and to watch them all."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch

from .. import _host
from .._arguments import as_instance, as_integer, as_integers, as_one_of
from .._host import ObjectPuts as ObjectPuts
from ..buffers import Buffer, copy_to_host, place_of
from ..closeable import Closeable
from ..errors import ChecksumError, InvalidArgument, Unavailable, shown
from .values import END

Retention = Literal["normal", "soft", "hard"]

MAX_POSITION = (1 << 16) - 1
RETENTIONS: tuple[Retention, ...] = ("normal", "soft", "hard")  # numbered as in csrc/store/layout.h


def as_retention(op: str, retention: Any) -> int:
    """The host code's number for it."""
    if type(retention) is str and retention in RETENTIONS:
        return RETENTIONS.index(retention)
    return RETENTIONS.index(as_one_of(op, "retention", retention, RETENTIONS))


def as_position(op: str, position: Any) -> int:
    """The host code's 16-bit form of it."""
    if type(position) is int and 0 <= position <= MAX_POSITION:
        return position
    return min(as_integer(op, "position", position, 0, END - 1), MAX_POSITION)


def as_positions(op: str, num_objects: int, positions: Any) -> np.ndarray:
    """The host code's form of ``[n]`` of them, or of none."""
    places = as_integers(op, "positions", positions, "[n]")
    if places.shape not in ((num_objects,), (0,)):
        raise InvalidArgument(
            f"{op}: positions must be [n] for {num_objects} keys, or none, got shape {places.shape}"
        )
    return np.minimum(places, MAX_POSITION).astype(np.uint16)


Native = _host.ObjectPool | _host.ObjectPin | _host.ObjectPut


class _OnGpu:
    """Bytes on a GPU, kept there by their native handle, as CUDA libraries take them."""

    def __init__(self, native: Native, num_bytes: int):
        self._native = native
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (native.address, False),  # torch refuses read-only memory
            "version": 3,
            "stream": None,  # the writer has already waited
        }


def buffer_of(native: Native, num_bytes: int, *, writable: bool) -> Buffer:
    """The bytes of a native handle, in place."""
    if native.device < 0:
        return Buffer(native.address, num_bytes, "cpu:0", writable, native)
    owner = _OnGpu(native, num_bytes)
    return Buffer(native.address, num_bytes, f"cuda:{native.device}", writable, owner)


def tensor_of(native: Native, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
    """The same bytes as a tensor."""
    if native.device < 0:
        return torch.frombuffer(native, dtype=dtype)
    if not torch.cuda.is_available():
        raise Unavailable("tensor: the bytes are on a GPU, and torch has no CUDA")
    whole = torch.as_tensor(_OnGpu(native, num_bytes), device=f"cuda:{native.device}")
    return whole.view(dtype)


class _Bytes:
    """An object in its pool's memory, kept there by the native handle."""

    def __init__(self, native: _host.ObjectPin | _host.ObjectPut):
        self.num_bytes = native.num_bytes
        self.device: int | None = None if native.device < 0 else native.device
        self._view: memoryview | None = None

    def _buffer_of(self, native: _host.ObjectPin | _host.ObjectPut | None) -> Buffer:
        if native is None:
            raise InvalidArgument("buffer: the object must be open, got one that was closed")
        return buffer_of(native, self.num_bytes, writable=isinstance(native, _host.ObjectPut))

    def _view_of(self, native: _host.ObjectPin | _host.ObjectPut | None) -> memoryview:
        if native is None:
            raise InvalidArgument("view: the object must be open, got one that was closed")
        if self.device is not None:
            raise InvalidArgument(
                f"view: the object must be in host memory, got one on GPU {self.device}"
            )
        if self._view is None:
            view = memoryview(native)
            self._view = view if isinstance(native, _host.ObjectPut) else view.toreadonly()
        return self._view

    def _tensor(
        self, native: _host.ObjectPin | _host.ObjectPut | None, dtype: torch.dtype
    ) -> torch.Tensor:
        if native is None:
            raise InvalidArgument("tensor: the object must be open, got one that was closed")
        as_instance("tensor", "dtype", dtype, torch.dtype, "a torch.dtype")
        if self.num_bytes == 0:
            return torch.empty(0, dtype=dtype)
        if self.num_bytes % dtype.itemsize:
            raise InvalidArgument(
                f"tensor: dtype must divide the object's {self.num_bytes} bytes, got {dtype}"
            )
        # From the handle itself: a tensor would not notice that a memoryview was released.
        return tensor_of(native, self.num_bytes, dtype)

    def _release(self) -> None:
        if self._view is not None:
            with contextlib.suppress(BufferError):  # arrays still export it
                self._view.release()


class PinnedObject(_Bytes, Closeable):
    """An object read in place: what ``ObjectPool.pin`` returns. A context manager.

    While it is pinned its bytes do not change, even if the object is removed or evicted. The pin
    ends with ``close()``, or with the last of the views, arrays and tensors made from it, whichever
    is later; and when the process ends.

    Attributes:
        num_bytes: size of the object.
        device: the GPU that holds it; None: it is in host memory.
        checksum: the XXH3-64 it was stored with, see ``checksum()``; None if it has none.
        position: in its prompt, as its writer gave it.
    """

    def __init__(self, pin: _host.ObjectPin):
        super().__init__(pin)
        self.checksum: int | None = pin.checksum or None
        self.position: int = pin.position
        self._pin: _host.ObjectPin | None = pin

    @property
    def view(self) -> memoryview:
        """The bytes in place, read-only, without a copy. Not for an object on a GPU."""
        return self._view_of(self._pin)

    @property
    def buffer(self) -> Buffer:
        """The bytes in place, in host or GPU memory, for any call that takes memory."""
        return self._buffer_of(self._pin)

    def to_bytes(self) -> bytes:
        """Return a copy of the bytes.

        Raises:
            InvalidArgument: the object was closed.
            CudaError: from the driver, if it is on a GPU.
        """
        if self.device is None:
            return bytes(self.view)
        return copy_to_host([self.buffer]).tobytes()

    def tensor(self, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Return the bytes as a tensor without a copy; do not write to it.

        On a GPU, do not close the object or drop the tensor before the kernels that read it are
        done.

        Args:
            dtype: of its elements.

        Returns:
            ``[num_bytes / itemsize]``, on the pool's device.

        Raises:
            InvalidArgument: the size is not a multiple of the item size, or the object was closed.
            Unavailable: it is on a GPU, and torch has no CUDA.
        """
        return self._tensor(self._pin, dtype)

    def verify(self) -> None:
        """Compare the bytes with the checksum they were stored with, if there is one.

        Raises:
            ChecksumError: they differ.
            InvalidArgument: the object was closed.
        """
        if self._pin is None:
            raise InvalidArgument("verify: the object must be open, got one that was closed")
        if not self._pin.is_whole():
            raise ChecksumError("verify: the object is not what its checksum says")

    def close(self) -> None:
        """Unpin the object; ``view`` is invalid afterwards. Idempotent."""
        self._release()
        self._pin = None


class ObjectPut(_Bytes):
    """An object being written: what ``ObjectPool.begin`` returns. A context manager.

    It is invisible to others before ``commit()``, which a ``with`` block calls at its end. If the
    block raises, the put is dropped, or the process dies, its space is freed. Writing to ``view``
    or ``tensor()`` after that, or after the commit, is an error that is not detected.

    Attributes:
        num_bytes: size of the object.
        id: identifies it among all objects, see ``PoolObjects.ids``.
        device: the GPU that holds it; None: it is in host memory.
        is_open: whether it was neither committed nor aborted.
    """

    def __init__(self, put: _host.ObjectPut, checksum: bool, retention: int, position: int):
        super().__init__(put)
        self.id = put.id
        self._put: _host.ObjectPut | None = put
        self._checksum = checksum
        self._retention = retention
        self._position = position

    @property
    def view(self) -> memoryview:
        """The bytes in place, for writing. Not for an object on a GPU."""
        return self._view_of(self._put)

    @property
    def buffer(self) -> Buffer:
        """The bytes in place, in host or GPU memory, for writing."""
        return self._buffer_of(self._put)

    @property
    def is_open(self) -> bool:
        return self._put is not None

    def tensor(self, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Return the bytes to be written as a tensor.

        Args:
            dtype: of its elements.

        Returns:
            ``[num_bytes / itemsize]``.

        Raises:
            InvalidArgument: the size is not a multiple of the item size, or the put has ended.
            Unavailable: it is on a GPU, and torch has no CUDA.
        """
        return self._tensor(self._put, dtype)

    def commit(self) -> None:
        """Make the object visible to all; it does not change any more.

        On a GPU it first waits for the work queued in torch's current stream.

        Raises:
            InvalidArgument: the put has ended, or belongs to another process.
            TimeoutError: a stopped process holds the pool.
            CudaError: from the driver, on a GPU; the put is still open.
        """
        self._commit(unless_removed=False)

    def commit_unless_removed(self) -> bool:
        """Do the same with a copy of what exists elsewhere; but abort, and return False, if its key
        was removed since the put began, by any process. Requires ``keep_removals``.
        """
        return self._commit(unless_removed=True)

    def _commit(self, *, unless_removed: bool) -> bool:
        if self._put is None:
            raise InvalidArgument("commit: put must be open, got one that was committed or aborted")
        stream = 0 if self.device is None else place_of(self.buffer)[3]
        is_there = self._put.commit(
            self._checksum, self._retention, self._position, stream, unless_removed
        )
        self._end()
        return is_there

    def abort(self) -> None:
        """Free the space, as if there had been no put. Idempotent; no effect after a commit."""
        if self._put is not None:
            self._put.abort()
            self._end()

    def _end(self) -> None:
        self._put = None
        self._release()

    def __enter__(self) -> "ObjectPut":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.abort()
        elif self._put is not None:
            self.commit()


@dataclass(frozen=True)
class PoolChanges:
    """What differs between two looks at a pool. A key in both was removed, and then stored again.

    Attributes:
        removed: ``[n, 2]`` uint64 keys.
        stored: ``[n, 2]`` uint64 keys.
    """

    removed: np.ndarray
    stored: np.ndarray


class PoolWatch:
    """What ``ObjectPool.watch`` returns. Thread-safe."""

    def __init__(self, pool: _host.ObjectPool, is_closed: Callable[[], bool]):
        self._path = pool.path
        self._is_closed = is_closed
        self._native = _host.PoolWatch(pool)

    def look(self) -> PoolChanges:
        """Return what came and went since the last look; the first time, everything that is there.

        An object that came and went in between is not reported. It takes no lock if there was no
        change, and else time for each change; after more than 65,536, for each object that the pool
        has room for.

        Raises:
            InvalidArgument: the pool was closed.
            TimeoutError: a stopped process holds the pool; the next look reports everything.
        """
        if self._is_closed():
            raise InvalidArgument(f"look: pool must be open, got the closed {shown(self._path)}")
        return PoolChanges(*self._native.look())
