"""Tells which of an engine's pages have left a store, whoever removed or evicted them."""

from collections.abc import Hashable, Sequence

import numpy as np

from mooncake_kernels.closeable import Closeable
from mooncake_kernels.pool import hash_names
from mooncake_serving.store import Store, TieredStore


class PageWatch(Closeable):
    """Watches pages in a pool and on the disk behind it. For one thread. A context manager.

    Args:
        store: whose; close this first.

    Raises:
        InvalidArgument: the store is closed.
        TimeoutError: a stopped process holds the pool.
    """

    def __init__(self, store: Store):
        self._store = store
        self._pool = store.pool.watch()
        self._disk = store.tier.watch() if isinstance(store, TieredStore) else None
        self._tags: dict[int, Hashable] = {}  # by key
        self.gone()  # what is there does not matter, but only what a watch has seen can go

    def add(self, names: Sequence[str | bytes], tags: Sequence[Hashable]) -> np.ndarray:
        """Watch n pages.

        Args:
            names: n.
            tags: n: what ``gone`` returns in their place.

        Returns:
            ``[n]`` bool: which are there. The others are not watched.

        Raises:
            as ``gone``; call that one just before.
        """
        keys = hash_names(list(names), 0)[:, 0]
        there: np.ndarray = self._store.exists_each(keys)
        for key, tag, is_there in zip(keys.tolist(), tags, there.tolist(), strict=True):
            if is_there:
                self._tags[key] = tag
        return there

    def gone(self) -> list[Hashable]:
        """Return the tags of the pages that have gone, which are not watched any more.

        It costs next to nothing if no page of anyone has come or gone, see ``ObjectPool.watch``.

        Raises:
            InvalidArgument: the store was closed.
            TimeoutError: a stopped process holds the pool.
        """
        removed = [self._pool.look().removed]  # first: what has left it for the disk is there then
        if self._disk is not None:
            removed.append(self._disk.look().removed)
        words = np.concatenate(removed)
        mine = words[words[:, 1] == self._store.keyspace.scope, 0].tolist()
        keys = [key for key in dict.fromkeys(mine) if key in self._tags]  # once, if on both
        if not keys:
            return []
        there = self._store.exists_each(np.array(keys, np.uint64)).tolist()
        return [
            self._tags.pop(key) for key, is_there in zip(keys, there, strict=True) if not is_there
        ]

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self._disk is not None:
            self._disk.close()
