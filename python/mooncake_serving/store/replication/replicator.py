"""Copies of objects on several hosts: made at the put or later, moved, removed, restored."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mooncake_kernels.buffers import as_buffer
from mooncake_kernels.errors import InvalidArgument, Unavailable
from mooncake_kernels.pool import Key, PutResult, Retention

from ..checks import check_integer, check_pairs, check_retention
from ..cluster import ClusterStore
from ..cluster.put import options_in, prompt_options, uniform_options
from ..directory import Member
from ..keyspace import StoreKey, StoreKeys
from .placement import Placement, check_placement
from .replicate import ANYWHERE, HERE, FreeBytes, ReplicaChange, ReplicationJob, ReplicationResult


class Stored(NamedTuple):
    """Result of a put with copies.

    Attributes:
        result: of the put itself.
        num_copies: how many pools have the object, as far as is known; 0 if it was not stored.
    """

    result: PutResult
    num_copies: int


@dataclass
class RepairResult:
    """Result of a repair.

    Attributes:
        num_objects: objects that were checked.
        num_made: copies that were made.
        failed: keys of objects that still have too few copies, and why.
    """

    num_objects: int = 0
    num_made: int = 0
    failed: dict[Key, str] = field(default_factory=dict)


class Replicator:
    """Copies of the objects of a cluster. Thread-safe.

    ::

        copies = Replicator(cluster)
        copies.put(key, block, replicas=2)             # here, and on another host
        copies.replicate(keys, 3)                      # objects that already exist
        copies.move(keys, "10.0.0.7:4000", "10.0.0.9:4000")
        copies.repair(2)                               # after hosts have died

    All copies are equal, and each pool evicts as it likes. The wanted number of copies is not
    stored anywhere: the caller passes it each time.

    Args:
        cluster: whose objects they are.
        placement: where copies go if no node is named. By default, if no other pool has room, a
            pool without room evicts for them, as it does for a put.
    """

    def __init__(
        self,
        cluster: ClusterStore,
        placement: Placement = ANYWHERE,
    ):
        if not isinstance(cluster, ClusterStore):
            raise InvalidArgument(
                f"Replicator: cluster must be a ClusterStore, got {cluster!r:.80}"
            )
        check_placement("Replicator", placement)
        self._cluster = cluster
        self._node = cluster.node
        self._placement = placement

    def put(
        self, key: StoreKey, value: Any, *, replicas: int, retention: Retention = "normal"
    ) -> Stored:
        """Store an object, and copies of it on other hosts. See ``put_each``."""
        return self.put_each([key], [value], replicas=replicas, retention=retention)[0]

    def put_each(
        self,
        keys: StoreKeys,
        values: Sequence[Any],
        *,
        replicas: int,
        retention: Retention = "normal",
    ) -> list[Stored]:
        """Store many objects, each in up to ``replicas`` pools, as far as possible.

        Objects that already exist get the copies that they lack.

        Args:
            keys: n of them.
            values: n: bytes, packed tensors or arrays.
            replicas: number of copies, including the first.
            retention: of all that are stored now, see ``Store.put_from``.

        Raises:
            InvalidArgument: an argument is wrong.
            Unavailable: as ``ClusterStore.put_from``. If the directory goes away only after the
                objects are stored, there are fewer copies.
        """
        check_integer("put_each", "replicas", replicas, 1)
        check_pairs("put_each", "values", keys, values)
        buffers = [
            as_buffer(value, argument=f"put_each: values[{i}]") for i, value in enumerate(values)
        ]
        results = self._cluster.put_from_each(
            keys, [(buffer,) for buffer in buffers], retention=retention
        )
        stored = [i for i, result in enumerate(results) if result in HERE]
        num_copies = dict.fromkeys(stored, 1)
        if replicas > 1 and stored:
            sizes = np.array([buffers[i].num_bytes for i in stored], np.int64)
            words = self._cluster.keyspace.keys(keys, "put_each")[stored]
            options = prompt_options("put_each", len(keys), retention, 0)[stored]
            try:
                copied = self._replicate(words, replicas, sizes, options)
            except Unavailable:  # it is unknown where copies could go
                pass
            else:
                num_copies = dict(zip(stored, copied.num_copies.tolist(), strict=True))
        return [Stored(result, num_copies.get(i, 0)) for i, result in enumerate(results)]

    def replicate(
        self, keys: StoreKeys, num_copies: int, *, retention: Retention = "normal"
    ) -> ReplicationResult:
        """Make copies of n objects until each has this many.

        Args:
            keys: of the objects.
            num_copies: wanted of each.
            retention: of the copies that are made: that of the others is not asked for.

        Raises:
            InvalidArgument: an argument is wrong.
            Unavailable: the directory does not answer.
        """
        check_integer("replicate", "num_copies", num_copies, 1)
        check_retention("replicate", retention)
        words = self._cluster.keyspace.keys(keys, "replicate")
        options = uniform_options(len(words), retention)
        return self._replicate(words, num_copies, np.zeros(len(words), np.int64), options)

    def change_replica(
        self, keys: StoreKeys, *, add: Sequence[str] = (), remove: Sequence[str] = ()
    ) -> ReplicationResult:
        """Add and remove copies of n objects on named nodes.

        An object is removed from a pool only when all pools to be added have it, and a holder that
        keeps it has just confirmed that. So the last copy is never removed, and while copies are
        added and removed there are never fewer than before or after.

        Copies of what this node's pool has are kept as long as there, the others as after any put.

        Args:
            keys: of the objects.
            add: names of members into whose pools they are copied.
            remove: names of members from whose pools they are removed.

        Returns:
            The number of copies, and the objects for which something was not done.

        Raises:
            InvalidArgument: a name is not that of a member with a pool, or a pool is in both.
            Unavailable: the directory does not answer, or a named one, which was a member with a
                pool, is none now.
        """
        members = {member.name: member for member in self._node.directory.members()}
        added = self._members_of("add", add, members)
        removed = {member.pool for member in self._members_of("remove", remove, members)}
        for member in added:
            if member.pool in removed:
                raise InvalidArgument(
                    f"change_replica: add must be of other pools than remove, got {member.name}"
                )
        words = self._cluster.keyspace.keys(keys, "change_replica")
        store = self._node.store
        first, which = _distinct(words)
        words = words[first]
        options = None if store is None else options_in(store.pool, words)
        change = ReplicaChange(self._node, words, list(members.values()), options)
        return change.run(added, removed).of_each(which)

    def copy(self, keys: StoreKeys, target: str) -> ReplicationResult:
        """Copy objects to a node, see ``change_replica``."""
        return self.change_replica(keys, add=[target])

    def move(self, keys: StoreKeys, source: str, target: str) -> ReplicationResult:
        """Copy objects to a node and remove them from another, see ``change_replica``."""
        return self.change_replica(keys, add=[target], remove=[source])

    def repair(self, num_copies: int) -> RepairResult:
        """Make copies of all objects that too few pools have, in all namespaces.

        It reads the whole directory. Objects written or evicted meanwhile may be missed. Any number
        of nodes may do it at once; what two of them copy to one node is stored there once.

        Raises:
            InvalidArgument: an argument is wrong.
            Unavailable: the directory does not answer.
        """
        check_integer("repair", "num_copies", num_copies, 1)
        room, repaired = FreeBytes(), RepairResult()
        for words in self._all_objects():
            sizes, options = np.zeros(len(words), np.int64), uniform_options(len(words))
            copied = self._replicate(words, num_copies, sizes, options, room)
            repaired.num_objects += len(words)
            repaired.num_made += copied.num_made
            for i, reason in copied.failed.items():
                repaired.failed[int(words[i, 0]), int(words[i, 1])] = reason
        return repaired

    def _members_of(
        self, argument: str, names: Sequence[str], members: dict[str, Member]
    ) -> list[Member]:
        op = "change_replica"
        if not isinstance(names, Iterable) or isinstance(names, str | bytes):
            raise InvalidArgument(
                f"{op}: {argument} must be a sequence of names, got {names!r:.80}"
            )
        for name in names:
            if isinstance(name, str) and name not in members and self._node.has_served(name):
                raise Unavailable(f"{op}: {name} is no member now")
            if not isinstance(name, str) or name not in members or not members[name].pool:
                raise InvalidArgument(
                    f"{op}: {argument} must be members with pools, got {name!r:.80}"
                )
        return [members[name] for name in names]

    def _replicate(
        self,
        words: np.ndarray,
        num_copies: int,
        num_bytes: np.ndarray,
        options: np.ndarray,
        room: FreeBytes | None = None,
    ) -> ReplicationResult:
        first, which = _distinct(words)
        job = ReplicationJob(
            self._node,
            self._placement,
            room or FreeBytes(),
            num_copies,
            words[first],
            num_bytes[first],
            options[first],
        )
        return job.run().of_each(which)

    def _all_objects(self) -> Iterator[np.ndarray]:
        """All objects as ``[n, 2]`` batches: each object with the first of its pools."""
        pools = {member.pool for member in self._node.directory.members() if member.pool}
        for pool in sorted(pools):
            cursor = 0
            while True:
                cursor, words = self._node.directory.keys_of(pool, cursor)
                holders = self._node.entries.holders(words)
                yield words[[names[:1] == (pool,) for names in holders]]
                if cursor == 0:
                    break


def _distinct(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each of ``[n, 2]`` keys is first named, in their order; and which of those each is.

    A pool that is asked for one object twice at once is busy with the first when it comes to the
    second.
    """
    numbers: dict[tuple[int, ...], int] = {}
    named = [numbers.setdefault(tuple(word), len(numbers)) for word in words.tolist()]
    which = np.array(named, np.int64)
    return np.unique(which, return_index=True)[1], which
