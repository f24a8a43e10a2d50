"""The store over all hosts: the calls of ``Store``, which look in the local pool first."""

from typing import Any

import numpy as np

from mooncake_kernels.closing import Closing
from mooncake_kernels.errors import InvalidArgument, TransferError, Unavailable
from mooncake_kernels.pool import PoolStats, Retention
from mooncake_kernels.transfer import Region

from ..checks import check_positive, check_retention, check_share
from ..directory import Member
from ..keyspace import Keyspace, StoreKey, StoreKeys
from .hot_keys import HotKeys
from .node import Node
from .writes import ClusterWriter


class ClusterStore(ClusterWriter, Closing):
    """KV objects of all hosts whose nodes share a directory. Thread-safe. A context manager.

    ::

        with Store.create(64 << 30, "/dev/shm/kv", namespace="llama-70b/rank0") as store:
            with mk.TransferEngine("10.0.0.7:0") as engine, Node(store, engine, directory) as node:
                cluster = ClusterStore(node)
                cluster.put_each(keys, blocks)          # here; all hosts find them
                cluster.get_into_each(other_keys, ...)  # from here, or from wherever they are

    Objects in this node's pool are found and read as by ``Store``, without a request to other
    nodes. An object is written once across all hosts, unless the directory loses state in the
    meantime: bytes should follow from their key, as those of a prefix hash do.

    Args:
        node: of this process; ``close()`` closes it.
        namespace: for a node without a pool, as in ``Store``; other nodes use their store's.
        verify: the share of reads from other nodes whose checksums are compared, first at the
            holder, then here: 0 to 1.
        claim_s: how long a put may take, at most, before another node may write the same key.
        hot: chooses which objects read from other hosts are copied into this node's pool; None:
            none.

    Raises:
        InvalidArgument: an argument is wrong.
    """

    def __init__(
        self,
        node: Node,
        *,
        namespace: str | None = None,
        verify: float = 1.0,
        claim_s: float = 60.0,
        hot: HotKeys | None = None,
    ):
        if not isinstance(node, Node):
            raise InvalidArgument(f"ClusterStore: node must be a Node, got {node!r:.80}")
        check_share("ClusterStore", "verify", verify)
        check_positive("ClusterStore", "claim_s", claim_s)
        if not isinstance(hot, HotKeys | None):
            raise InvalidArgument(f"ClusterStore: hot must be HotKeys or None, got {hot!r}")
        if node.store is not None and namespace is not None:
            raise InvalidArgument(
                f"ClusterStore: namespace must be None beside a store's own, got {namespace!r}"
            )
        self.node = node
        self._store = node.store
        self._keyspace = node.store.keyspace if node.store else Keyspace(namespace or "")
        self._verify = verify
        self._claim_s = claim_s
        self._hot = hot
        self._wait_s = claim_s

    def order_prompt(self, keys: StoreKeys) -> None:
        """Have LRU evict a prompt's objects in this node's pool from tail to head, see
        ``Store.order_prompt``.
        """
        self.node.check_process()
        words = self._keyspace.keys(keys, "order_prompt")
        if self._store is not None:
            self._store.age_tail_first(words)

    def remove(self, key: StoreKey) -> bool:
        """Remove an object everywhere; current readers keep it. Returns whether any pool had it.

        Raises:
            Unavailable: the directory, or a node that has it, does not answer; the object was
                removed from all other pools.
        """
        self._keyspace.key(key, "remove")
        return bool(self.remove_each([key])[0])

    def remove_each(self, keys: StoreKeys) -> np.ndarray:
        """Remove n objects everywhere; current readers keep them.

        Returns:
            ``[n]`` bool: whether any pool had each.

        Raises:
            Unavailable: the directory, or a node that has some, does not answer; the objects were
                removed from all other pools.
        """
        self.node.check_process()
        words = self._keyspace.keys(keys, "remove_each")
        unreached: list[str] = []
        try:
            pools = self.node.entries.remove(words)
        except Unavailable:
            self._remove_here(words, unreached)
            raise
        removed = self._remove_here(words, unreached)
        for pool in sorted({name for names in pools for name in names} - {self.node.pool_name}):
            held = [i for i, names in enumerate(pools) if pool in names]
            try:
                removed[held] |= self._remove_from(pool, words[held])
            except (TransferError, Unavailable) as error:
                self.node.entries.publish_for(pool, words[held])  # where they may still be
                unreached.append(str(error))
        self.node.locations.forget(words)
        if unreached:
            raise Unavailable(f"remove: it is not removed everywhere: {'; '.join(unreached)}")
        return removed

    def retain(self, key: StoreKey, retention: Retention) -> bool:
        """Set how long an object's copies shall stay, in all pools that have one by now.

        Returns:
            Whether any pool had it; what is only on a disk behind one does not count.

        Raises:
            Unavailable: the directory, or every node of a pool that has it, does not answer; it is
                set in all other pools.
        """
        self.node.check_process()
        words = self._keyspace.row(key, "retain")
        check_retention("retain", retention)
        found = self._store is not None and self._store.retain(key, retention)
        unreached: list[str] = []
        for pool in sorted(set(self.node.entries.holders(words)[0]) - {self.node.pool_name}):
            try:
                found |= self._retain_in(pool, words, retention)
            except TransferError as error:
                unreached.append(str(error))
        if unreached:
            raise Unavailable(f"retain: it is not set everywhere: {'; '.join(unreached)}")
        return found

    @property
    def keyspace(self) -> Keyspace:
        """How callers' keys become keys of pools."""
        return self._keyspace

    def members(self) -> list[Member]:
        """Members by name, as last reported."""
        return self.node.members()

    def stats(self) -> dict[str, PoolStats]:
        """Ask for the statistics of all pools, by name; pools that do not answer are left out."""
        found: dict[str, PoolStats] = {}
        if self._store is not None:
            found[self.node.pool_name] = self._store.stats()
        for member in self.members():
            if member.pool and member.pool not in found:
                try:
                    stats = self.node.client.stat(member.name)
                except (TransferError, Unavailable):
                    continue
                if stats is not None:
                    found[member.pool] = stats
        return found

    def register(self, buffer: Any) -> Region:
        """Register memory, so that objects go there without an extra copy. See ``Node``."""
        return self.node.register(buffer)

    def deregister(self, region: Region) -> None:
        """Deregister memory; call this before the memory is freed.

        Raises:
            InvalidArgument: it is not a region.
        """
        if not isinstance(region, Region):
            raise InvalidArgument(f"deregister: region must be a Region, got {region!r:.80}")
        self.node.deregister(region)

    def close(self) -> None:
        """Close the node, see there. Idempotent."""
        self.node.close()

    def _remove_here(self, words: np.ndarray, unreached: list[str]) -> np.ndarray:
        """Remove objects from this node's pool: ``[n]`` bool, which were there. Objects that cannot
        be removed are published again.
        """
        removed = np.zeros(len(words), bool)
        if self._store is None:
            return removed
        for i, (first, second) in enumerate(words.tolist()):
            try:
                removed[i] = self._store.remove_key((first, second))
            except (Unavailable, OSError) as error:  # a disk's, or a stopped process holds the pool
                unreached.append(str(error))
                self.node.entries.publish(words[[i]])
        return removed

    def _remove_from(self, pool: str, words: np.ndarray) -> np.ndarray:
        """Have a pool's nodes remove objects: ``[n]`` bool, which were there. All its nodes are
        asked, since one may have a disk behind it.
        """
        removed = np.zeros(len(words), bool)
        failures: list[TransferError] = []
        members = self._members_of(pool)
        for member in members:
            try:
                removed |= self.node.client.remove(member.name, words)
            except TransferError as error:
                failures.append(error)
        if members and len(failures) == len(members):
            raise failures[0]
        return removed

    def _retain_in(self, pool: str, key: np.ndarray, retention: Retention) -> bool:
        """Have one of a pool's nodes keep an object so long; returns whether the pool has it."""
        failure: TransferError | None = None
        for member in self._members_of(pool):
            try:
                return self.node.client.retain(member.name, key, retention)
            except TransferError as error:
                failure = error
        if failure is not None:
            raise failure
        return False

    def _members_of(self, pool: str) -> list[Member]:
        members = [member for member in self.node.members() if member.pool == pool]
        return members or [member for member in self.node.members(anew=True) if member.pool == pool]
