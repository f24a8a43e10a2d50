"""Registrations that are kept after use."""

import array
import os
import threading
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from .. import _host
from .._arguments import as_instance, as_integer, as_one_of
from ..buffers import Buffer, as_buffer
from ..closeable import Closeable
from ..errors import InvalidArgument
from ._handles import require_verbs
from .device import Device
from .region import (
    ACCESS,
    LOCAL_WRITE,
    MAPPINGS,
    RELAXED_ORDERING,
    Access,
    Mapping,
    Region,
    device_handles,
)

_Key = tuple[int, int, int]


class _LeasedRegion(Region):
    def __del__(self) -> None:
        """Close nothing: the cache keeps the registration."""

    def close(self) -> None:
        """Do nothing: the cache and other leases have the same registration."""


class Lease(Closeable):
    """Memory in use: registered at least until this is closed.

    Attributes:
        regions: one per device, in the cache's order. They contain the memory asked for, and
            possibly more. Closing one does nothing: others may have leased it, too.
    """

    def __init__(
        self,
        handle: Any,
        devices: Sequence[Device],
        buffer: Buffer,
        access: int,
        forgetful: Any = None,
    ):
        self._handle = handle
        self._forgetful = forgetful  # a cache that must not keep it
        self._span = buffer.address, buffer.num_bytes
        covered = Buffer(
            handle.address, handle.num_bytes, buffer.location, buffer.writable, buffer.owner
        )
        self.regions: list[Region] = [
            _LeasedRegion(region, device, covered, access)
            for region, device in zip(handle.regions, devices, strict=True)
        ]

    def __del__(self) -> None:
        """Release memory before it is freed, if the lease was dropped without ``close()``."""
        if hasattr(self, "regions"):
            self.close()

    def close(self) -> None:
        """Return it to the cache, and hold the memory no longer. Idempotent."""
        self._handle.close()
        if self._forgetful is not None:
            self._forgetful.invalidate(*self._span)
            self._forgetful = None
        for region in self.regions:
            region._buffer = None  # only now: nothing else might hold it


class _Spans:
    """Keys of memory, found by where it is: a walk of all of them would slow down each first lease.

    Attributes:
        gone: keys to be removed. Whoever frees memory appends to it, which needs no lock: a
            finalizer may run in a thread that holds the lock.
    """

    def __init__(self) -> None:
        self.gone: deque[_Key] = deque()
        self._lock = threading.Lock()
        # Those of at most twice the size in one list, as (address, bytes, owner), sorted: what
        # overlaps a span begins in it, or before it by less than the largest size.
        self._by_size: dict[int, list[tuple[int, ...]]] = {}

    def add(self, key: _Key) -> None:
        owner, address, num_bytes = key
        with self._lock:
            self._remove_gone()
            spans = self._by_size.setdefault(num_bytes.bit_length(), [])
            insort(spans, (address, num_bytes, owner))

    def overlapping(self, begin: int, end: int) -> list[_Key]:
        found = []
        with self._lock:
            self._remove_gone()
            for num_bits, spans in self._by_size.items():
                first = bisect_left(spans, (begin - (1 << num_bits),))
                for address, num_bytes, owner in spans[first : bisect_left(spans, (end,))]:
                    if begin < address + num_bytes:
                        found.append((owner, address, num_bytes))
        return found

    def _remove_gone(self) -> None:
        while self.gone:
            owner, address, num_bytes = self.gone.popleft()
            spans, span = self._by_size.get(num_bytes.bit_length(), []), (address, num_bytes, owner)
            i = bisect_left(spans, span)
            if spans[i : i + 1] == [span]:
                del spans[i]


class RegistrationCache(Closeable):
    """Registers memory on first use, and keeps it registered while its bounds allow.

    Finding a range that a registered one covers takes some microseconds of Python, instead of a
    call to the kernel for each NIC. Unleased registrations are evicted, least recently used first,
    when the bounds are reached, or when no more memory can be locked.

    Freed memory must not be found again, at the same address with other pages behind it. The cache
    ensures that for torch tensors (their storage), numpy arrays and other objects that support weak
    references: when they are gone, or another object owns memory that overlaps theirs (a mapping
    where a closed one was), registrations that overlap their memory are dropped. Memory of other
    objects, or of those that move it (a bytearray, an ``array.array``), is registered only while it
    is leased. For GPU memory it asks the driver at each lease whether the address still belongs to
    the same allocation. If you free memory in other ways (``resize_()`` of a tensor's storage,
    ``resize()`` of a mapping), or lease a ``Buffer`` without an owner, call ``invalidate()`` first.

    Thread-safe: a thread that asks for a range that is being registered waits for it.

    Args:
        devices: NICs to register each range on, on all or none.
        access: of all its regions; see ``rdma.register()``. All buffers must be writable.
        mapping, relaxed_ordering: likewise.
        max_bytes, max_regions: how much may stay registered; leases may exceed it.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        access: Access = "remote_read_write",
        *,
        mapping: Mapping = "auto",
        relaxed_ordering: bool = True,
        max_bytes: int = 1 << 40,
        max_regions: int = 4096,
    ):
        require_verbs()
        op, most = "RegistrationCache", (1 << 63) - 1
        as_one_of(op, "access", access, tuple(ACCESS))
        as_instance(op, "relaxed_ordering", relaxed_ordering, bool, "True or False")
        relaxed = RELAXED_ORDERING if relaxed_ordering else 0
        self._devices = list(devices) if isinstance(devices, Iterable) else [devices]
        self._flags = ACCESS[access] | LOCAL_WRITE | relaxed
        self._handle = _host.RdmaRegistrationCache(
            device_handles(op, self._devices),
            self._flags,
            MAPPINGS.index(as_one_of(op, "mapping", mapping, MAPPINGS)),
            as_integer(op, "max_bytes", max_bytes, 0, most),
            as_integer(op, "max_regions", max_regions, 0, most),
        )
        # By the identity of the memory's owner, and its address and size.
        self._watched: dict[_Key, weakref.finalize] = {}
        self._spans = _Spans()  # of the same
        self._pid = os.getpid()

    def __del__(self) -> None:
        """Close it here: the compiled code's destructor would hold the GIL in the verbs."""
        if hasattr(self, "_watched"):
            self.close()

    def lease(self, buffer: Any) -> Lease:
        """Return the memory registered; close the lease when its transfers are done.

        Raises:
            InvalidArgument: an empty or read-only buffer, or a closed cache.
            Unavailable, OSError: as ``rdma.register()``.
        """
        memory = as_buffer(buffer)
        if not memory.writable:
            raise InvalidArgument("lease: buffer must be writable, got read-only")
        if memory.is_host:
            self._forget_earlier(memory)
        handle = self._handle.acquire(memory.address, memory.num_bytes)
        keep = self._watch(memory) if memory.is_host else True
        return Lease(handle, self._devices, memory, self._flags, None if keep else self._handle)

    def invalidate(self, buffer: Any) -> int:
        """Drop registrations that overlap memory about to be freed; leases keep theirs.

        Args:
            buffer: an object with memory, or (address, bytes).

        Returns:
            How many were dropped.
        """
        if isinstance(buffer, tuple):
            if len(buffer) != 2:
                raise InvalidArgument(f"invalidate: buffer must be (address, bytes), got {buffer}")
            values = [as_integer("invalidate", "buffer", v, 0, (1 << 63) - 1) for v in buffer]
            return self._handle.invalidate(*values)
        memory = as_buffer(buffer)
        return self._handle.invalidate(memory.address, memory.num_bytes)

    def stats(self) -> dict[str, int]:
        """Return hits, misses, evictions, invalidations; current regions, leased ones, bytes."""
        return self._handle.stats()

    def close(self) -> None:
        """Deregister all; leased regions stay until their lease ends. Idempotent."""
        for finalizer in list(self._watched.values()):
            finalizer.detach()
        self._watched.clear()
        self._handle.close()

    def _forget_earlier(self, memory: Buffer) -> None:
        """Drop what is registered there for other owners, unless this one is known to be there.

        They may live and yet have given up the memory, as a closed mmap. If not, this costs a miss.
        """
        if memory.owner is None:
            return
        owner, begin, num_bytes = _storage(memory)
        if (id(owner), begin, num_bytes) in self._watched:
            return
        if os.getpid() != self._pid:
            return  # acquire() refuses it, and a thread of the parent may have held the lock
        end, others = begin + num_bytes, False
        for known, address, size in self._spans.overlapping(begin, end):
            if known != id(owner):
                others = True
            elif address <= begin and end <= address + size:
                return
        if others:
            self._handle.invalidate(begin, num_bytes)

    def _watch(self, memory: Buffer) -> bool:
        """Whether it may stay registered, because the cache will learn when it is freed."""
        if memory.owner is None:
            return True  # addresses only: whoever frees them calls invalidate()
        owner, address, num_bytes = _storage(memory)
        if isinstance(owner, array.array):
            return False  # moves its memory when it grows
        key = id(owner), address, num_bytes
        if key in self._watched:
            return True
        handle = weakref.ref(self._handle)  # the memory must not keep the cache alive
        try:
            finalizer = weakref.finalize(
                owner, _forget, handle, self._watched, self._spans.gone, key
            )
        except TypeError:
            return False
        finalizer.atexit = False
        self._spans.add(key)
        self._watched[key] = finalizer
        return True


def _forget(
    handle: "weakref.ref[Any]",
    watched: dict[_Key, weakref.finalize],
    gone: deque[_Key],
    key: _Key,
) -> None:
    watched.pop(key, None)
    gone.append(key)
    cache = handle()
    if cache is not None:
        cache.invalidate(key[1], key[2])


def _storage(memory: Buffer) -> tuple[Any, int, int]:
    """The owner of the memory: (object, address, bytes) of all of it."""
    owner = memory.owner
    while True:
        if isinstance(owner, torch.Tensor):
            owner = owner.untyped_storage()
        if isinstance(owner, torch.UntypedStorage):
            return owner, owner.data_ptr(), owner.nbytes()
        # A memoryview of an array, a view of another, that of a tensor...
        below = owner.obj if isinstance(owner, memoryview) else getattr(owner, "base", None)
        if below is None:
            break
        owner = below
    if isinstance(owner, np.ndarray):
        return owner, owner.ctypes.data, owner.nbytes
    return owner, memory.address, memory.num_bytes
