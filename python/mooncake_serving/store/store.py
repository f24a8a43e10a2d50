"""The store of one host: a pool, whose keys it scopes and in which it makes room."""

import os
import random
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from mooncake_kernels.buffers import as_buffer
from mooncake_kernels.errors import ChecksumError, InvalidArgument
from mooncake_kernels.pool import (
    Key,
    ObjectPool,
    ObjectPut,
    PinnedObject,
    PoolStats,
    PutResult,
    Retention,
)

from .eviction import EvictionPolicy, lru
from .keyspace import Keyspace, StoreKey, StoreKeys

DAMAGED = -4  # of ObjectPool.get_into_each

Result = TypeVar("Result")


class Store:
    """KV objects of a host, shared by all processes that open its pool. A context manager.

    Objects do not change: the first who puts one wins, and the others are told ``EXISTS``. A put
    that finds no room evicts. A key is a prefix hash of ``block_hashes``, or any string.

    Args:
        pool: where the objects are; ``close()`` closes it.
        namespace: objects of another one are not seen: tenant, model, layout, rank.
        eviction: how room is made: ``lru``, ``sieve``, ``largest_first``, or a function like them.
        evict_ratio: how much of the pool is evicted at once, at least, so that not every put of a
            full pool has to: 0 to 1.
        checksum: keep an XXH3-64 of each object, computed while it is copied.
        verify: the share of reads that compare it first: 0 to 1.

    Attributes:
        pool: see above.
        keyspace: how keys of callers become those of the pool.
        eviction: see above; may be replaced.

    Raises:
        InvalidArgument: a number is not between 0 and 1, or the namespace no string.
    """

    def __init__(
        self,
        pool: ObjectPool,
        *,
        namespace: str = "",
        eviction: EvictionPolicy = lru,
        evict_ratio: float = 0.05,
        checksum: bool = True,
        verify: float = 0.0,
    ):
        for name, value in (("evict_ratio", evict_ratio), ("verify", verify)):
            if not 0 <= value <= 1:
                raise InvalidArgument(f"Store: {name} must be from 0 to 1, got {value!r}")
        self.pool = pool
        self.keyspace = Keyspace(namespace)
        self.eviction = eviction
        self._evict_bytes = int(evict_ratio * pool.capacity_bytes)
        self._checksum = checksum
        self._verify = verify

    @classmethod
    def create(
        cls, capacity_bytes: int, path: str | os.PathLike[str] | None = None, **options: Any
    ) -> "Store":
        """Make the pool too, see ``ObjectPool.create``; other processes ``Store.open`` it."""
        return cls(ObjectPool.create(capacity_bytes, path), **options)

    @classmethod
    def open(cls, path: str | os.PathLike[str], **options: Any) -> "Store":
        """Open the pool that a process of this host has made."""
        return cls(ObjectPool.open(path), **options)

    def put(self, key: StoreKey, value: Any, *, retention: Retention = "normal") -> PutResult:
        """Store a value: bytes, a packed tensor or array in host memory. See ``put_from``."""
        return self.put_from(key, value, retention=retention)

    def put_from(self, key: StoreKey, *parts: Any, retention: Retention = "normal") -> PutResult:
        """Store an object of one or many parts, which are its bytes one behind the other.

        Args:
            key: of the object.
            *parts: packed host memory; layers, keys and values, wherever they are.
            retention: "soft": evicted only when all others are; "hard": never.

        Returns:
            ``STORED``; ``EXISTS``: nothing was done; ``BEING_WRITTEN`` by somebody else just now;
            ``FULL``: what there is cannot be evicted.

        Raises:
            InvalidArgument: an argument is wrong, or the object larger than the pool.
        """
        return self.put_key(self.keyspace.key(key), *parts, retention=retention)

    def put_key(self, key: Key, *parts: Any, retention: Retention = "normal") -> PutResult:
        """Do the same with a key of the pool, of whatever namespace it is."""
        return self._with_room(
            lambda: sum(as_buffer(part).num_bytes for part in parts),
            lambda: self.pool.put_from(key, *parts, checksum=self._checksum, retention=retention),
        )

    def begin(
        self, key: StoreKey, num_bytes: int, *, retention: Retention = "normal"
    ) -> ObjectPut | PutResult:
        """Reserve space for an object that is written in place, see ``ObjectPool.begin``."""
        return self.begin_key(self.keyspace.key(key), num_bytes, retention=retention)

    def begin_key(
        self, key: Key, num_bytes: int, *, retention: Retention = "normal"
    ) -> ObjectPut | PutResult:
        """Do the same with a key of the pool, of whatever namespace it is."""
        return self._with_room(
            lambda: num_bytes,
            lambda: self.pool.begin(key, num_bytes, checksum=self._checksum, retention=retention),
        )

    def put_each(self, keys: StoreKeys, values: Sequence[Any]) -> list[PutResult]:
        """Store many objects, in their order: a prefix is there before what continues it."""
        check_pairs("put_each", "values", keys, values)
        return [self.put_from(key, value) for key, value in zip(keys, values, strict=True)]

    def get(self, key: StoreKey) -> bytes | None:
        """Return a copy of an object; None if there is none.

        Raises:
            ChecksumError: it was verified and is damaged; it was removed.
        """
        pinned = self.view(key)
        if pinned is None:
            return None
        with pinned:
            return bytes(pinned.view)

    def view(self, key: StoreKey) -> PinnedObject | None:
        """Return an object where it is, without a copy; None if there is none.

        Raises:
            ChecksumError: as in ``get``.
        """
        pinned = self.pool.pin(self.keyspace.key(key))
        if pinned is not None and self._verifies():
            try:
                pinned.verify()
            except ChecksumError:
                pinned.close()
                self.remove(key)
                raise
        return pinned

    def get_into(self, key: StoreKey, *buffers: Any, offset: int | None = None) -> int | None:
        """Copy an object, or the part of it from ``offset`` on, see ``ObjectPool.get_into``.

        Raises:
            ChecksumError: as in ``get``; nothing was copied.
        """
        words = self.keyspace.key(key)
        try:
            return self.pool.get_into(words, *buffers, offset=offset, verify=self._verifies())
        except ChecksumError:
            self.remove(key)
            raise

    def get_each(self, keys: StoreKeys) -> list[bytes | None]:
        """Return copies of many objects, see ``get_into_each``."""
        return [self.get(key) for key in reversed(list(keys))][::-1]

    def get_into_each(self, keys: StoreKeys, buffers: Sequence[Any]) -> np.ndarray:
        """Copy many objects, each into its buffer, in one call.

        They are read from the last to the first, so that of a prefix the tail was used longest ago:
        LRU evicts it before what it continues, without which it is useless.

        Args:
            keys: n of them.
            buffers: n of packed, writable host memory, each as large as its object or larger.

        Returns:
            ``[n]`` int64: sizes of the objects; -1 where there is none, -2 where the buffer is too
            small, -4 where the object was verified and damaged; it was removed.
        """
        check_pairs("get_into_each", "buffers", keys, buffers)
        key_array = self.keyspace.keys(keys)[::-1]
        verify = self._verifies()
        sizes = self.pool.get_into_each(key_array, buffers[::-1], verify=verify)
        for words in key_array[sizes == DAMAGED].tolist():
            self.pool.remove(tuple(words))
        return sizes[::-1]

    def exists(self, key: StoreKey) -> bool:
        return self.pool.contains(self.keyspace.key(key))

    def exists_each(self, keys: StoreKeys) -> np.ndarray:
        """Tell of n keys which are there: ``[n]`` bool."""
        return self.pool.contains_each(self.keyspace.keys(keys))

    def match_prefix(self, keys: StoreKeys) -> int:
        """Count the first keys that are there, up to one that is not; one call, no lock."""
        return self.pool.match_prefix(self.keyspace.keys(keys))

    def retain(self, key: StoreKey, retention: Retention) -> bool:
        """Say how long an object shall stay, see ``put_from``. Returns whether it was there."""
        return self.pool.retain(self.keyspace.key(key), retention)

    def remove(self, key: StoreKey) -> bool:
        """Remove an object; who reads it keeps it. Returns whether it was there."""
        return self.pool.remove(self.keyspace.key(key))

    def remove_all(self) -> int:
        """Remove the objects of all namespaces, "hard" ones too; returns how many there were."""
        return sum(self.pool.remove(tuple(key)) for key in self.pool.objects().keys.tolist())

    def stats(self) -> PoolStats:
        return self.pool.stats()

    def close(self) -> None:
        """Close the pool, see there. Idempotent."""
        self.pool.close()

    def _with_room(self, num_bytes: Callable[[], int], attempt: Callable[[], Result]) -> Result:
        """Try until it is not ``FULL``, evicting twice as much each time, up to everything."""
        if (result := attempt()) is not PutResult.FULL:
            return result
        wanted = max(num_bytes(), self._evict_bytes, 1)
        while result is PutResult.FULL and wanted < 2 * self.pool.capacity_bytes:
            self.eviction(self.pool, wanted)
            result = attempt()
            wanted *= 2
        return result

    def _verifies(self) -> bool:
        return self._verify > 0 and random.random() < self._verify

    def __enter__(self) -> "Store":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def check_pairs(op: str, argument: str, keys: StoreKeys, others: Sequence[Any]) -> None:
    """Refuse keys and what belongs to them if they are not as many."""
    if len(keys) != len(others):
        raise InvalidArgument(
            f"{op}: {argument} must be as many as keys, got {len(others)} and {len(keys)}"
        )
