"""What an ``ObjectPool`` gives out: an object that is read, and one that is written."""

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal

import torch

from . import _host
from ._arguments import as_instance, as_integer, as_one_of
from ._closing import Closing
from ._pool_values import END
from .buffers import Buffer, copy_to_host, place_of
from .errors import ChecksumError, InvalidArgument, Unavailable

Retention = Literal["normal", "soft", "hard"]

MAX_POSITION = (1 << 16) - 1
RETENTIONS: tuple[Retention, ...] = ("normal", "soft", "hard")  # as csrc/store/layout.h counts them


def as_retention(op: str, retention: Any) -> int:
    """How the host code calls it."""
    return RETENTIONS.index(as_one_of(op, "retention", retention, RETENTIONS))


def as_position(op: str, position: Any) -> int:
    """How the host code keeps it: in 16 bits."""
    return min(as_integer(op, "position", position, 0, END - 1), MAX_POSITION)


Native = _host.ObjectPool | _host.ObjectPin | _host.ObjectPut


class _OnGpu:
    """Bytes on a GPU, which their native handle keeps there, as CUDA libraries take them."""

    def __init__(self, native: Native, num_bytes: int):
        self._native = native
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (native.address, False),  # torch takes none that are said to be read-only
            "version": 3,
            "stream": None,  # who wrote them has waited
        }


def buffer_of(native: Native, num_bytes: int, *, writable: bool) -> Buffer:
    """Bytes that a native handle keeps where they are."""
    if native.device < 0:
        return Buffer(native.address, num_bytes, "cpu:0", writable, native)
    owner = _OnGpu(native, num_bytes)
    return Buffer(native.address, num_bytes, f"cuda:{native.device}", writable, owner)


def tensor_of(native: Native, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
    """The same as a tensor."""
    if native.device < 0:
        return torch.frombuffer(native, dtype=dtype)
    if not torch.cuda.is_available():
        raise Unavailable("tensor: the bytes are on a GPU, and torch has no CUDA")
    whole = torch.as_tensor(_OnGpu(native, num_bytes), device=f"cuda:{native.device}")
    return whole.view(dtype)


class _Bytes:
    """An object in the memory of its pool, which the native handle keeps there."""

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
        # Of the handle itself: a tensor would not notice that a memoryview was released.
        return tensor_of(native, self.num_bytes, dtype)

    def _release(self) -> None:
        if self._view is not None:
            with contextlib.suppress(BufferError):  # arrays have it
                self._view.release()


class PinnedObject(_Bytes, Closing):
    """An object that is read where it is: what ``ObjectPool.pin`` returns. A context manager.

    While it is pinned its bytes stay as they are, also if the object is removed or evicted. The pin
    ends with ``close()``, or with the last of the views, arrays and tensors made of it, whichever
    is later; and with the process.

    Attributes:
        num_bytes: size of the object.
        device: the GPU in whose memory it is; None: in the host's.
        checksum: XXH3-64 that it was stored with, see ``checksum()``; None if it has none.
    """

    def __init__(self, pin: _host.ObjectPin):
        super().__init__(pin)
        self.checksum: int | None = pin.checksum or None
        self._pin: _host.ObjectPin | None = pin

    @property
    def view(self) -> memoryview:
        """The bytes where they are, not a copy; read-only. Not of what is on a GPU."""
        return self._view_of(self._pin)

    @property
    def buffer(self) -> Buffer:
        """The bytes where they are, in the host or on a GPU, for all that takes memory."""
        return self._buffer_of(self._pin)

    def to_bytes(self) -> bytes:
        """Return a copy of the bytes.

        Raises:
            InvalidArgument: the object was closed.
            CudaError: of the driver, where it is on a GPU.
        """
        if self.device is None:
            return bytes(self.view)
        return copy_to_host([self.buffer]).tobytes()

    def tensor(self, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Return the bytes as a tensor, not a copy, which must not be written to.

        On a GPU the object must not be closed, nor the tensor forgotten, before the kernels that
        read it are done.

        Args:
            dtype: of its elements.

        Returns:
            ``[num_bytes / itemsize]``, on the pool's device.

        Raises:
            InvalidArgument: the size is no multiple of the item's, or the object was closed.
            Unavailable: it is on a GPU, and torch has no CUDA.
        """
        return self._tensor(self._pin, dtype)

    def verify(self) -> None:
        """Compare the bytes with the checksum that they were stored with, if there is one.

        Raises:
            ChecksumError: they are not the same any more.
            InvalidArgument: the object was closed.
        """
        if self._pin is None:
            raise InvalidArgument("verify: the object must be open, got one that was closed")
        if not self._pin.is_whole():
            raise ChecksumError("verify: the object is not what its checksum says")

    def close(self) -> None:
        """Give up the object; ``view`` cannot be used any more. Idempotent."""
        self._release()
        self._pin = None


class ObjectPut(_Bytes):
    """An object that is being written: what ``ObjectPool.begin`` returns. A context manager.

    Nobody sees it before ``commit()``, which the end of a ``with`` block calls, unless by an
    exception; then, or when it is dropped, or when the process dies, its space is free again. What
    is written to ``view`` and ``tensor()`` after that is an error that nobody notices.

    Attributes:
        num_bytes: size of the object.
        id: tells it from all others, see ``PoolObjects.ids``.
        device: the GPU in whose memory it is; None: in the host's.
        is_open: whether it was neither committed nor aborted.
        on_commit: called after the commit, if it is not None.
    """

    on_commit: Callable[[], None] | None = None

    def __init__(self, put: _host.ObjectPut, checksum: bool, retention: int, position: int):
        super().__init__(put)
        self.id = put.id
        self._put: _host.ObjectPut | None = put
        self._checksum = checksum
        self._retention = retention
        self._position = position

    @property
    def view(self) -> memoryview:
        """The bytes where they are, to be written. Not of what is on a GPU."""
        return self._view_of(self._put)

    @property
    def buffer(self) -> Buffer:
        """The bytes where they are, in the host or on a GPU, to be written."""
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
            InvalidArgument: the size is no multiple of the item's, or the put is over.
            Unavailable: it is on a GPU, and torch has no CUDA.
        """
        return self._tensor(self._put, dtype)

    def commit(self) -> None:
        """Let everybody see the object, which does not change any more.

        On a GPU it first waits for all that is in torch's current stream.

        Raises:
            InvalidArgument: the put is over, or another process's.
            TimeoutError: a stopped process holds the pool.
            CudaError: of the driver, on a GPU; the put is still open.
        """
        if self._put is None:
            raise InvalidArgument("commit: put must be open, got one that was committed or aborted")
        stream = 0 if self.device is None else place_of(self.buffer)[3]
        self._put.commit(self._checksum, self._retention, self._position, stream)
        self._end()
        if self.on_commit is not None:
            self.on_commit()

    def abort(self) -> None:
        """Give the space back, as if there had been no put. Idempotent; nothing after a commit."""
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
