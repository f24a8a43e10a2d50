"""A store of two tiers: a pool in memory, and a disk behind it."""

import contextlib
import fcntl
import os
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from mooncake_kernels.buffers import BounceBuffers, as_buffer, copy_from_host
from mooncake_kernels.errors import ChecksumError, InvalidArgument, Unavailable
from mooncake_kernels.pool import (
    Key,
    ObjectPool,
    ObjectPut,
    PinnedObject,
    PutResult,
    as_key,
)

from ..checks import check_pool
from ..eviction import EvictionPolicy
from ..eviction.room import Room
from ..keyspace import StoreKey, StoreKeys
from ..ssd import SsdTier
from ..store import DAMAGED, Store
from .demotion import Demoter, DemotionStats, KeyLocks
from .disk_view import ABSENT, DiskView
from .tiered_room import Demotion, FrequencySketch, TieredRoom

Result = TypeVar("Result")

_FLOCK = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)  # of the first byte
MAX_COUNTED = 1 << 22  # keys whose uses are distinguished: 64 MiB of counts


class PoolLock:
    """Held by one store at a time: what another one removes, this one's disk would still have.

    It ends when it is closed or collected; with the process, or with its last surviving forked
    child. It is not one of ``flock``: those of the pool's file are of its watermarks. A pool
    without a file has none.

    Raises:
        Unavailable: another store has it.
    """

    def __init__(self, pool: ObjectPool):
        self._release: Callable[[], object] = lambda: None
        if pool.path.startswith("/proc/"):
            return
        file = pool.reopen()
        try:
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, _FLOCK)
        except (BlockingIOError, PermissionError):
            os.close(file)
            raise Unavailable(
                f"TieredStore: another one has a disk behind the pool {pool.path!r}"
            ) from None
        self._release = weakref.finalize(self, os.close, file)

    def close(self) -> None:
        """Release it. Idempotent."""
        self._release()


class TieredStore(Store):
    """A ``Store`` whose pool evicts to a disk, and reads objects from there that it does not have.
    All calls and their results are those of ``Store``; an object is there if either tier has it.

    ::

        tier = SsdTier("/mnt/ssd/kv", 1 << 40)
        store = TieredStore.create(64 << 30, "/dev/shm/kv", tier=tier, namespace="llama-70b/rank0")

    ``eviction`` chooses which objects leave the pool. An object is written first, as long as the
    disk has room; then, if it was used ``min_uses`` times recently, a put being one. Objects that
    are already on the disk are evicted at once. A thread writes; a put waits for it only while it
    finds no room. An object that is read from the disk is loaded into the pool first; if there is
    no room in it, or in the quota, the read bypasses the pool, and ``view`` reports that the object
    is not there just now. An object that is verified in the pool and damaged there is read from the
    disk, if that has it.

    One store of a pool has a tier. Others may have ``Store``s on the same pool: they see what
    is in the pool, and what they evict is gone. What they remove is gone from the disk as well.

    Args:
        pool: of ``Store``; ``close()`` closes it.
        tier: behind it; ``close()`` closes it, and so does whatever fails to make the store.
        namespace: of ``Store``.
        min_uses: for objects for which the disk must drop others: 1: write everything that is
            evicted; 2: what was used again, at least once, by any process.
        queue_bytes: how much may wait to be written; what exceeds it is dropped, and counted.
        close_deadline_s: for how long ``close()`` writes what is queued, in seconds.
        **options: of ``Store``.

    Raises:
        InvalidArgument: an argument is wrong.
        Unavailable: another tiered store, of this process or another, is on the pool.
    """

    def __init__(
        self,
        pool: ObjectPool,
        tier: SsdTier,
        *,
        namespace: str = "",
        min_uses: int = 2,
        queue_bytes: int = 256 << 20,
        close_deadline_s: float = 30.0,
        **options: Any,
    ):
        if not isinstance(tier, SsdTier):
            raise InvalidArgument(f"TieredStore: tier must be an SsdTier, got {tier!r}")
        with contextlib.ExitStack() as undo:
            undo.callback(tier.close)
            check_pool("TieredStore", pool)
            if pool.device is not None:
                raise InvalidArgument(
                    f"TieredStore: pool must be in host memory, got one on GPU {pool.device}"
                )
            for name, value in (("min_uses", min_uses), ("queue_bytes", queue_bytes)):
                if not isinstance(value, int) or value < 1:
                    raise InvalidArgument(f"TieredStore: {name} must be at least 1, got {value!r}")
            if not isinstance(close_deadline_s, int | float) or not close_deadline_s >= 0:
                raise InvalidArgument(
                    "TieredStore: close_deadline_s must be a number from 0 on, "
                    f"got {close_deadline_s!r}"
                )
            self.tier = tier
            self._lock = PoolLock(pool)
            undo.callback(self._lock.close)
            self._disk = DiskView(tier, pool)
            self._pid = os.getpid()
            self._moving = KeyLocks()
            self._queue_bytes = queue_bytes
            self._uses = FrequencySketch(min(pool.stats().max_objects, MAX_COUNTED))
            self._puts = KeyLocks()
            self._demoter = Demoter(pool, self._disk, self._puts, queue_bytes)
            undo.callback(self._demoter.close, 0)
            self._close_deadline_s = close_deadline_s
            self._demotion = Demotion(self._disk, self._demoter, self._uses, min_uses)
            super().__init__(pool, namespace=namespace, **options)
            undo.pop_all()

    @classmethod
    def _on(cls, make: Callable[[], ObjectPool], options: Any, new_path: Any = None) -> Store:
        with _closed_on_failure(options.get("tier")):
            return super()._on(make, options, new_path)

    def _make_room(self, eviction: EvictionPolicy, at_least: int) -> Room:
        # The queue must have room for what is evicted at once.
        at_least = min(at_least, self._queue_bytes // 4)
        return TieredRoom(self.pool, eviction, self._disk, self._demotion, self._demoter, at_least)

    @property
    def is_pool_all(self) -> bool:
        return False

    def on_disk(self) -> tuple[np.ndarray, np.ndarray]:
        keys = self._disk.keys_by_use()
        num_bytes = self._disk.num_bytes_each(keys)
        is_there = num_bytes != ABSENT
        return keys[is_there], num_bytes[is_there]

    def bring_up_keys(self, keys: np.ndarray) -> np.ndarray:
        with self._moving.hold(tuple(key) for key in keys.tolist()):
            self._promote_held(keys, self._begin_unless_full)
        return self.pool.contains_each(keys)

    def hide_keys(self, keys: np.ndarray) -> None:
        pairs = [(first, second) for first, second in keys.tolist()]
        with self._moving.hold(pairs):  # they cannot come back meanwhile
            for key in pairs:
                self.pool.remove(key, noted=False)
            self._demoter.discard(pairs)
            is_on_disk = self._disk.contains_each(keys).tolist()
            self._disk.condemn(key for key, there in zip(pairs, is_on_disk, strict=True) if there)

    def record_hidden(self) -> None:
        self._disk.retry_at_once()

    def note_read(self, keys: np.ndarray) -> None:
        self._uses.add(keys)

    def put_key(self, key: Key, *parts: Any, **options: Any) -> PutResult:
        if self._is_on_disk(key):
            return PutResult.EXISTS
        return super().put_key(key, *parts, **options)

    def begin_key(self, key: Key, num_bytes: int, **options: Any) -> ObjectPut | PutResult:
        if self._is_on_disk(key):
            return PutResult.EXISTS
        return super().begin_key(key, num_bytes, **options)

    def _view(self, op: str, key: StoreKey) -> PinnedObject | None:
        return self._or_from_disk(op, key, partial(super()._view, op))

    def pin_key(self, key: Key) -> PinnedObject | None:
        words = _words("pin", key)
        self._uses.add(words)
        pinned = super().pin_key(key)
        while pinned is None and self._promote_one(words):
            pinned = super().pin_key(key)
        return pinned

    def get(self, key: StoreKey) -> bytes | None:
        value = super().get(key)
        if value is not None:
            return value
        past_pool = self._read_past_pool(self.keyspace.row(key, "get"))
        return None if past_pool is None else bytes(past_pool)

    def get_into(self, key: StoreKey, *buffers: Any, offset: int | None = None) -> int | None:
        return self._or_from_disk(
            "get_into", key, lambda again: self._get_into(again, buffers, offset)
        )

    def _get_into(self, key: StoreKey, buffers: Sequence[Any], offset: int | None) -> int | None:
        words = self.keyspace.row(key, "get_into")
        self._uses.add(words)
        size = super().get_into(key, *buffers, offset=offset)
        while size is None and self._promote_one(words):
            size = super().get_into(key, *buffers, offset=offset)
        if size is None and (value := self._read_past_pool(words)) is not None:
            _scatter("get_into", value, buffers, offset)
            size = len(value)
        return size

    def get_into_each(self, keys: StoreKeys, buffers: Sequence[Any]) -> np.ndarray:
        words = self.keyspace.keys(keys, "get_into_each")
        self._uses.add(words)
        sizes = super().get_into_each(keys, buffers)
        was_damaged = sizes == DAMAGED  # in the pool, which no longer has it
        missing = np.flatnonzero(
            ((sizes == ABSENT) | was_damaged) & self._disk.contains_each(words)
        )
        if not len(missing):
            return sizes
        sizes = sizes.copy()
        sizes[missing] = ABSENT
        sizes[missing[self._promote(words[missing])]] = DAMAGED
        for read in (self.pool.get_into_each, self._get_from_disk):
            missing = missing[sizes[missing] == ABSENT][::-1]
            sizes[missing] = read(words[missing], [buffers[i] for i in missing])
        sizes[was_damaged & (sizes == ABSENT)] = DAMAGED
        return sizes

    def num_bytes(self, key: StoreKey) -> int | None:
        # In this order: an object is on the disk before it leaves the pool.
        if (in_pool := super().num_bytes(key)) is not None:
            return in_pool
        on_disk = int(self._disk.num_bytes_each(self.keyspace.row(key, "num_bytes"))[0])
        return None if on_disk == ABSENT else on_disk

    def read_starts(self, keys: np.ndarray, num_bytes: int) -> list[bytes]:
        starts = super().read_starts(keys, num_bytes)  # first, as above
        missing = [i for i, start in enumerate(starts) if not start]
        on_disk = self._disk.read_starts(keys[missing], num_bytes)
        for i, start in zip(missing, on_disk, strict=True):
            starts[i] = start
        return starts

    def exists(self, key: StoreKey) -> bool:
        return bool(self.has_keys(self.keyspace.row(key, "exists"))[0])

    def has_keys(self, keys: np.ndarray, *, or_written: bool = False) -> np.ndarray:
        # In this order: an object is on the disk before it leaves the pool.
        return super().has_keys(keys, or_written=or_written) | self._disk.contains_each(keys)

    def match_keys(self, keys: np.ndarray) -> int:
        num_in_pool = super().match_keys(keys)
        if num_in_pool == len(keys):
            return num_in_pool
        missing = np.flatnonzero(~self.has_keys(keys[num_in_pool:]))
        return num_in_pool + int(missing[0]) if len(missing) else len(keys)

    def ids_of(self, keys: np.ndarray) -> np.ndarray:
        # In this order, again. An object that moves to the disk and back keeps its id.
        return self._disk.ids_of(keys, self.pool.ids_of(keys))

    def list_objects(self) -> tuple[np.ndarray, np.ndarray]:
        # The same; an object in both is listed once.
        keys = np.unique(np.concatenate([self.pool.objects().keys, self._disk.keys()]), axis=0)
        ids = self.ids_of(keys)
        return keys[ids != 0], ids[ids != 0]

    def remove(self, key: StoreKey) -> bool:
        """Remove an object from both tiers; current readers keep it. Returns whether it was there.

        Raises:
            Unavailable: the disk could not be written, where the object still is, or may be found
                after a restart.
        """
        return super().remove(key)

    def remove_key(self, key: Key) -> bool:
        _words("remove", key)
        with self._moving.hold([key]):  # it cannot come back meanwhile
            was_in_pool = self.pool.remove(key, noted=False)  # what is not there is not queued
            self._demoter.discard([key])
            return self._disk.remove(key) or was_in_pool

    def remove_keys(self, keys: np.ndarray) -> np.ndarray:
        pairs = [(first, second) for first, second in keys.tolist()]
        with self._moving.hold(pairs):  # as above
            were_in_pool = np.array([self.pool.remove(key, noted=False) for key in pairs], bool)
            self._demoter.discard(pairs)
            return self._disk.remove_each(pairs) | were_in_pool

    def remove_exactly(self, key: Key, object_id: int) -> bool:
        words = _words("remove_exactly", key)
        with self._moving.hold([key]):
            in_pool = self.pool.ids_of(words)
            is_it = in_pool[0] and self._disk.ids_of(words, in_pool)[0] == object_id
            was_in_pool = bool(is_it) and self.pool.remove_exactly(key, int(in_pool[0]))
            self._demoter.discard([key])
            return self._disk.remove_exactly(key, object_id) or was_in_pool

    def remove_all(self) -> int:
        """Remove the objects of all namespaces, "hard" ones too; returns how many there were."""
        with self._moving.hold_all():
            in_pool = [tuple(key) for key in self.pool.objects().keys.tolist()]
            on_disk = {tuple(key) for key in self._disk.keys().tolist()}
            for key in in_pool:
                self.pool.remove(key, noted=False)
            self._demoter.discard(in_pool)
            self._disk.remove_all()
        return len(on_disk | set(in_pool))

    def demotion_stats(self) -> DemotionStats:
        """Statistics of demotion; see also ``tier.stats()``, and ``stats()`` for the pool."""
        return self._demoter.stats()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until everything evicted so far is on the disk, and durable across a loss of power.

        Objects that are only in the pool stay there.

        Returns:
            Whether that was done within ``timeout_s`` seconds.

        Raises:
            Unavailable: the disk could not be synced.
        """
        if not self._demoter.flush(timeout_s):
            return False
        self._disk.retry()
        self.tier.sync()
        return True

    def close(self) -> None:
        """Write what is queued, then close the tier and the pool. Idempotent.

        In a forked child it does nothing: the writing thread does not exist there.
        """
        if os.getpid() != self._pid:
            return
        if self._watermark is not None:  # it would continue to evict
            self._watermark.close()
        self._demoter.close(self._close_deadline_s)
        self.tier.close()
        self._lock.close()
        super().close()

    def _or_from_disk(self, op: str, key: StoreKey, read: Callable[[StoreKey], Result]) -> Result:
        """Read; if the object was damaged in the pool, and is gone there, read it from the disk."""
        try:
            return read(key)
        except ChecksumError:
            words = _words(op, self.keyspace.key(key, op))
            if not self._disk.contains_each(words)[0]:
                raise
            return read(key)

    def _is_on_disk(self, key: Key) -> bool:
        words = _words("put", key)
        self._uses.add(words)
        return bool(self._disk.contains_each(words)[0])

    def _put(
        self, key: Key, num_bytes: Callable[[], int], attempt: Callable[[], Result]
    ) -> Result | PutResult:
        return super()._put(key, num_bytes, lambda: self._unless_on_disk(key, attempt))

    def _unless_on_disk(self, key: Key, attempt: Callable[[], Result]) -> Result | PutResult:
        """Check the disk and put, while nothing with that key moves from the pool to the disk."""
        with self._puts.hold([key]):
            is_on_disk = self._disk.contains_each(_words("put", key))[0]
            return PutResult.EXISTS if is_on_disk else attempt()

    def _promote_one(self, words: np.ndarray) -> bool:
        """Load an object from the disk; return whether to look again."""
        if self._promote(words).any():
            raise _damaged(words)
        return bool(self.pool.contains_each(words)[0])

    def _read_past_pool(self, words: np.ndarray) -> bytearray | None:
        """Read an object from the disk for which the pool had no room; None if it is not there."""
        num_bytes = int(self._disk.num_bytes_each(words)[0])
        if num_bytes < 0:
            return None
        value = bytearray(num_bytes)
        size = int(self._disk.get_into_each(words, [value])[0])
        if size == DAMAGED:
            raise _damaged(words)
        return value if size == num_bytes else None

    def _get_from_disk(self, words: np.ndarray, buffers: Sequence[Any]) -> np.ndarray:
        bounces = [BounceBuffers([as_buffer(buffer)]) for buffer in buffers]
        sizes = self._disk.get_into_each(words, [bounce.buffers[0] for bounce in bounces])
        for bounce, size in zip(bounces, sizes.tolist(), strict=True):
            bounce.deliver(max(size, 0))
        return sizes

    def _promote(self, words: np.ndarray) -> np.ndarray:
        """Load objects from the disk into the pool, as far as there is room.

        Returns:
            ``[n]`` bool: which are damaged, and are no longer on the disk.
        """
        with self._moving.hold(tuple(key) for key in words.tolist()):
            return self._promote_held(words, self._begin_in_pool)

    def _promote_held(
        self, words: np.ndarray, begin: Callable[..., ObjectPut | PutResult]
    ) -> np.ndarray:
        damaged = np.zeros(len(words), bool)
        puts: list[tuple[int, ObjectPut]] = []
        keys = [(first, second) for first, second in words.tolist()]
        try:
            sizes = self._disk.num_bytes_each(words)
            places = self._disk.positions_each(words)
            for i in np.flatnonzero(sizes >= 0).tolist():
                put = begin(keys[i], int(sizes[i]), position=int(places[i]))
                if isinstance(put, ObjectPut):
                    puts.append((i, put))
            wanted = [i for i, _ in puts]
            sizes = self._disk.get_into_each(words[wanted], [put.view for _, put in puts])
            damaged[wanted] = sizes == DAMAGED
            for (i, put), size in zip(puts, sizes.tolist(), strict=True):
                if size == put.num_bytes:
                    self._disk.note_promoted(keys[i], put.id)
                    put.commit_unless_removed()
        finally:
            for _, put in puts:
                put.abort()  # no effect after a commit
        return damaged

    def _begin_unless_full(
        self, words: Key, num_bytes: int, *, position: int
    ) -> ObjectPut | PutResult:
        begun = self.pool.begin(words, num_bytes, checksum=self._checksum, position=position)
        return self._counted(begun, lambda: num_bytes)

    def _begin_in_pool(self, words: Key, num_bytes: int, *, position: int) -> ObjectPut | PutResult:
        return super()._put(
            words,
            lambda: num_bytes,
            lambda: self.pool.begin(words, num_bytes, checksum=self._checksum, position=position),
        )


@contextlib.contextmanager
def _closed_on_failure(tier: Any) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if isinstance(tier, SsdTier):
            tier.close()
        raise


def _words(op: str, key: Key) -> np.ndarray:
    """``[1, 2]`` of a key, which may be invalid."""
    return np.array([as_key(op, key)], np.uint64)


def _damaged(words: np.ndarray) -> ChecksumError:
    first, second = words[0].tolist()
    return ChecksumError(f"object ({first}, {second}) is not what its checksum says")


def _scatter(op: str, value: bytearray, buffers: Sequence[Any], offset: int | None) -> None:
    """Copy an object, or the part of it from ``offset`` on, into buffers in order.

    Raises:
        InvalidArgument: the buffers are too small, or the requested part is not in the object.
    """
    targets = [
        as_buffer(buffer, argument=f"{op}: buffers[{i}]") for i, buffer in enumerate(buffers)
    ]
    room = sum(target.num_bytes for target in targets)
    if offset is None and room < len(value):
        raise InvalidArgument(f"{op}: buffers must have room for {len(value)} bytes, got {room}")
    if offset is not None and offset + room > len(value):
        raise InvalidArgument(
            f"{op}: offset and buffers must be within the object's {len(value)} bytes, "
            f"got {room} from {offset}"
        )
    copy_from_host(memoryview(value)[offset or 0 :], targets)
