"""``ObjectPool``: objects in one host's shared memory, or in GPU memory."""

import logging
import os
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch

from .. import _host
from .._arguments import as_bool, as_integer, as_integers, as_one_of, as_seconds
from ..buffers import Buffer, with_buffers
from ..closeable import Closeable
from ..errors import InvalidArgument, shown
from .handles import (
    ObjectPut,
    PinnedObject,
    PoolWatch,
    Retention,
    as_position,
    as_positions,
    as_retention,
    buffer_of,
    tensor_of,
)
from .values import (
    END,
    ClosedPool,
    Evicted,
    Key,
    PoolCounts,
    PoolObjects,
    PoolStats,
    PutResult,
    as_group,
    as_headed,
    as_key,
    as_keys,
    as_offset,
    as_path,
    as_user,
    file_system_of,
)

logger = logging.getLogger("mooncake_kernels")

IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs", "devtmpfs")
LIMIT_S = 10.0  # of waiting for the pool's mutex
MAX_OBJECTS = 1 << 30
MAX_DEVICE = (1 << 31) - 1
RESULTS = tuple(PutResult)  # by their values
Self = TypeVar("Self", bound="ObjectPool")


class ObjectPool(Closeable):
    """Immutable objects under 128-bit keys, in shared memory. A context manager.

    The index, the allocator's state and the bytes share one piece of memory. Each process looks
    up, reads and writes by itself, without a server::

        pool = mk.ObjectPool.create(64 << 30, "/dev/shm/kv")       # elsewhere ObjectPool.open(path)
        keys = mk.object_keys(mk.block_hashes(tokens, 256), "llama-70b/rank0")
        num_blocks = pool.match_prefix(keys)
        with pool.pin(keys[0]) as block:                           # not evicted inside the block
            cache.copy_(block.tensor(torch.bfloat16))
        if isinstance(put := pool.begin(keys[1], num_bytes), mk.ObjectPut):
            with put:                                              # visible to others at its end
                put.tensor(torch.bfloat16).copy_(cache)

    Thread-safe. Lookups and pins take no lock. A change waits for the pool's mutex, at most 10 s,
    then raises ``TimeoutError``: only a process that was stopped (SIGSTOP, a debugger) can hold it
    that long. In a forked child only lookups work; the child must open the pool itself. Any process
    that can open a pool can write all of it: share it only among processes that trust each other.
    What damages a pool nevertheless is a ``PoolDamaged`` of any call.

    A pool on a GPU (``device``) belongs to one process. Its index is in host memory. Puts and gets
    are copies made by the driver; kernels read pinned objects through ``tensor()``.

    Attributes:
        path: where other processes open it.
        capacity_bytes: for objects, each rounded up to ``alignment``.
        alignment: of objects, in bytes.
        num_pins: how many objects this process can read at once.
        device: the GPU that holds the objects; None: they are in host memory.
        native: the pool of the host code, which checks no arguments.
    """

    def __init__(self, native: _host.ObjectPool | None = None):
        if not isinstance(native, _host.ObjectPool):
            raise InvalidArgument(
                "ObjectPool: make one by ObjectPool.create(capacity_bytes) or "
                f"ObjectPool.open(path), got {shown(native)}"
            )
        self.path = native.path
        self.capacity_bytes = native.capacity_bytes
        self.alignment = native.alignment
        self.num_pins = native.num_pins
        self.device: int | None = None if native.device < 0 else native.device
        self.native = native

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
        group: int | str | None = None,
    ) -> Self:
        """Create an empty pool.

        Args:
            capacity_bytes: for objects; the pool also needs memory for its index.
            path: a file to create on a memory file system; on another, a warning is logged, see
                docs/store/store.md. All its pages are allocated at once, and it stays until it is
                removed. None: anonymous memory, allocated as it is touched;
                other processes open ``path`` while this process lives, and the memory is freed when
                the last of them closes it.
            alignment: where objects begin, a power of two from 64 to 2 MiB.
            num_objects: the most objects it can hold; None: one for each 8 units of alignment, at
                least 1024. Each costs 160 bytes.
            num_processes: how many can have it open at once.
            num_pins: how many objects each of them can read at once.
            device: a GPU to hold the objects, in memory allocated at once; ``path`` must then be
                None. The checksum of an object that does not come from the host costs a copy to it.
                CUDA is initialized in this process, if it is not yet: in a child forked after that
                it is a CudaError.
            group: whose members may open it, too, by naming it and this process's user: a name or
                an id. The file's mode is then 0660, and otherwise 0600. Only with a path.

        Raises:
            InvalidArgument: a number is out of range, the path cannot be a file name, or the group
                is unknown.
            OSError: the file exists, there is not enough memory, the user is not in the group, ...
            Unavailable, CudaError: from the driver, on a GPU.
        """
        op = "ObjectPool.create"
        capacity_bytes = as_integer(op, "capacity_bytes", capacity_bytes, 1, END - 1)
        alignment = as_integer(op, "alignment", alignment, 64, 2 << 20)
        if num_objects is None:
            num_objects = min(max(1024, capacity_bytes // (8 * alignment)), MAX_OBJECTS)
        num_objects = as_integer(op, "num_objects", num_objects, 1, MAX_OBJECTS)
        num_processes = as_integer(op, "num_processes", num_processes, 1, (1 << 16) - 1)
        num_pins = as_integer(op, "num_pins", num_pins, 1, 1 << 20)
        gpu = -1 if device is None else as_integer(op, "device", device, 0, MAX_DEVICE)
        file = "" if path is None else as_path(op, path)
        if not file and group is not None:
            raise InvalidArgument(f"{op}: group must be None without a path, got {group!r:.80}")
        shared = as_group(op, group)
        made = _host.ObjectPool.create(
            file, capacity_bytes, alignment, num_objects, num_processes, num_pins, gpu, shared
        )
        pool = cls(made)
        kind = file_system_of(file) if file else None
        if kind is not None and kind not in IN_MEMORY:
            logger.warning(
                "%s: %s is on %s, not in memory: remove it after a restart of the host, "
                "which leaves in it what happened to be written",
                op, pool.path, kind,
            )  # fmt: skip
        return pool

    @classmethod
    def open(
        cls: type[Self],
        path: str | os.PathLike[str],
        *,
        owner: int | str | None = None,
        group: int | str | None = None,
    ) -> Self:
        """Open a pool created by a process of this host.

        Whoever owns or may write a pool's file reads what is stored in it, and decides what others
        read. So it must be a file, not a link, that belongs to this process's user and that no one
        else can write, unless they are named here.

        Args:
            path: the pool's ``path``.
            owner: the user, a name or an id, whose file it is. None: this process's.
            group: the group, a name or an id, whose members may write it, too. None: no one may.

        Raises:
            InvalidArgument: the file is not a pool, or is one on a GPU, or the path cannot be a
                file name; or others own it, may write it, or have another name for it.
            PoolDamaged: the file is a pool that contradicts itself.
            Unavailable: the pool has another layout version or belongs to another pid namespace (a
                container's, whose dead processes cannot be detected here), or too many have it
                open.
            OSError: the file does not exist or is not accessible.
        """
        op = "ObjectPool.open"
        trusted = as_user(op, owner), as_group(op, group)
        return cls(_host.ObjectPool.open(as_path(op, path), *trusted))

    def contains(self, key: Key) -> bool:
        """Tell whether an object can be read. Does not count as a use."""
        return self.native.contains(*as_key("contains", key))

    def contains_each(self, keys: Any, *, or_written: bool = False) -> np.ndarray:
        """Tell which of ``[n, 2]`` keys are present: ``[n]`` bool. ``or_written``: or are being
        written, by any living process.
        """
        as_bool("contains_each", "or_written", or_written)
        return self.native.contains_each(as_keys("contains_each", keys), or_written)

    def ids_of(self, keys: Any) -> np.ndarray:
        """Return the ids of the objects under ``[n, 2]`` keys: ``[n]`` uint64, see
        ``PoolObjects.ids``; 0 where there is none.
        """
        return self.native.ids_of(as_keys("ids_of", keys))

    def match_prefix(self, keys: Any) -> int:
        """Count the leading ``[n, 2]`` keys that are present, up to the first that is not.

        Equivalent to::

            count = 0
            while count < n and pool.contains(keys[count]):
                count += 1

        No promise: objects may be evicted before they are pinned.
        """
        return self.native.match_prefix(as_keys("match_prefix", keys))

    def pin(self, key: Key, *, touch: bool = True) -> PinnedObject | None:
        """Pin an object for reading in place; None if there is none.

        Args:
            key: of the object.
            touch: whether it counts as a use: False for whoever manages objects, and is not the
                reader they are kept for.

        Raises:
            InvalidArgument: an argument is wrong.
            Unavailable: this process already reads ``num_pins`` objects.
        """
        as_bool("pin", "touch", touch)
        pin = self.native.pin(*as_key("pin", key), touch)
        return None if pin is None else PinnedObject(pin)

    def get_into(
        self, key: Key, *buffers: Any, offset: int | None = None, verify: bool = False
    ) -> int | None:
        """Copy an object, or a part of it, into consecutive buffers. Counts as a use.

        Args:
            key: of the object.
            *buffers: packed, writable memory. Without an offset they take the whole object and may
                be larger. The copy to a GPU runs after the work queued in its library's current
                stream, and is done when this returns.
            offset: where in the object to begin; then all buffers are filled.
            verify: compare the whole object with the checksum it was stored with, if any.

        Returns:
            Size of the object; None if there is none.

        Raises:
            InvalidArgument: the buffers are too small, or the range is not inside the object.
            ChecksumError: the object is damaged. Nothing of it is in the buffers, which have zeros
                instead if they and the pool are all in host memory.
            Unavailable, CudaError: from the driver, if a buffer is on a GPU.
        """
        words, native = as_key("get_into", key), self.native
        start = None if offset is None else as_offset(offset)
        if type(verify) is not bool:
            as_bool("get_into", "verify", verify)
        return with_buffers("get_into", buffers, True, partial(native.read, *words, start), verify)

    def get_into_each(self, keys: Any, buffers: Any, *, verify: bool = False) -> np.ndarray:
        """Copy many whole objects, each into its own buffer, in one call.

        Args:
            keys: ``[n, 2]``.
            buffers: n pieces of packed, writable memory, see ``get_into``, each at least as large
                as its object.
            verify: as in ``get_into``, as is what buffers of damaged objects hold.

        Returns:
            ``[n]`` int64: sizes of the objects; -1 where there is none, -2 where the buffer is too
            small, -4 where the object is damaged.

        Raises:
            InvalidArgument: an argument is wrong.
        """
        words, read_each = as_keys("get_into_each", keys), self.native.read_each
        as_bool("get_into_each", "verify", verify)
        try:
            num_buffers = len(buffers)
        except TypeError:
            raise InvalidArgument(
                f"get_into_each: buffers must be a list of buffers, got {shown(buffers)}"
            ) from None
        if num_buffers != len(words):
            raise InvalidArgument(
                f"get_into_each: buffers must be as many as keys, got {num_buffers} and "
                f"{len(words)}"
            )
        return with_buffers("get_into_each", buffers, True, partial(read_each, words), verify)

    def get_headed(
        self,
        keys: Any,
        heads: Sequence[bytes],
        addresses: Any,
        sizes: Any,
        *,
        free: tuple[int, int] = (0, 0),
        verify: bool = False,
    ) -> np.ndarray:
        """Copy what follows the heads of many objects into host memory given by address, in one
        call. Of a pool in host memory.

        Args:
            keys: ``[n, 2]``.
            heads: n of them, what each object must begin with.
            addresses: ``[n, w]``: up to w places for each object, which are filled in order and may
                be larger. That they are valid is not checked.
            sizes: ``[n, w]``: their bytes, 0 for none.
            free: where heads may differ, from and to.
            verify: as in ``get_into_each``.

        Returns:
            ``[n]`` int64: how many bytes follow; -1, -2, -4: as ``get_into_each``; -5: the object
            begins differently, and nothing was copied.

        Raises:
            InvalidArgument: an argument is wrong; nothing was copied.
            Unavailable: this process already reads ``num_pins`` objects.
        """
        op, native = "get_headed", self.native
        words = as_keys(op, keys)
        as_bool(op, "verify", verify)
        placed = as_headed(op, len(words), heads, addresses, sizes)
        if self.device is not None:
            raise InvalidArgument(
                f"{op}: pool must be in host memory, got one on GPU {self.device}"
            )
        begin, end = free
        if not 0 <= begin <= end <= min(map(len, heads), default=end):
            raise InvalidArgument(f"{op}: free must be a range within each head, got {free}")
        return native.read_headed(words, placed[0], free, *placed[1:], verify)

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
            retention: "soft": evicted only after all others; "hard": never evicted.
            position: how many objects of its prompt precede it, for policies that use it; 65535
                and more count alike.

        Returns:
            The put; or why there is none: ``EXISTS``, ``BEING_WRITTEN`` or ``FULL``.

        Raises:
            InvalidArgument: an argument is wrong, or the object is larger than the pool.
        """
        words = as_key("begin", key)
        kind, place = as_retention("begin", retention), as_position("begin", position)
        size = as_integer("begin", "num_bytes", num_bytes, 0, END - 1)
        as_bool("begin", "checksum", checksum)
        result, put = self.native.begin(*words, size)
        return RESULTS[result] if put is None else ObjectPut(put, checksum, kind, place)

    def put_from(
        self,
        key: Key,
        *buffers: Any,
        checksum: bool = True,
        retention: Retention = "normal",
        position: int = 0,
    ) -> PutResult:
        """Store an object: the bytes of all buffers, concatenated.

        Args:
            key: of the object.
            *buffers: packed memory: tensors, arrays, bytes, anything ``register`` takes. GPU memory
                is copied after the work queued in its library's current stream.
            checksum: compute its XXH3-64 during the copy.
            retention: as in ``begin``.
            position: as in ``begin``.

        Returns:
            ``STORED``, or why it was not.

        Raises:
            InvalidArgument: an argument is wrong, or the object is larger than the pool.
            Unavailable, CudaError: from the driver, if a buffer is on a GPU; nothing was stored.
        """
        words = as_key("put_from", key)
        kind, place = as_retention("put_from", retention), as_position("put_from", position)
        if type(checksum) is not bool:
            as_bool("put_from", "checksum", checksum)
        write = partial(self.native.write, *words)
        return RESULTS[with_buffers("put_from", buffers, False, write, checksum, kind, place)]

    def put_headed(
        self,
        keys: Any,
        heads: Sequence[bytes],
        addresses: Any,
        sizes: Any,
        *,
        checksum: bool = True,
        retention: Retention = "normal",
        positions: Any = (),
    ) -> list[PutResult]:
        """Store many objects, each a head and host memory given by address, in one call; in their
        order.

        Args:
            keys: ``[n, 2]``.
            heads: n of them, what each object begins with.
            addresses: ``[n, w]``: up to w places of what follows. That they are valid is not
                checked.
            sizes: ``[n, w]``: their bytes, 0 for none.
            checksum: as in ``put_from``.
            retention: as in ``begin``.
            positions: ``[n]``, each as in ``begin``; none: 0 for all.

        Returns:
            For each object what ``put_from`` returns, up to the first that is ``FULL``, or cannot
            be put: to put the rest then says why.

        Raises:
            InvalidArgument: an argument is wrong, or the first object is larger than the pool.
            TimeoutError: a stopped process holds the pool.
        """
        op = "put_headed"
        words, kind = as_keys(op, keys), as_retention(op, retention)
        as_bool(op, "checksum", checksum)
        placed = as_headed(op, len(words), heads, addresses, sizes)
        order = as_positions(op, len(words), positions)
        results = self.native.write_headed(words, *placed, checksum, kind, order)
        return [RESULTS[result] for result in results]

    def remove(self, key: Key, *, noted: bool = True) -> bool:
        """Remove an object; its readers keep it. Returns whether it was there.

        Args:
            key: of the object.
            noted: tell who keeps removals, also if it was not there, see ``keep_removals``.
        """
        as_bool("remove", "noted", noted)
        return self.native.remove(*as_key("remove", key), noted)

    def remove_each(self, keys: Any) -> np.ndarray:
        """Remove ``[n, 2]`` objects at once, see ``remove``: ``[n]`` bool, which were there."""
        return self.native.remove_each(as_keys("remove_each", keys))

    def remove_exactly(self, key: Key, object_id: int) -> bool:
        """Remove an object, unless its key has another object by now. It is not noted.

        Args:
            key: of the object.
            object_id: from ``ids_of``, ``objects`` or, after its commit, an ``ObjectPut``.
        """
        as_key("remove_exactly", key)
        return self.native.remove_exactly(
            as_integer("remove_exactly", "object_id", object_id, 0, END - 1)
        )

    def retain(self, key: Key, retention: Retention) -> bool:
        """Set how long an object stays, see ``begin``. Returns whether it was there."""
        return self.native.retain(*as_key("retain", key), as_retention("retain", retention))

    def keep_removals(self) -> int:
        """Have the pool keep the keys that its processes ``remove``, from now on.

        For a process that has objects elsewhere, too, as on a disk, and must not give out what
        others have removed. Removals are numbered; the pool keeps the last 16,383. What a process
        has not dealt with by its death, the next one is told.

        Returns:
            The number of the first removal that has not been dealt with.
        """
        self.native.keep_removals()
        return self.native.first_removal

    @property
    def removals_end(self) -> int:
        """The number of the next removal."""
        return self.native.removals_end

    def removals_from(self, number: int) -> tuple[np.ndarray | None, int]:
        """Return the keys, ``[n, 2]``, that were removed from this number on, and the number of the
        next removal. None: some are not kept any more, or all objects were removed.
        """
        return self.native.removals_from(as_integer("removals_from", "number", number, 0, END - 1))

    def forget_removals(self, end: int) -> None:
        """Record that the removals before this number have been dealt with."""
        self.native.forget_removals(as_integer("forget_removals", "end", end, 0, END - 1))

    def note_all_removed(self) -> None:
        """Note that all objects were removed."""
        self.native.note_all_removed()

    def order_uses(self, keys: Any) -> None:
        """Swap the last-use times of ``[n, 2]`` objects so that the first of these keys is the
        oldest. Absent ones are skipped.

        For objects stored together: after ``order_uses(keys[::-1])`` LRU evicts the last objects of
        a prompt before the ones they continue. In SIEVE's queue only objects that arrived lately
        exchange their places.

        Raises:
            TimeoutError: a stopped process holds the pool.
        """
        self.native.order_uses(as_keys("order_uses", keys))

    def evict(self, num_bytes: int, policy: Literal["lru", "sieve"] = "lru") -> Evicted:
        """Remove objects until ``num_bytes`` more are free, not necessarily contiguous.

        Objects being read or written and "hard" ones stay; "soft" ones go last.

        Args:
            num_bytes: how many are wanted.
            policy: "lru": exact least recently used; "sieve": not used since the hand last passed
                it (Zhang et al., NSDI 2024).

        Returns:
            What was removed; its ``num_bytes`` is less than wanted if there was no more.

        Raises:
            InvalidArgument: an argument is wrong.
        """
        return Evicted(*self.native.evict(*_as_eviction("evict", num_bytes, policy)))

    def victims(self, num_bytes: int, policy: Literal["lru", "sieve"] = "lru") -> PoolObjects:
        """Return the objects that ``evict`` would remove, in that order; all stay.

        For who has something to do before they go, by ``evict_keys``. SIEVE's hand moves on as if
        they had gone, so that the next call continues with others.
        """
        return PoolObjects(*self.native.victims(*_as_eviction("victims", num_bytes, policy)))

    def evict_keys(self, keys: Any, ids: np.ndarray | None = None) -> Evicted:
        """Remove those of ``[n, 2]`` objects that have no reader and are not "hard".

        Args:
            keys: of the objects.
            ids: ``[n]`` uint64: what is under a key stays if it has another id. None: it goes.
        """
        words = as_keys("evict_keys", keys)
        if ids is not None:
            ids = np.ascontiguousarray(as_integers("evict_keys", "ids", ids, "[n]"))
            if ids.shape != (len(words),):
                raise InvalidArgument(
                    f"evict_keys: ids must be [{len(words)}], got shape {ids.shape}"
                )
        return Evicted(*self.native.evict_keys(words, ids))

    def set_quota(self, scope: int, num_bytes: int = 0, num_objects: int = 0) -> bool:
        """Remember what the objects of a scope may take, for all processes. The pool itself does
        not keep to it: who puts does, as ``Store``.

        Args:
            scope: the second word of their keys.
            num_bytes: at most; 0 for no limit.
            num_objects: likewise; if both are 0, the quota is forgotten.

        Returns:
            False: there are 64 quotas of other scopes, and no room for more.
        """
        limits = (scope, num_bytes, num_objects)
        names = ("scope", "num_bytes", "num_objects")
        return self.native.set_quota(
            *(as_integer("set_quota", n, x, 0, END - 1) for n, x in zip(names, limits, strict=True))
        )

    def quotas(self) -> dict[int, tuple[int, int]]:
        """The quotas that are set: bytes and objects by scope, 0 for no limit."""
        return {scope: tuple(limits) for scope, *limits in self.native.quotas()}  # type: ignore[misc]

    def objects(self) -> PoolObjects:
        """List all objects, for policies that choose victims themselves."""
        return PoolObjects(*self.native.scan())

    def watch(self) -> PoolWatch:
        """Watch which objects come and go, whichever process stores and removes them."""
        return PoolWatch(self.native, lambda: self.closed)

    def stats(self, timeout_s: float = LIMIT_S) -> PoolStats:
        """Describe the pool.

        Args:
            timeout_s: how long to wait for a process that changes the pool, at most 10 s.

        Raises:
            TimeoutError: the process still has the pool: it was stopped.
        """
        timeout_s = as_seconds("stats", "timeout_s", timeout_s, minimum=0.0)
        return PoolStats(**self.native.stats(min(timeout_s, LIMIT_S)))

    def counts(self) -> PoolCounts:
        """Return what all processes have done with the pool since it was made. Takes no lock.

        A read is counted once its bytes are there, and so are a pin and a pin that finds nothing,
        unless they do not count as a use; ``contains``, ``match_prefix`` and the like are not. The
        call during which a process is killed may be missing.
        """
        return PoolCounts(**self.native.counts())

    def reap(self) -> int:
        """Reclaim what dead processes were reading and writing; returns how many.

        This also happens when the pool is opened, when an eviction frees too little, and for a key
        that a dead process was writing.
        """
        return self.native.reap()

    def page_lock(self, device: int | None = None) -> None:
        """Page-lock the bytes of all objects, for this process, until it closes the pool.

        GPUs then copy them directly, many at once, and kernels can access them, so ``copy_blocks``
        can fill what ``begin`` returned. It touches every page, and the memory cannot be swapped
        out. Idempotent.

        Args:
            device: the GPU whose context makes the call; it holds for all GPUs. None: torch's
                current one. CUDA is initialized in this process, if it is not yet: in a child
                forked after that it is a CudaError.

        Raises:
            InvalidArgument: the device is not an integer from 0 on, or the pool is on a GPU.
            Unavailable: there is no CUDA driver.
            CudaError: the driver refuses.
        """
        if device is None:
            device = torch.cuda.current_device() if torch.cuda.is_available() else 0
        self.native.page_lock(as_integer("page_lock", "device", device, 0, MAX_DEVICE))

    def reopen(self) -> int:
        """Open the pool's memory again, whatever has become of its path; for locks on it.

        Returns:
            A file descriptor, which the caller closes.

        Raises:
            OSError: there is none left, or access to the file was taken away.
        """
        return self.native.reopen()

    @property
    def buffer(self) -> Buffer:
        """The bytes of all objects, in host or GPU memory, for registering."""
        return buffer_of(self.native, self.capacity_bytes, writable=True)

    def memory(self) -> torch.Tensor:
        """Return the bytes of all objects, ``[capacity_bytes]`` uint8, without a copy.

        Raises:
            Unavailable: they are on a GPU, and torch has no CUDA.
        """
        return tensor_of(self.native, self.capacity_bytes, torch.uint8)

    def close(self) -> None:
        """Stop using the pool; open pins and puts remain valid until they end. Idempotent."""
        self.native = cast(_host.ObjectPool, ClosedPool(self.path))

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return isinstance(self.native, ClosedPool)


def _as_eviction(op: str, num_bytes: Any, policy: Any) -> tuple[int, bool]:
    """The arguments of ``evict``, as the host code takes them."""
    size = as_integer(op, "num_bytes", num_bytes, 0, END - 1)
    return size, as_one_of(op, "policy", policy, ("lru", "sieve")) == "sieve"
