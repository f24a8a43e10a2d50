"""Pools of objects in the memory of one host, which all its processes read and write by themselves,
or in that of a GPU.

Mechanism: it never decides what to evict or when. ``mooncake_serving.store`` does. What holds when
processes die is in docs/store.md.
"""

import os
from typing import Any, Literal, TypeVar

import torch

from . import _host
from ._arguments import as_bool, as_integer, as_one_of
from ._pool_handles import (
    ObjectPut,
    PinnedObject,
    Retention,
    as_position,
    as_retention,
    buffer_of,
    tensor_of,
)
from ._pool_reader import PoolReader
from ._pool_reads import checksum_of, with_buffers
from ._pool_values import (
    END,
    Evicted,
    Key,
    PoolObjects,
    PoolStats,
    PutResult,
    as_key,
    as_keys,
    as_path,
    named_keys,
    object_key,
    object_keys,
)
from .buffers import Buffer

__all__ = [
    "Evicted",
    "Key",
    "ObjectPool",
    "ObjectPut",
    "PinnedObject",
    "PoolObjects",
    "PoolStats",
    "PutResult",
    "Retention",
    "as_keys",
    "checksum_of",
    "named_keys",
    "object_key",
    "object_keys",
]

MAX_OBJECTS = 1 << 30
MAX_DEVICE = (1 << 31) - 1
Self = TypeVar("Self", bound="ObjectPool")


class ObjectPool(PoolReader):
    """Immutable objects under 128-bit keys, in shared memory. A context manager.

    The index, the allocator's state and the bytes lie in one piece of memory, so that a lookup, a
    read or a write is made by whoever wants it, without a server::

        pool = mk.ObjectPool.create(64 << 30, "/dev/shm/kv")       # elsewhere ObjectPool.open(path)
        keys = mk.object_keys(mk.block_hashes(tokens, 256), "llama-70b/rank0")
        num_blocks = pool.match_prefix(keys)
        with pool.pin(keys[0]) as block:                           # stays for as long as this lasts
            cache.copy_(block.tensor(torch.bfloat16))
        if isinstance(put := pool.begin(keys[1], num_bytes), mk.ObjectPut):
            with put:                                              # seen by others at its end
                put.tensor(torch.bfloat16).copy_(cache)

    All methods may be called by many threads. Lookups and pins take no lock. What changes the pool
    waits for its mutex, at most 10 s, which only a process that somebody has stopped (SIGSTOP, a
    debugger) can hold so long: then it raises ``TimeoutError``. In a forked child only lookups
    work: it opens the pool itself. Whoever can open a pool can write all of it: it is for processes
    that trust each other.

    A pool on a GPU (``device``) is of one process. Its index is in the host; puts and gets are
    copies that the driver makes, and kernels read what is pinned, through ``tensor()``.

    Attributes:
        path: where other processes open it.
        capacity_bytes: for objects, each rounded up to ``alignment``.
        alignment: of objects, in bytes.
        device: the GPU in whose memory they are; None: in the host's.
    """

    @classmethod
    def create(
        cls: type[Self],
        capacity_bytes: int,
        path: str | os.PathLike[str] | None = None,
        *,
        alignment: int = 4096,
        num_objects: int | None = None,
        num_processes: int = 64,
        num_pins: int = 4096,
        device: int | None = None,
    ) -> Self:
        """Make an empty pool.

        Args:
            capacity_bytes: of its objects; the memory is larger, by the index.
            path: a file to be made on a memory file system, of which all pages are taken at once,
                and which stays until it is removed. None: memory without a name, taken as it is
                touched; others open ``path`` for as long as this process lives, and it is gone with
                the last that has it open.
            alignment: where objects begin, a power of two from 64 to 2 MiB.
            num_objects: how many there can be; None: one for each 8 units of alignment, at least
                1024. Each costs 160 bytes.
            num_processes: how many can have it open at once.
            num_pins: how many objects each of them can read at once.
            device: a GPU, to have the objects in its memory, which is taken at once; ``path`` is
                None then. Checksums of what does not come from the host cost a copy to it.

        Raises:
            InvalidArgument: a number is out of range, or the path no name of a file.
            OSError: the file is there already, there is not so much memory, ...
            Unavailable, CudaError: of the driver, on a GPU.
        """
        op = "ObjectPool.create"
        capacity_bytes = as_integer(op, "capacity_bytes", capacity_bytes, 1, END - 1)
        alignment = as_integer(op, "alignment", alignment, 64, 2 << 20)
        if num_objects is None:
            num_objects = min(max(1024, capacity_bytes // (8 * alignment)), MAX_OBJECTS)
        numbers = [
            as_integer(op, "num_objects", num_objects, 1, MAX_OBJECTS),
            as_integer(op, "num_processes", num_processes, 1, (1 << 16) - 1),
            as_integer(op, "num_pins", num_pins, 1, 1 << 20),
        ]
        numbers.append(-1 if device is None else as_integer(op, "device", device, 0, MAX_DEVICE))
        file = "" if path is None else as_path(op, path)
        return cls(_host.ObjectPool.create(file, capacity_bytes, alignment, *numbers))

    @classmethod
    def open(cls: type[Self], path: str | os.PathLike[str]) -> Self:
        """Open a pool that a process of this host has made.

        Args:
            path: its ``path``.

        Raises:
            InvalidArgument: the file is no pool, or of one on a GPU, or the path no name of a file.
            Unavailable: its layout is of another version, it is of another pid namespace (a
                container's, where nobody here can tell who has died), or too many have it open.
            OSError: there is no such file, or it is not ours.
        """
        return cls(_host.ObjectPool.open(as_path("ObjectPool.open", path)))

    def begin(
        self,
        key: Key,
        num_bytes: int,
        *,
        checksum: bool = True,
        retention: Retention = "normal",
        position: int = 0,
    ) -> ObjectPut | PutResult:
        """Reserve space for an object, to be written in place.

        Args:
            key: of the object.
            num_bytes: its size.
            checksum: compute its XXH3-64 at the commit.
            retention: "soft": evicted only when all others are; "hard": never.
            position: how many objects of its prompt come before it, for policies that look at it;
                65535 and more count alike.

        Returns:
            The put; or why there is none: ``EXISTS``, ``BEING_WRITTEN`` or ``FULL``.

        Raises:
            InvalidArgument: an argument is wrong, or the object larger than the pool.
        """
        words = as_key("begin", key)
        kind, place = as_retention("begin", retention), as_position("begin", position)
        size = as_integer("begin", "num_bytes", num_bytes, 0, END - 1)
        as_bool("begin", "checksum", checksum)
        result, put = self._pool.begin(*words, size)
        return PutResult(result) if put is None else ObjectPut(put, checksum, kind, place)

    def put_from(
        self,
        key: Key,
        *buffers: Any,
        checksum: bool = True,
        retention: Retention = "normal",
        position: int = 0,
    ) -> PutResult:
        """Store an object: the bytes of all buffers, one behind the other.

        Args:
            key: of the object.
            *buffers: packed memory: tensors, arrays, bytes, anything ``register`` takes. What is on
                a GPU is copied behind all that is in its library's current stream.
            checksum: compute its XXH3-64 while it is copied.
            retention: as in ``begin``.
            position: as in ``begin``.

        Returns:
            ``STORED``, or why it was not.

        Raises:
            InvalidArgument: an argument is wrong, or the object larger than the pool.
            Unavailable, CudaError: of the driver, where a buffer is on a GPU; nothing was stored.
        """
        words = as_key("put_from", key)
        kind, place = as_retention("put_from", retention), as_position("put_from", position)
        as_bool("put_from", "checksum", checksum)
        write = self._pool.write
        return PutResult(
            with_buffers(
                "put_from", buffers, False, lambda held: write(*words, held, checksum, kind, place)
            )
        )

    def remove(self, key: Key) -> bool:
        """Remove an object; who reads it keeps it. Returns whether it was there."""
        return self._pool.remove(*as_key("remove", key))

    def remove_exactly(self, key: Key, object_id: int) -> bool:
        """Remove an object, but not another one that is under its key by now.

        Args:
            key: of the object.
            object_id: of ``ids_of``, ``objects`` or an ``ObjectPut``, after its commit.
        """
        as_key("remove_exactly", key)
        return self._pool.remove_exactly(
            as_integer("remove_exactly", "object_id", object_id, 0, END - 1)
        )

    def retain(self, key: Key, retention: Retention) -> bool:
        """Say how long an object shall stay, see ``begin``. Returns whether it was there."""
        return self._pool.retain(*as_key("retain", key), as_retention("retain", retention))

    def order_uses(self, keys: Any) -> None:
        """Exchange the times at which ``[n, 2]`` objects were last used, so that the first of these
        keys is the oldest. Those that are not there are passed over.

        For what was stored together: ``order_uses(keys[::-1])`` has LRU take the last of a prompt's
        objects before those that it continues.

        Raises:
            TimeoutError: a stopped process holds the pool.
        """
        self._pool.order_uses(as_keys("order_uses", keys))

    def evict(self, num_bytes: int, policy: Literal["lru", "sieve"] = "lru") -> Evicted:
        """Remove objects until there are so many bytes more, not of one piece.

        What somebody reads, what is being written and what is "hard" stays; "soft" goes last.

        Args:
            num_bytes: how many are wanted.
            policy: "lru": exactly what was used longest ago; "sieve": what was not used since a
                hand last passed it (Zhang et al., NSDI 2024).

        Returns:
            What was removed; ``num_bytes`` of it is less than wanted if there was no more.

        Raises:
            InvalidArgument: an argument is wrong.
        """
        size = as_integer("evict", "num_bytes", num_bytes, 0, END - 1)
        sieve = as_one_of("evict", "policy", policy, ("lru", "sieve")) == "sieve"
        return Evicted(*self._pool.evict(size, sieve))

    def evict_keys(self, keys: Any) -> Evicted:
        """Remove those of ``[n, 2]`` objects that nobody reads and that are not "hard"."""
        return Evicted(*self._pool.evict_keys(as_keys("evict_keys", keys)))

    def objects(self) -> PoolObjects:
        """List all objects, for policies that choose by themselves."""
        return PoolObjects(*self._pool.scan())

    def stats(self) -> PoolStats:
        return PoolStats(**self._pool.stats())

    def reap(self) -> int:
        """Take back what processes that have died were reading and writing; returns how many.

        It is done by itself when the pool is opened, when an eviction finds too little, and for a
        key that such a process was writing.
        """
        return self._pool.reap()

    def page_lock(self, device: int | None = None) -> None:
        """Page-lock the bytes of all objects, for this process, until it is done with the pool.

        GPUs copy them by themselves then, many at once, and kernels reach them, so that
        ``copy_blocks`` can fill what ``begin`` has given. It touches every page, and the memory
        cannot be swapped out. Idempotent.

        Args:
            device: the GPU whose context asks for it; it holds for all. None: torch's current one.

        Raises:
            InvalidArgument: the device is not an integer from 0 on, or the pool is on a GPU.
            Unavailable: there is no CUDA driver.
            CudaError: it refuses.
        """
        if device is None:
            device = torch.cuda.current_device() if torch.cuda.is_available() else 0
        self._pool.page_lock(as_integer("page_lock", "device", device, 0, MAX_DEVICE))

    @property
    def buffer(self) -> Buffer:
        """The bytes of all objects, in the host or on a GPU, to be registered."""
        return buffer_of(self._pool, self.capacity_bytes, writable=True)

    def memory(self) -> torch.Tensor:
        """Return the bytes of all objects, ``[capacity_bytes]`` uint8, not a copy.

        Raises:
            Unavailable: they are on a GPU, and torch has no CUDA.
        """
        return tensor_of(self._pool, self.capacity_bytes, torch.uint8)
