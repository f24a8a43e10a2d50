"""How a node removes objects everywhere, and sets how long all copies of one stay."""

import numpy as np

from mooncake_kernels.errors import TransferError, Unavailable
from mooncake_kernels.pool import Retention

from .node import Node


class Removals:
    """Removals of a ``ClusterStore``, of keys of pools. Thread-safe.

    Args:
        node: of this process.
    """

    def __init__(self, node: Node):
        self._node = node
        self._store = node.store

    def remove_each(self, words: np.ndarray) -> np.ndarray:
        """Remove ``[n, 2]`` objects everywhere, see ``ClusterStore.remove_each``."""
        node = self._node
        unreached: list[str] = []
        try:
            pools = node.entries.remove(words)
        except Unavailable:
            self._remove_here(words, unreached)
            raise
        removed = self._remove_here(words, unreached)
        others: dict[str, list[int]] = {}
        for i, names in enumerate(pools):
            for name in names:
                if name != node.pool_name:
                    others.setdefault(name, []).append(i)
        for pool in sorted(others):
            held = others[pool]
            try:
                removed[held] |= self._remove_from(pool, words[held])
            except (TransferError, Unavailable) as error:
                node.entries.publish_for(pool, words[held])  # where they may still be
                unreached.append(str(error))
        node.locations.forget(words)
        if unreached:
            raise Unavailable(f"remove: it is not removed everywhere: {'; '.join(unreached)}")
        return removed

    def retain(self, word: np.ndarray, retention: Retention) -> bool:
        """Set how long an object, ``[1, 2]``, shall stay, see ``ClusterStore.retain``."""
        found = False
        if self._store is not None:
            first, second = word[0].tolist()
            found = self._store.pool.retain((first, second), retention)
        unreached: list[str] = []
        for pool in sorted(set(self._node.entries.holders(word)[0]) - {self._node.pool_name}):
            try:
                found |= self._retain_in(pool, word, retention)
            except TransferError as error:
                unreached.append(str(error))
        if unreached:
            raise Unavailable(f"retain: it is not set everywhere: {'; '.join(unreached)}")
        return found

    def _remove_here(self, words: np.ndarray, unreached: list[str]) -> np.ndarray:
        """Remove objects from this node's pool: ``[n]`` bool, which were there. Objects that cannot
        be removed are published again.
        """
        store, entries = self._store, self._node.entries
        if store is None:
            return np.zeros(len(words), bool)
        if store.is_pool_all:
            try:
                return store.remove_keys(words)
            except (Unavailable, OSError) as error:  # a stopped process holds the pool
                unreached.append(str(error))
                entries.publish(words)
                return np.zeros(len(words), bool)
        removed = np.zeros(len(words), bool)
        for i, (first, second) in enumerate(words.tolist()):
            try:
                removed[i] = store.remove_key((first, second))
            except (Unavailable, OSError) as error:  # or the disk cannot be written
                unreached.append(str(error))
                entries.publish(words[[i]])
        return removed

    def _remove_from(self, pool: str, words: np.ndarray) -> np.ndarray:
        """Have a pool's nodes remove objects: ``[n]`` bool, which were there. All its nodes are
        asked, since one may have a disk behind it.
        """
        removed = np.zeros(len(words), bool)
        failures: list[TransferError] = []
        members = self._node.servers_of(pool)
        for member in members:
            try:
                removed |= self._node.client.remove(member.name, words)
            except TransferError as error:
                failures.append(error)
        if members and len(failures) == len(members):
            raise failures[0]
        return removed

    def _retain_in(self, pool: str, key: np.ndarray, retention: Retention) -> bool:
        """Have one of a pool's nodes keep an object so long; returns whether the pool has it."""
        failure: TransferError | None = None
        for member in self._node.servers_of(pool):
            try:
                return self._node.client.retain(member.name, key, retention)
            except TransferError as error:
                failure = error
        if failure is not None:
            raise failure
        return False
