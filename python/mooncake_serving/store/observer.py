"""Callbacks for the changes that a process makes to a pool: for event publishers, directories."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mooncake_kernels.buffers import as_buffer
from mooncake_kernels.errors import InvalidArgument, shown
from mooncake_kernels.pool import (
    Evicted,
    Key,
    ObjectPool,
    ObjectPut,
    PutResult,
    as_keys,
)
from mooncake_kernels.transfer import Served

logger = logging.getLogger(__name__)


class Observer:
    """Called after each change by this process, in the thread that did it.

    No lock is held during a call, so two threads may report operations on one key in another order
    than they were done. An observer must be fast. What it raises is logged: the pool has done the
    operation by then. Override the methods of interest.
    """

    def on_stored(self, keys: np.ndarray, num_bytes: int) -> None:
        """``[n, 2]`` objects, of this many bytes in total, can be read now."""

    def on_removed(self, keys: np.ndarray, *, evicted: bool) -> None:
        """``[n, 2]`` objects cannot be found any more: evicted to make room, or removed."""


class ObservedPool(ObjectPool):
    """A pool that reports how this process changes it; a ``Store`` takes it like any other.

    It covers every user of this object: a store, its eviction, a node that serves others. What
    other processes do to the same memory they report themselves::

        pool = ObservedPool.open("/dev/shm/kv")
        pool.observe(EventPublisher("tcp://127.0.0.1:5557"))
        store = Store(pool, namespace="llama-70b/rank0")
    """

    _observers: tuple[Observer, ...] = ()

    def observe(self, *observers: Observer) -> None:
        """Report to these, too, from now on.

        Raises:
            InvalidArgument: one is not an ``Observer``, or is told already.
        """
        told = list(self._observers)
        for i, observer in enumerate(observers):
            if not isinstance(observer, Observer):
                raise InvalidArgument(
                    f"observe: observers[{i}] must be an Observer, got {shown(observer)}"
                )
            if any(observer is other for other in told):
                raise InvalidArgument(
                    f"observe: observers[{i}] must not observe the pool already, got "
                    f"{shown(observer)} again"
                )
            told.append(observer)
        self._observers = tuple(told)

    def begin(self, key: Key, num_bytes: int, **options: Any) -> ObjectPut | PutResult:
        put = super().begin(key, num_bytes, **options)
        if isinstance(put, ObjectPut):
            put.on_commit = lambda: self._stored(_one(key), num_bytes)
        return put

    def put_from(self, key: Key, *buffers: Any, **options: Any) -> PutResult:
        result = super().put_from(key, *buffers, **options)
        if result is PutResult.STORED:
            self._stored(_one(key), sum(as_buffer(buffer).num_bytes for buffer in buffers))
        return result

    def put_headed(
        self, keys: Any, heads: Sequence[bytes], addresses: Any, sizes: Any, **options: Any
    ) -> list[PutResult]:
        results = super().put_headed(keys, heads, addresses, sizes, **options)
        stored = [i for i, result in enumerate(results) if result is PutResult.STORED]
        if stored:
            num_bytes = sum(len(heads[i]) + int(np.sum(sizes[i])) for i in stored)
            self._stored(as_keys("put_headed", keys)[stored], num_bytes)
        return results

    def remove(self, key: Key, *, noted: bool = True) -> bool:
        found = super().remove(key, noted=noted)
        if found:
            self._removed(_one(key), evicted=False)
        return found

    def remove_each(self, keys: Any) -> np.ndarray:
        found = super().remove_each(keys)
        if found.any():
            self._removed(as_keys("remove_each", keys)[found], evicted=False)
        return found

    def remove_exactly(self, key: Key, object_id: int) -> bool:
        found = super().remove_exactly(key, object_id)
        if found:
            self._removed(_one(key), evicted=False)
        return found

    def evict(self, num_bytes: int, policy: Any = "lru") -> Evicted:
        return self._evicted(super().evict(num_bytes, policy))

    def evict_keys(self, keys: Any, ids: np.ndarray | None = None) -> Evicted:
        return self._evicted(super().evict_keys(keys, ids))

    def tell_served(self, served: Served) -> None:
        """Report what peers did with it without running this process's Python, see ``Served``."""
        ends = np.flatnonzero(np.diff(served.is_there)) + 1
        num_bytes = served.num_bytes_stored
        for keys, is_there in zip(
            np.split(served.changed, ends), np.split(served.is_there, ends), strict=True
        ):
            if not len(keys):
                continue
            if not is_there[0]:
                self._removed(keys, evicted=False)
                continue
            self._stored(keys, num_bytes)
            num_bytes = 0  # reported once

    def _stored(self, keys: np.ndarray, num_bytes: int) -> None:
        self._tell(lambda observer: observer.on_stored(keys, num_bytes))

    def _evicted(self, evicted: Evicted) -> Evicted:
        if len(evicted.keys):
            self._removed(evicted.keys, evicted=True)
        return evicted

    def _removed(self, keys: np.ndarray, *, evicted: bool) -> None:
        self._tell(lambda observer: observer.on_removed(keys, evicted=evicted))

    def _tell(self, call: Callable[[Observer], None]) -> None:
        """Call each observer; the caller's operation has succeeded, whatever they raise."""
        for observer in self._observers:
            try:
                call(observer)
            except Exception:
                logger.exception("an observer of %s failed", self.path)


def _one(key: Key) -> np.ndarray:
    return np.array([key], np.uint64)
