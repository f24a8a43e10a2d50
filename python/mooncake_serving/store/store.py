"""The store of one host: a pool, with keys scoped by namespace, that makes room for puts."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from mooncake_kernels.buffers import Buffer, as_buffer
from mooncake_kernels.closing import Closing
from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import (
    Evicted,
    Key,
    ObjectPool,
    ObjectPut,
    PoolStats,
    PutResult,
    Retention,
)

from .checks import check_bool, check_number, check_pool, check_share
from .eviction import EvictionPolicy, lru, sieve
from .eviction.room import Room
from .keyspace import Keyspace, StoreKey, StoreKeys
from .quotas import Quota, QuotaKeeper, Usage, quotas_of
from .reader import StoreReader, check_pairs
from .watermark import Watermark

Result = TypeVar("Result")
REMOVED_AT_ONCE = 256  # objects, by remove_all


class Store(StoreReader, Closing):
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
        _check_eviction(eviction)
        if evict_ratio is None:
            evict_ratio = 0.002 if eviction in (lru, sieve) else 0.01
        check_share("Store", "evict_ratio", evict_ratio)
        check_bool("Store", "checksum", checksum)
        check_share("Store", "verify", verify)
        if not isinstance(quota, Quota | None):
            raise InvalidArgument(f"Store: quota must be a Quota or None, got {quota!r}")
        if watermark is not None and not (isinstance(watermark, Sequence) and len(watermark) == 2):
            raise InvalidArgument(f"Store: watermark must be (high, low), got {watermark!r}")
        super().__init__(pool, Keyspace(namespace), verify)
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
        pool = ObjectPool.create(capacity_bytes, path, device=device, group=group)
        try:
            return cls(pool, **options)
        except BaseException:
            pool.close()
            if path is not None:
                os.unlink(path)
            raise

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
        pool = ObjectPool.open(path, owner=owner, group=group)
        try:
            return cls(pool, **options)
        except BaseException:
            pool.close()
            raise

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
        attempt = partial(
            self.pool.put_from,
            key,
            *parts,
            checksum=self._checksum,
            retention=retention,
            position=position,
        )
        return self._put(key, partial(_total_bytes, parts), attempt)

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
                new = self.pool.put_headed(
                    keys[i:],
                    heads[i:],
                    addresses[i:],
                    sizes[i:],
                    checksum=self._checksum,
                    retention=retention,
                    positions=positions[i:],
                )
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
            put = partial(self.put_key, (first, second), heads[i], *parts)
            results.append(put(retention=retention, position=position))
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

    def begin_unless_full(
        self, key: Key, num_bytes: int, *, retention: Retention = "normal", position: int = 0
    ) -> ObjectPut | PutResult:
        """Do the same without evicting anything, and without regard to a quota or a disk."""
        begun = self.pool.begin(
            key, num_bytes, checksum=self._checksum, retention=retention, position=position
        )
        return self._counted(begun, lambda: num_bytes)

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
            self.pool.order_uses(keys[::-1])

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
        _check_eviction(policy)
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
        """Do the same for room in the index: evict so many objects, whatever their size.

        Raises:
            InvalidArgument: ``num_objects`` is not an integer from 0 on.
        """
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


def _total_bytes(parts: Sequence[Any]) -> int:
    return sum(as_buffer(part).num_bytes for part in parts)


def _check_eviction(policy: EvictionPolicy) -> None:
    if not callable(policy):
        raise InvalidArgument(f"Store: eviction must be a function, as lru is, got {policy!r}")
