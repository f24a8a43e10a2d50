"""The store of one host: a pool, with keys scoped by namespace, that makes room for puts."""

import os
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from mooncake_kernels.buffers import Buffer, as_buffer, as_writable, with_buffers
from mooncake_kernels.closeable import Closeable
from mooncake_kernels.errors import ChecksumError, InvalidArgument, Unavailable
from mooncake_kernels.pool import (
    Evicted,
    Key,
    ObjectPool,
    ObjectPut,
    ObjectPuts,
    PinnedObject,
    PoolStats,
    PutResult,
    Retention,
)

from .checks import (
    check_bool,
    check_number,
    check_pairs,
    check_pool,
    check_share,
    is_whole,
)
from .eviction import EvictionPolicy, check_eviction, lru, sieve
from .eviction.room import Room
from .keyspace import Keyspace, StoreKey, StoreKeys
from .quotas import Quota, QuotaKeeper, Usage, quotas_of
from .watermark import Watermark

Result = TypeVar("Result")
ABSENT, DAMAGED = -1, -4  # of ObjectPool.get_into_each
REMOVED_AT_ONCE = 256  # objects, by remove_all


class Store(Closeable):
    """KV objects of a host, shared by all processes that open its pool. A context manager.

    Objects do not change: the first put of a key wins, and later ones return ``EXISTS``. A put that
    finds no room evicts. A key is a prefix hash of ``block_hashes``, or any string.

    Args:
        pool: where the objects are; ``close()`` closes it.
        namespace: objects of other namespaces are not visible: tenant, model, layout, rank.
        eviction: how room is made: ``lru``, ``sieve``, ``lfu``, ``length_aware``,
            ``largest_first``, or a function like them.
        evict_ratio: minimum share of the pool that is evicted at once, so that not every put into a
            full pool has to evict: 0 to 1; of the objects, if it is the index that is full. None:
            0.002 where the store is made with ``lru`` or ``sieve``, which costs hardly any
            time or hits; 0.01 with other policies, which look at all objects for each eviction.
        watermark: ``(high, low)``: a thread evicts down to ``low`` when more than ``high`` of the
            pool, or of its index, is used, see ``Watermark``. None: only puts evict.
        quota: limit of the namespace in the pool, see ``Quota``; its keys are then prefix hashes
            only, since a name hides which namespace it belongs to. None: that which the pool
            remembers, if any, see ``set_quota``.
        checksum: keep an XXH3-64 of each object, computed while it is copied.
        verify: the share of reads that compare it, 0 to 1. That costs little where the object is
            copied, and a pass over its bytes where it is not: ``view``, parts of it, GPUs.

    Attributes:
        pool: where the objects are.
        keyspace: how callers' keys become keys of the pool.

    Raises:
        InvalidArgument: a number is not between 0 and 1, or an argument of another type.
    """

    def __init__(
        self,
        pool: ObjectPool,
        *,
        namespace: str = "",
        eviction: EvictionPolicy = lru,
        evict_ratio: float | None = None,
        watermark: tuple[float, float] | None = None,
        quota: Quota | None = None,
        checksum: bool = True,
        verify: float = 1.0,
    ):
        check_pool("Store", pool)
        check_eviction(eviction)
        if evict_ratio is None:
            evict_ratio = 0.002 if eviction in (lru, sieve) else 0.01
        check_share("Store", "evict_ratio", evict_ratio)
        check_bool("Store", "checksum", checksum)
        check_share("Store", "verify", verify)
        if not isinstance(quota, Quota | None):
            raise InvalidArgument(f"Store: quota must be a Quota or None, got {quota!r}")
        if watermark is not None and not (isinstance(watermark, Sequence) and len(watermark) == 2):
            raise InvalidArgument(f"Store: watermark must be (high, low), got {watermark!r}")
        self.pool = pool
        self.keyspace = Keyspace(namespace)
        self._verify = verify
        self._room = self._make_room(eviction, int(evict_ratio * pool.capacity_bytes))
        quotas = quotas_of(pool)
        if quota is not None:
            quotas[self.keyspace.scope] = quota
        self._quotas = {
            scope: QuotaKeeper(pool, scope, limit, self._room.evict_by)
            for scope, limit in quotas.items()
        }
        self._quota = self._quotas.get(self.keyspace.scope)
        self._checksum = checksum
        self._watermark = None if watermark is None else Watermark(self, *watermark)

    def _make_room(self, eviction: EvictionPolicy, at_least: int) -> Room:
        return Room(self.pool, eviction, at_least)

    @classmethod
    def create(
        cls,
        capacity_bytes: int,
        path: str | os.PathLike[str] | None = None,
        *,
        device: int | None = None,
        group: int | str | None = None,
        **options: Any,
    ) -> "Store":
        """Make the pool too, see ``ObjectPool.create``; other processes call ``Store.open``."""
        create = partial(ObjectPool.create, capacity_bytes, path, device=device, group=group)
        return cls._on(create, options, new_path=path)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        owner: int | str | None = None,
        group: int | str | None = None,
        **options: Any,
    ) -> "Store":
        """Open a pool that another process of this host has made, see ``ObjectPool.open``."""
        return cls._on(partial(ObjectPool.open, path, owner=owner, group=group), options)

    @classmethod
    def _on(cls, make: Callable[[], ObjectPool], options: Any, new_path: Any = None) -> "Store":
        """Make a pool, and the store; if that fails, the pool is closed, and a new file removed."""
        pool = make()
        try:
            return cls(pool, **options)
        except BaseException:
            pool.close()
            if new_path is not None:
                os.unlink(new_path)
            raise

    def get(self, key: StoreKey) -> bytes | None:
        """Return a copy of an object; None if there is none.

        Raises:
            ChecksumError: it was verified and is damaged; it was removed.
        """
        pinned = self._view("get", key)
        if pinned is None:
            return None
        with pinned:
            return pinned.to_bytes()

    def view(self, key: StoreKey) -> PinnedObject | None:
        """Return an object in place, without a copy; None if there is none.

        Raises:
            ChecksumError: as in ``get``.
        """
        return self._view("view", key)

    def _view(self, op: str, key: StoreKey) -> PinnedObject | None:
        words = self.keyspace.key(key, op)
        pinned = self.pin_key(words)
        if pinned is not None and random.random() < self._verify:
            try:
                pinned.verify()
            except ChecksumError:
                pinned.close()
                self.remove_damaged(words)
                raise
        return pinned

    def pin_key(self, key: Key) -> PinnedObject | None:
        """Do the same with a key of the pool, of any namespace; nothing is verified."""
        return self.pool.pin(key)

    def get_into(self, key: StoreKey, *buffers: Any, offset: int | None = None) -> int | None:
        """Copy an object, or the part of it from ``offset`` on, see ``ObjectPool.get_into``.

        A part that is verified costs a look at the whole object: for many of one, see ``view``.

        Raises:
            ChecksumError: as in ``get``; for what buffers hold then see ``ObjectPool.get_into``.
        """
        words = self.keyspace.key(key, "get_into")
        if offset is not None:
            check_number("get_into", "offset", offset)
            offset = int(offset)
        read = partial(self.pool.native.read, *words, offset)
        try:
            return with_buffers("get_into", buffers, True, read, random.random() < self._verify)
        except ChecksumError:
            self.remove_damaged(words)
            raise

    def get_each(self, keys: StoreKeys) -> list[bytes | None]:
        """Return copies of many objects, see ``get_into_each``."""
        self.keyspace.keys(keys, "get_each")
        return [self.get(key) for key in reversed(list(keys))][::-1]

    def get_into_each(self, keys: StoreKeys, buffers: Sequence[Any]) -> np.ndarray:
        """Copy many objects, each into its buffer, in one call.

        They are read from the last to the first, so that the tail of a prefix is the least recently
        used: LRU evicts it before the head, without which the tail is useless.

        Args:
            keys: n of them.
            buffers: n of packed, writable memory, each at least as large as its object.

        Returns:
            ``[n]`` int64: sizes of the objects; -1 where there is none, -2 where the buffer is too
            small, -4 where the object was verified and damaged; it was removed.

        Raises:
            InvalidArgument: an argument is wrong; nothing was copied.
        """
        check_pairs("get_into_each", "buffers", keys, buffers)
        key_array = self.keyspace.keys(keys, "get_into_each")[::-1]
        verify = random.random() < self._verify
        held = list(buffers)
        try:
            sizes = self.pool.get_into_each(key_array, held[::-1], verify=verify)
        except InvalidArgument:  # it has counted them from the last on
            as_writable("get_into_each", held)
            raise
        for first, second in key_array[sizes == DAMAGED].tolist():
            self.remove_damaged((first, second))
        return sizes[::-1]

    def num_bytes(self, key: StoreKey) -> int | None:
        """Size of an object, which is not compared with its checksum; None if there is none."""
        pinned = self.pool.pin(self.keyspace.key(key, "num_bytes"))
        if pinned is None:
            return None
        with pinned:
            return pinned.num_bytes

    def exists(self, key: StoreKey) -> bool:
        return self.pool.contains(self.keyspace.key(key, "exists"))

    def exists_each(self, keys: StoreKeys) -> np.ndarray:
        """Return which of n keys are there: ``[n]`` bool."""
        return self.has_keys(self.keyspace.keys(keys, "exists_each"))

    def match_prefix(self, keys: StoreKeys) -> int:
        """Count the leading keys that are there, up to the first that is not; one call, no lock."""
        return self.match_keys(self.keyspace.keys(keys, "match_prefix"))

    def remove(self, key: StoreKey) -> bool:
        """Remove an object; current readers keep it. Returns whether it was there.

        If another process has a disk behind the pool, a ``TieredStore``, it removes the object from
        there; whether it was only there is not known here.
        """
        return self.remove_key(self.keyspace.key(key, "remove"))

    def remove_each(self, keys: StoreKeys) -> np.ndarray:
        """Remove n objects, see ``remove``: ``[n]`` bool, which were there."""
        return self.remove_keys(self.keyspace.keys(keys, "remove_each"))

    # The same with keys of the pool, ``[n, 2]`` uint64, of any namespace.
    def has_keys(self, keys: np.ndarray, *, or_written: bool = False) -> np.ndarray:
        return self.pool.contains_each(keys, or_written=or_written)

    def match_keys(self, keys: np.ndarray) -> int:
        return self.pool.match_prefix(keys)

    def read_starts(self, keys: np.ndarray, num_bytes: int) -> list[bytes]:
        """The first bytes of objects, none where there is none. Does not count as a use; they are
        not compared with a checksum.
        """
        starts = [b""] * len(keys)
        for i, (first, second) in enumerate(keys.tolist()):
            if (pinned := self.pool.pin((first, second), touch=False)) is not None:
                with pinned:
                    starts[i] = bytes(pinned.view[:num_bytes])
        return starts

    def get_headed(
        self,
        keys: np.ndarray,
        heads: Sequence[bytes],
        addresses: np.ndarray,
        sizes: np.ndarray,
        *,
        free: tuple[int, int],
    ) -> np.ndarray:
        """Copy what follows the heads of objects in the pool, see ``ObjectPool.get_headed``, in the
        order of ``get_into_each``. Damaged ones stay: the calls that raise an error remove them.
        """
        verify = random.random() < self._verify
        return self.pool.get_headed(
            keys[::-1], heads[::-1], addresses[::-1], sizes[::-1], free=free, verify=verify
        )[::-1]

    def remove_key(self, key: Key) -> bool:
        return self.pool.remove(key)

    def remove_keys(self, keys: np.ndarray) -> np.ndarray:
        return self.pool.native.remove_each(keys)

    def remove_exactly(self, key: Key, object_id: int) -> bool:
        """Remove an object, unless its key has one of another id by now, see ``ids_of``."""
        return self.pool.remove_exactly(key, object_id)

    def remove_damaged(self, key: Key) -> None:
        """Remove an object that was damaged when it was read.

        One that is whole stays: by now others may have removed the damaged one, and put it again.
        """
        [object_id] = self.pool.ids_of([key]).tolist()  # first: what is verified may be a later one
        try:
            pinned = self.pool.pin(key, touch=False)
        except Unavailable:  # this process has as many pins as it can: the next reader removes it
            return
        if pinned is not None:
            with pinned:
                if is_whole(pinned):
                    return
            self.pool.remove_exactly(key, object_id)

    def ids_of(self, keys: np.ndarray) -> np.ndarray:
        """``[n]`` uint64: an id of each object, 0 where there is none. An object that is put again
        under a key gets another one.
        """
        return self.pool.ids_of(keys)

    def list_objects(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys and ids of all objects, of all namespaces."""
        objects = self.pool.objects()
        return objects.keys, objects.ids

    def put(
        self, key: StoreKey, value: Any, *, retention: Retention = "normal", position: int = 0
    ) -> PutResult:
        """Store a value: bytes, a packed tensor or array. See ``put_from``."""
        words = self._admitted("put", key)
        try:
            return self.put_key(words, value, retention=retention, position=position)
        except InvalidArgument as error:
            raise self._named("put", {"value": value}, error) from None

    def put_from(
        self, key: StoreKey, *parts: Any, retention: Retention = "normal", position: int = 0
    ) -> PutResult:
        """Store an object of one or many parts; its bytes are the parts in order.

        Args:
            key: of the object.
            *parts: packed memory; layers, keys and values, wherever they are. A part on a GPU is
                copied after everything in its library's current stream.
            retention: "soft": evicted only when all others are; "hard": never.
            position: how many objects of its prompt come before it; ``length_aware`` uses it.

        Returns:
            ``STORED``; ``EXISTS``: nothing was done; ``BEING_WRITTEN`` by another writer just now;
            ``FULL``: not enough can be evicted; ``OVER_QUOTA``: not enough of the namespace's own
            objects can be.

        Raises:
            InvalidArgument: an argument is wrong, or the object is larger than the pool.
        """
        words = self._admitted("put_from", key)
        try:
            return self.put_key(words, *parts, retention=retention, position=position)
        except InvalidArgument as error:
            named = {f"parts[{i}]": part for i, part in enumerate(parts)}
            raise self._named("put_from", named, error) from None

    def put_key(
        self, key: Key, *parts: Any, retention: Retention = "normal", position: int = 0
    ) -> PutResult:
        """Do the same with a key of the pool, of any namespace."""
        put = partial(self.pool.put_from, key, *parts, checksum=self._checksum)
        attempt = partial(put, retention=retention, position=position)
        return self._put(key, lambda: sum(as_buffer(part).num_bytes for part in parts), attempt)

    def put_headed(
        self,
        keys: np.ndarray,
        heads: Sequence[bytes],
        addresses: np.ndarray,
        sizes: np.ndarray,
        *,
        retention: Retention = "normal",
        positions: Sequence[int] = (),
    ) -> list[PutResult]:
        """Store ``[n, 2]`` objects, each a head and host memory, see ``ObjectPool.put_headed``: in
        one call, except for those that need more than room that is there.
        """
        at_once = self.is_pool_all and not self.has_quota
        results: list[PutResult] = []
        while (i := len(results)) < len(keys):
            if at_once:
                put = partial(self.pool.put_headed, checksum=self._checksum, retention=retention)
                new = put(keys[i:], heads[i:], addresses[i:], sizes[i:], positions=positions[i:])
                for k, result in enumerate(new, i):
                    if self._watermark is not None and result is PutResult.STORED:
                        self._watermark.added(len(heads[k]) + int(sizes[k].sum()))
                results += new
                if new[-1] is not PutResult.FULL:
                    continue
                results.pop()
                i = len(results)
            first, second = keys[i].tolist()
            places = zip(addresses[i].tolist(), sizes[i].tolist(), strict=True)
            parts = [Buffer(*place, "cpu:0", False, None) for place in places]
            position = positions[i] if len(positions) else 0
            put_one = partial(self.put_key, (first, second), heads[i], *parts)
            results.append(put_one(retention=retention, position=position))
        return results

    def begin(
        self,
        key: StoreKey,
        num_bytes: int,
        *,
        retention: Retention = "normal",
        position: int = 0,
    ) -> ObjectPut | PutResult:
        """Reserve space for an object that is written in place, see ``ObjectPool.begin``."""
        return self.begin_key(
            self._admitted("begin", key), num_bytes, retention=retention, position=position
        )

    def begin_key(
        self, key: Key, num_bytes: int, *, retention: Retention = "normal", position: int = 0
    ) -> ObjectPut | PutResult:
        """Do the same with a key of the pool, of any namespace."""
        return self._put(
            key,
            lambda: num_bytes,
            lambda: self.pool.begin(
                key, num_bytes, checksum=self._checksum, retention=retention, position=position
            ),
        )

    def begin_keys(
        self,
        keys: np.ndarray,
        parts: list[tuple[int, int, int, int]],
        counts: list[int],
        retentions: np.ndarray,
        positions: np.ndarray,
    ) -> ObjectPuts | None:
        """Copy those of ``[n, 2]`` objects that are new into the pool, where no one sees them until
        they are committed. Nothing is evicted, and neither a quota nor a disk is regarded.

        ``parts`` and ``counts`` are of ``parts_of``, the rest is ``[n]``, as in ``PoolObjects``.
        Returns None if there is no room for all of them: then nothing was done.
        """
        puts = self.pool.native.begin_each(
            keys, parts, counts, self._checksum, retentions, positions
        )
        if self._watermark is not None and puts is not None:
            for num_bytes in puts.sizes:
                self._watermark.added(num_bytes)
        return puts

    def put_each(
        self, keys: StoreKeys, values: Sequence[Any], *, position: int = 0
    ) -> list[PutResult]:
        """Store many objects, in their order: a prefix is there before what continues it.

        LRU evicts the last of the new objects first: without those before it, it is useless.

        Args:
            keys: n consecutive ones of a prompt; for a part of one see ``order_prompt``.
            values: n of them, see ``put``.
            position: of the first, see ``put_from``.

        Raises:
            InvalidArgument: an argument is wrong, or a value is larger than the pool; nothing was
                stored.
        """
        check_pairs("put_each", "values", keys, values)
        check_number("put_each", "position", position)
        words = self.keyspace.keys(keys, "put_each")
        self.check_puts("put_each", keys)
        buffers = [
            self._as_buffer("put_each", f"values[{i}]", value) for i, value in enumerate(values)
        ]
        positions = range(position, position + len(words))
        if all(buffer.is_host for buffer in buffers):
            places = np.array([(b.address, b.num_bytes) for b in buffers], np.uint64).reshape(-1, 2)
            no_heads = [b""] * len(words)
            results = self.put_headed(
                words, no_heads, places[:, :1], places[:, 1:], positions=positions
            )
        else:
            results = [
                self.put_key((first, second), buffer, position=place)
                for (first, second), buffer, place in zip(
                    words.tolist(), buffers, positions, strict=True
                )
            ]
        is_new = np.array([result is PutResult.STORED for result in results], bool)
        self.age_tail_first(words[is_new])
        return results

    def order_prompt(self, keys: StoreKeys) -> None:
        """Have LRU evict the objects of a prompt from its tail to its head.

        For a prompt that was put, or read, in several calls: each call orders only its own objects,
        and those used by the first would be evicted before what continues them. The objects' times
        of last use are exchanged; none counts as used once more.

        Args:
            keys: of the prompt, from its head on; those that are not there are skipped.
        """
        self.age_tail_first(self.keyspace.keys(keys, "order_prompt"))

    def age_tail_first(self, keys: np.ndarray) -> None:
        """Have LRU evict ``[n, 2]`` objects of a prompt, in its order, from tail to head."""
        if len(keys) > 1:
            self.pool.native.order_uses(keys[::-1])

    def retain(self, key: StoreKey, retention: Retention) -> bool:
        """Set how long an object shall stay, see ``put_from``. Returns whether it was there."""
        return self.pool.retain(self.keyspace.key(key, "retain"), retention)

    @property
    def closed(self) -> bool:
        """Whether the store, or only its pool, was closed."""
        return self.pool.closed

    @property
    def is_pool_all(self) -> bool:
        """Whether the store has no objects outside the pool."""
        return True

    def on_disk(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys and sizes of the objects that are on a disk behind the pool, of all namespaces, the
        most recently used first as far as the disk knows.
        """
        return np.empty((0, 2), np.uint64), np.empty(0, np.int64)

    def bring_up_keys(self, keys: np.ndarray) -> np.ndarray:
        """Load ``[n, 2]`` objects from the disk behind the pool, as far as there is room for them:
        nothing is evicted. Returns ``[n]`` bool, which are in the pool.
        """
        return self.pool.contains_each(keys)

    def hide_keys(self, keys: np.ndarray) -> None:
        """Remove ``[n, 2]`` objects that other pools have. Nothing of that is written to a disk
        behind the pool, where it would push out what is to be moved next: see ``record_hidden``.
        """
        self.remove_keys(keys)

    def record_hidden(self) -> None:
        """Have the disk record what was hidden, if it can; so do the next write to it, and
        ``close``. Until then a start finds it there.
        """

    def note_read(self, keys: np.ndarray) -> None:
        """Record that others have read ``[n, 2]`` objects in the pool, bypassing this store."""

    @property
    def has_quota(self) -> bool:
        """Whether puts need more than room, in any namespace."""
        return bool(self._quotas)

    @property
    def keeps_checksums(self) -> bool:
        """Whether objects are stored with a checksum."""
        return self._checksum

    @property
    def eviction(self) -> EvictionPolicy:
        """How room is made; may be replaced."""
        return self._room.eviction

    @eviction.setter
    def eviction(self, policy: EvictionPolicy) -> None:
        check_eviction(policy)
        self._room.eviction = policy

    @property
    def before_eviction(self) -> list[Callable[[], object]]:
        """Functions that are called before this store evicts anything from the pool."""
        return self._room.before_eviction

    @property
    def on_evicted(self) -> list[Callable[[np.ndarray], object]]:
        """Functions that are called with the keys ``[n, 2]`` evicted from this store."""
        return self._room.on_evicted

    def evict(self, num_bytes: int) -> Evicted:
        """Make room before it is needed, by the store's policy, in all namespaces.

        Raises:
            InvalidArgument: ``num_bytes`` is not an integer from 0 on.
        """
        check_number("evict", "num_bytes", num_bytes)
        return self._room.evict(num_bytes)

    def evict_objects(self, num_objects: int) -> Evicted:
        """Do the same for room in the index: evict that many objects, whatever their size."""
        check_number("evict_objects", "num_objects", num_objects)
        return self._room.evict_objects(num_objects)

    def remove_all(self) -> int:
        """Remove the objects of all namespaces, "hard" ones too; returns how many there were."""
        keys, num_removed = self.pool.objects().keys, 0
        for first in range(0, len(keys), REMOVED_AT_ONCE):  # others wait meanwhile
            num_removed += int(self.pool.remove_each(keys[first : first + REMOVED_AT_ONCE]).sum())
        self.pool.note_all_removed()  # for who has a disk behind the pool
        return num_removed

    def stats(self) -> PoolStats:
        return self.pool.stats()

    def usage(self) -> Usage | None:
        """Count the namespace's usage of the pool; None if it has no quota."""
        return None if self._quota is None else self._quota.usage()

    def close(self) -> None:
        """End the watermark's thread and close the pool, see there. Idempotent."""
        if self._watermark is not None:
            self._watermark.close()
        self.pool.close()

    def check_puts(self, op: str, keys: StoreKeys) -> None:
        """Refuse names if there is a quota: they hide which namespace they belong to."""
        for key in () if self._quota is None else keys:
            if isinstance(key, str | bytes):
                raise InvalidArgument(
                    f"{op}: key must be an integer in a namespace with a quota, got {key!r}"
                )

    def _admitted(self, op: str, key: StoreKey) -> Key:
        if self._quota is not None:
            self.check_puts(op, [key])
        return self.keyspace.key(key, op)

    def _as_buffer(self, op: str, argument: str, value: Any) -> Buffer:
        buffer = as_buffer(value, argument=f"{op}: {argument}")
        self.check_size(op, argument, buffer.num_bytes)
        return buffer

    def check_size(self, op: str, argument: str, num_bytes: int) -> None:
        """Refuse an object that is larger than the pool."""
        most = self.pool.capacity_bytes
        if num_bytes > most:
            raise InvalidArgument(
                f"{op}: {argument} must be at most the pool's {most} bytes, got {num_bytes}"
            )

    def _named(self, op: str, parts: dict[str, Any], error: InvalidArgument) -> InvalidArgument:
        """Return the error with the caller's names; the pool has called the parts buffers.

        Not checked before the put: that takes a third of its time.
        """
        try:
            buffers = [self._as_buffer(op, name, part) for name, part in parts.items()]
            self.check_size(op, "parts", sum(buffer.num_bytes for buffer in buffers))
        except InvalidArgument as named:
            return named
        return InvalidArgument(f"{op}: " + str(error).removeprefix("put_from: "))

    def _put(
        self, key: Key, num_bytes: Callable[[], int], attempt: Callable[[], Result]
    ) -> Result | PutResult:
        quota = self._quotas.get(key[1]) if self._quotas else None
        if quota is None:
            return self._with_room(num_bytes, attempt)
        return quota.admit(key, num_bytes(), lambda: self._with_room(num_bytes, attempt))

    def _with_room(
        self, num_bytes: Callable[[], int], attempt: Callable[[], Result]
    ) -> Result | PutResult:
        """Try, and where it is ``FULL`` make room, see ``Room.make``."""
        result: Result | PutResult = attempt()
        if result is PutResult.FULL:
            result = self._room.make(num_bytes, attempt)
        return result if self._watermark is None else self._counted(result, num_bytes)

    def _counted(self, result: Result, num_bytes: Callable[[], int]) -> Result:
        """Tell the watermark of a put that has room."""
        is_stored = result is PutResult.STORED or isinstance(result, ObjectPut)
        if self._watermark is not None and is_stored:
            self._watermark.added(num_bytes())
        return result
