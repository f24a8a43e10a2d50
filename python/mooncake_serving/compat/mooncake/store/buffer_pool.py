"""``BufferPool``: registered memory that is used again, lent by the piece."""

import contextlib
import threading
import time
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_kernels.buffers import shared_memory
from mooncake_kernels.errors import InvalidArgument

from ..codes import as_natural

if TYPE_CHECKING:
    from .distributed_store import MooncakeDistributedStore

_MIN_ALIGNMENT = 8
_MAX_BYTES = 1 << 62


class BufferLease:
    """Memory of a ``BufferPool``, until ``release``, the end of a ``with`` block, or until neither
    it nor a view of its ``buffer`` is left.
    """

    def __init__(self, memory: np.ndarray):
        self._memory: np.ndarray | None = memory
        self._size = memory.nbytes

    @property
    def size(self) -> int:
        """Bytes, as they were asked for."""
        return self._size

    @property
    def ptr(self) -> int:
        """Address, for calls such as ``put_from``. Raises a ``RuntimeError`` once released."""
        if self._memory is None:
            raise RuntimeError("ptr: the buffer lease must not be released, and it is closed")
        return self._memory.ctypes.data

    @property
    def buffer(self) -> memoryview:
        """The bytes, writable. Raises a ``BufferError`` once released."""
        if self._memory is None:
            raise BufferError("buffer: the buffer lease must not be released, and it is closed")
        return self._memory.data

    def release(self) -> None:
        """Give the memory back. Idempotent.

        Raises:
            RuntimeError: there are views of it.
        """
        if self._memory is None:
            return
        memory = weakref.ref(self._memory)
        self._memory = None  # which is the end of it, and gives it back, unless there are views
        self._memory = memory()
        if self._memory is not None:
            raise RuntimeError("release: there must be no exported views of the buffer")

    def __enter__(self) -> "BufferLease":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class BufferPool:
    """Lends memory that is registered with a store, in size classes of powers of two. Thread-safe.

    Args:
        store: that was set up.
        max_bytes: of all memory at once; 0: any.
        min_size_class, max_size_class: bytes. A larger buffer has memory of its own, which is not
            kept; None: all are kept.
        alignment: a power of two; buffers begin at pages, whatever it is.
        block_on_exhaustion: whether ``acquire`` waits for a release when there is no room.
        default_timeout: seconds that it waits; None: as long as it takes.
        max_regions: pieces of memory at once; None: any number.
        prewarm_size, prewarm_count: as ``prewarm``, of ``min_size_class`` if no size is given.

    Raises:
        RuntimeError: an argument is wrong, or there is no room.
    """

    def __init__(
        self,
        store: "MooncakeDistributedStore",
        max_bytes: int = 0,
        min_size_class: int = 64 << 10,
        max_size_class: int | None = None,
        alignment: int = 8 << 20,
        block_on_exhaustion: bool = True,
        default_timeout: float | None = None,
        max_regions: int | None = None,
        prewarm_size: int | None = None,
        prewarm_count: int = 0,
    ):
        self._max_bytes = _number("max_bytes", max_bytes) or _MAX_BYTES
        self._min_class = _number("min_size_class", min_size_class, minimum=1)
        self._max_class = (
            _MAX_BYTES if max_size_class is None else _number("max_size_class", max_size_class)
        )
        _number("alignment", alignment)
        if alignment < _MIN_ALIGNMENT or alignment & (alignment - 1):
            raise RuntimeError(
                f"alignment must be a power of two from {_MIN_ALIGNMENT} on, got {alignment}"
            )
        most_regions = (
            _MAX_BYTES if max_regions is None else _number("max_regions", max_regions, minimum=1)
        )
        self._blocks, self._default_timeout = bool(block_on_exhaustion), default_timeout
        if not callable(getattr(store, "register_buffer", None)) or store.health_check() == 1:
            raise RuntimeError("store must be a MooncakeDistributedStore that is set up")
        self._regions = _Regions(
            store,
            max_bytes=self._max_bytes,
            max_regions=most_regions,
            max_kept=self._max_class,
        )
        # A pool that is dropped must not leave memory registered that is then unmapped.
        weakref.finalize(self, self._regions.close).atexit = False
        try:
            self.prewarm(self._min_class if prewarm_size is None else prewarm_size, prewarm_count)
        except BaseException:
            self._regions.close()
            raise

    def acquire(
        self, size: int, block: bool | None = None, timeout: float | None = None
    ) -> BufferLease:
        """Lend memory of ``size`` bytes, which has its previous contents.

        Args:
            size: bytes.
            block: whether to wait when there is no room; None: as the pool.
            timeout: seconds to wait; None: as the pool.

        Raises:
            RuntimeError: there is no room, not in time, or never; the pool is closed.
        """
        num_bytes = _number("size", size)
        needed = self._class_of(num_bytes)
        if needed > self._max_bytes:
            raise RuntimeError(f"acquire: size must fit into the pool's capacity, got {size}")
        timeout = self._default_timeout if timeout is None else timeout
        if timeout is not None and not timeout >= 0:
            raise RuntimeError(f"acquire: timeout must be non-negative, got {timeout!r}")
        may_wait = self._blocks if block is None else block
        region = self._regions.lend(needed, 0.0 if not may_wait else timeout)
        memory = region[:num_bytes]
        weakref.finalize(memory, self._regions.give_back, region).atexit = False
        return BufferLease(memory)

    buffer = acquire

    def prewarm(self, size: int, count: int) -> None:
        """Make ``count`` pieces of memory of ``size`` bytes that ``acquire`` finds ready.

        Raises:
            RuntimeError: there is no room, or the pool is closed.
        """
        with contextlib.ExitStack() as leases:
            for _ in range(_number("count", count)):
                leases.enter_context(self.acquire(size, block=False))

    def close(self) -> None:
        """Give all memory back to the system. Idempotent.

        Raises:
            RuntimeError: some is lent.
        """
        self._regions.close(refuse_leases=True)

    def _class_of(self, num_bytes: int) -> int:
        size = max(num_bytes, self._min_class, 1)
        return size if size > self._max_class else min(1 << (size - 1).bit_length(), _MAX_BYTES)


class _Regions:
    """The registered memory of a pool. Leases refer to it, not to the pool, which may end first."""

    def __init__(
        self,
        store: "MooncakeDistributedStore",
        *,
        max_bytes: int,
        max_regions: int,
        max_kept: int,
    ):
        self._store = store
        self._max_bytes, self._max_regions, self._max_kept = max_bytes, max_regions, max_kept
        self._changed = threading.Condition()  # reentrant: a lease may end while the lock is held
        self._idle: list[np.ndarray] = []
        self._num_bytes = self._num_regions = self._num_leases = 0
        self._is_closed = False

    def lend(self, needed: int, timeout_s: float | None) -> np.ndarray:
        """Return memory of that many bytes, once there is room; None: wait as long as it takes."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while (region := self._take(needed)) is None:
                left_s = None if until_s is None else until_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    raise RuntimeError("acquire: the pool is exhausted: all of it is lent")
                self._changed.wait(left_s)
            self._num_leases += 1
        return region

    def give_back(self, region: np.ndarray) -> None:
        """End a lease."""
        with self._changed:
            self._num_leases -= 1
            if region.nbytes > self._max_kept or self._is_closed:
                self._drop(region)
            else:
                self._idle.append(region)
            self._changed.notify_all()

    def close(self, *, refuse_leases: bool = False) -> None:
        """Give the memory back to the system; what is lent follows when its lease ends."""
        with self._changed:
            if refuse_leases and self._num_leases:
                raise RuntimeError(
                    f"close: the pool must have no active leases, got {self._num_leases}"
                )
            self._is_closed = True
            while self._idle:
                self._drop(self._idle.pop())

    def _take(self, needed: int) -> np.ndarray | None:
        """Memory of that many bytes; None if there is no room."""
        if self._is_closed:
            raise RuntimeError("acquire: the buffer pool is closed")
        for i in reversed(range(len(self._idle))):
            if self._idle[i].nbytes == needed:
                return self._idle.pop(i)
        while self._idle and not self._has_room(needed):
            self._drop(self._idle.pop(0))
        return self._new(needed) if self._has_room(needed) else None

    def _has_room(self, needed: int) -> bool:
        return self._num_bytes + needed <= self._max_bytes and self._num_regions < self._max_regions

    def _new(self, num_bytes: int) -> np.ndarray:
        try:
            region = shared_memory(num_bytes).numpy()
        except (InvalidArgument, OSError, MemoryError, RuntimeError) as error:
            raise RuntimeError(f"acquire: {num_bytes} bytes exceed the capacity: {error}") from None
        if self._store.register_buffer(region.ctypes.data, num_bytes) != 0:
            raise RuntimeError("acquire: the store must register memory, and does not: see the log")
        self._num_bytes += num_bytes
        self._num_regions += 1
        return region

    def _drop(self, region: np.ndarray) -> None:
        if self._store.health_check() != 1:  # a store that is closed has forgotten it
            self._store.unregister_buffer(region.ctypes.data)
        self._num_bytes -= region.nbytes
        self._num_regions -= 1


def _number(argument: str, value: Any, *, minimum: int = 0) -> int:
    try:
        return as_natural(argument, value, minimum=minimum)
    except InvalidArgument as error:
        raise RuntimeError(str(error)) from None
