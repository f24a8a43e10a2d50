"""The store over all hosts: the calls of ``Store``, which look at home first."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mooncake_kernels.buffers import Buffer, as_buffer, copy_to_host
from mooncake_kernels.errors import InvalidArgument, TransferError, Unavailable
from mooncake_kernels.pool import ObjectPut, PoolStats, PutResult, Retention
from mooncake_kernels.transfer import Region

from ..checks import check_number, check_positive, check_retention, check_share
from ..closing import Closing
from ..directory import Claim, Member
from ..keyspace import Keyspace, StoreKey, StoreKeys
from ..node import Node
from ..node.asking import Pulls
from ..reader import check_pairs
from .cluster_put import ClusterPut, PutElsewhere, PutHere
from .cluster_reader import ClusterReader
from .hot_keys import HotKeys

RESULT_OF = {Claim.EXISTS: PutResult.EXISTS, Claim.TAKEN: PutResult.BEING_WRITTEN}
THERE = (PutResult.STORED, PutResult.EXISTS)


class ClusterStore(ClusterReader, Closing):
    """KV objects of all hosts whose nodes share a directory. Thread-safe. A context manager.

    ::

        with Store.create(64 << 30, "/dev/shm/kv", namespace="llama-70b/rank0") as store:
            with mk.TransferEngine("10.0.0.7:0") as engine, Node(store, engine, directory) as node:
                cluster = ClusterStore(node)
                cluster.put_each(keys, blocks)          # here; all hosts find them
                cluster.get_into_each(other_keys, ...)  # from here, or from wherever they are

    What the own pool has is found and read as by ``Store``, without asking anybody. An object is
    written once in all hosts, unless the directory has lost what it knew in the meantime: bytes
    should follow from their key, as those of a prefix hash do.

    Args:
        node: of this process; ``close()`` closes it.
        namespace: for a node without a pool, as of ``Store``; others have their store's.
        verify: the share of reads from other nodes that are compared with their checksums, first
            at the holder, then here: 0 to 1.
        claim_s: how long a put may take, at most, before another node may write the same key.
        hot: chooses which objects that are read from other hosts are copied into the own pool;
            None: none is.

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
        self._keyspace = node.store.keyspace if node.store else Keyspace(namespace or "")
        self._verify = verify
        self._claim_s = claim_s
        self._hot = hot
        self._wait_s = claim_s
        self._dropped: deque[np.ndarray] = deque()  # keys of puts that nobody has ended

    def put(
        self, key: StoreKey, value: Any, *, retention: Retention = "normal", position: int = 0
    ) -> PutResult:
        """Store a value: bytes, a packed tensor or array. See ``put_from``."""
        return self.put_from(key, value, retention=retention, position=position)

    def put_from(
        self, key: StoreKey, *parts: Any, retention: Retention = "normal", position: int = 0
    ) -> PutResult:
        """Store an object of one or many parts, which are its bytes one behind the other.

        It is put into the own pool. A node without one, or that is draining, has another take it
        out of its memory, which is registered meanwhile; ``retention`` is "normal" there, and
        ``position`` 0.

        Returns:
            As ``Store.put_from``, of all hosts. ``STORED`` if the directory went away after it had
            been asked: then it is told later.

        Raises:
            InvalidArgument: as ``Store.put_from``.
            Unavailable: it is not here, and the directory does not answer; or, without a pool, no
                other node takes it.
        """
        return self._put_each([key], [parts], retention, position)[0]

    def begin(
        self,
        key: StoreKey,
        num_bytes: int,
        *,
        retention: Retention = "normal",
        position: int = 0,
    ) -> ClusterPut | PutResult:
        """Reserve space for an object that is written in place, layer by layer for example::

            put = cluster.begin(key, sum(layer.nbytes for layer in layers))
            if isinstance(put, PutResult):
                return  # EXISTS: others have it, or had room for it when this pool had none
            with put:
                put.view[first:last] = layer  # each as it comes; or put.buffer, if it is on a GPU

        The space is in the own pool, and the key is this node's to write for ``claim_s``. A node
        without a pool, or that is draining, has it written in memory of the process, and asks who
        takes it when it is committed.

        Returns:
            A put to be committed, or as ``put_from`` why there is none.

        Raises:
            InvalidArgument: as ``Store.begin``.
            Unavailable: the directory does not answer; or no node is known that could take it.
        """
        self.node.check_process()
        check_number("begin", "num_bytes", num_bytes)
        check_retention("begin", retention)
        check_number("begin", "position", position)
        self._settle_dropped()
        words = self._keyspace.keys([key])
        if self._store is None or self.node.is_draining:
            if self.exists(key):
                return PutResult.EXISTS
            self._check_homes(num_bytes)
            return PutElsewhere(num_bytes, partial(self.put, key))
        self._store.check_puts([key])
        if self._are_here(words)[0]:
            return PutResult.EXISTS
        [claim] = self.node.claims.ask(words, self._claim_s).tolist()
        if claim != Claim.GRANTED:
            return RESULT_OF[claim]
        begun: ObjectPut | PutResult | None = None
        try:
            begun = self._store.begin_key(
                (int(words[0, 0]), int(words[0, 1])),
                num_bytes,
                retention=retention,
                position=position,
            )
        finally:
            if not isinstance(begun, ObjectPut):
                self._settle(words, begun in THERE)
        if not isinstance(begun, ObjectPut):
            return begun
        return PutHere(
            begun,
            self.node.check_process,
            partial(self._settle, words),
            partial(self._dropped.append, words),
        )

    def put_each(
        self, keys: StoreKeys, values: Sequence[Any], *, position: int = 0
    ) -> list[PutResult]:
        """Store many objects, in their order; the directory is asked and told once.

        An error ends it, for those that come after.
        """
        check_pairs("put_each", "values", keys, values)
        return self._put_each(keys, [(value,) for value in values], "normal", position)

    def order_prompt(self, keys: StoreKeys) -> None:
        """Have the own pool's LRU take the objects of a prompt from its tail to its head, see
        ``Store.order_prompt``.
        """
        self.node.check_process()
        words = self._keyspace.keys(keys)
        if self._store is not None:
            self._store.age_tail_first(words)

    def remove(self, key: StoreKey) -> bool:
        """Remove an object everywhere; who reads it keeps it. Returns whether it was anywhere.

        Raises:
            Unavailable: the directory, or a node that has it, does not answer; it was removed
                wherever else it is.
        """
        return bool(self.remove_each([key])[0])

    def remove_each(self, keys: StoreKeys) -> np.ndarray:
        """Remove n objects everywhere; who reads them keeps them.

        Returns:
            ``[n]`` bool: which were anywhere.

        Raises:
            Unavailable: the directory, or a node that has some, does not answer; they were removed
                wherever else they are.
        """
        self.node.check_process()
        words = self._keyspace.keys(keys)
        removed = np.zeros(len(words), bool)
        if self._store is not None:
            for i, (first, second) in enumerate(words.tolist()):
                removed[i] = self._store.remove_key((first, second))
        self.node.locations.forget(words)
        pools = self.node.listing.withdraw_all(words)
        unreached = []
        for pool in sorted({name for names in pools for name in names} - {self.node.pool_name}):
            held = np.flatnonzero([pool in names for names in pools])
            try:
                removed[held] |= self._remove_from(pool, words[held])
            except (TransferError, Unavailable) as error:
                self.node.listing.publish_for(pool, words[held])  # where they may still be
                unreached.append(str(error))
        if unreached:
            raise Unavailable(f"remove: it is not removed everywhere: {'; '.join(unreached)}")
        return removed

    def retain(self, key: StoreKey, retention: Retention) -> bool:
        """Say how long the own pool's copy shall stay. Returns whether it has one."""
        return self._store is not None and self._store.retain(key, retention)

    @property
    def keyspace(self) -> Keyspace:
        """How keys of callers become those of pools."""
        return self._keyspace

    def members(self) -> list[Member]:
        """Who takes part, by name, as far as was heard."""
        return self.node.members()

    def stats(self) -> dict[str, PoolStats]:
        """Ask for the numbers of all pools, by name; those that do not answer are left out."""
        found: dict[str, PoolStats] = {}
        if self._store is not None:
            found[self.node.pool_name] = self._store.stats()
        for member in self.members():
            if member.pool and member.pool not in found:
                try:
                    stats = self.node.asking.stat(member.name)
                except (TransferError, Unavailable):
                    continue
                if stats is not None:
                    found[member.pool] = stats
        return found

    def register(self, buffer: Any) -> Region:
        """Register memory, so that objects go there without a copy in between. See ``Node``."""
        return self.node.register(buffer)

    def deregister(self, region: Region) -> None:
        """End that, before the memory is freed.

        Raises:
            InvalidArgument: it is no region.
        """
        if not isinstance(region, Region):
            raise InvalidArgument(f"deregister: region must be a Region, got {region!r:.80}")
        self.node.deregister(region)

    def close(self) -> None:
        """Close the node, see there. Idempotent."""
        self.node.close()

    def _put_each(
        self, keys: StoreKeys, objects: Sequence[Sequence[Any]], retention: Retention, position: int
    ) -> list[PutResult]:
        self.node.check_process()
        check_retention("put", retention)
        check_number("put", "position", position)
        self._settle_dropped()
        words = self._keyspace.keys(keys)
        if self._store is not None:
            self._store.check_puts(keys)
        results = [PutResult.EXISTS] * len(words)
        missing = np.flatnonzero(~self._are_here(words))
        claims = self.node.claims.ask(words[missing], self._claim_s)
        for i, claim in zip(missing.tolist(), claims.tolist(), strict=True):
            results[i] = RESULT_OF.get(claim, PutResult.FULL)
        granted = missing[claims == Claim.GRANTED].tolist()
        stored = np.zeros(len(words), bool)
        published = np.zeros(len(words), bool)
        try:
            for i in set(range(len(words))) - set(granted):
                _as_buffers(objects[i])  # at which nobody else looks
            if self._store is None or self.node.is_draining:
                self._give(words, objects, granted, results, published)
            else:
                for i in granted:
                    key = (int(words[i, 0]), int(words[i, 1]))
                    results[i] = self._store.put_key(
                        key, *objects[i], retention=retention, position=position + i
                    )
                    stored[i] = results[i] in THERE
                new = [i for i in granted if results[i] is PutResult.STORED]
                self._store.age_tail_first(words[new])
        finally:
            self.node.claims.settle(words[granted], stored[granted], published[granted])
        taken = [i for i in missing.tolist() if results[i] is PutResult.BEING_WRITTEN]
        if taken:
            for i, is_here in zip(taken, self._are_here(words[taken]), strict=True):
                if is_here:  # by now, as where a key is named twice
                    results[i] = PutResult.EXISTS
        return results

    def _give(
        self,
        words: np.ndarray,
        objects: Sequence[Sequence[Any]],
        granted: list[int],
        results: list[PutResult],
        published: np.ndarray,
    ) -> None:
        """Have others take objects; one that cannot is followed by the next."""
        buffers = {i: [_in_host(part) for part in _as_buffers(objects[i])] for i in granted}
        left, unanswered, reason = list(granted), set(granted), "there is none"
        for member in self._homes():
            if not left:
                break
            try:
                answers = self._give_to(member, words[left], [buffers[i] for i in left])
            except TransferError as error:
                reason = str(error)
                continue
            for i, answer in zip(list(left), answers, strict=True):
                if isinstance(answer, str):
                    reason = answer
                    continue
                results[i] = answer
                unanswered.discard(i)
                published[i] = answer in THERE
                if answer not in (PutResult.FULL, PutResult.OVER_QUOTA):
                    left.remove(i)
        if unanswered:
            raise Unavailable(f"put: no node with a pool takes it: {reason}")

    def _give_to(
        self, member: Member, words: np.ndarray, objects: Sequence[Sequence[Buffer]]
    ) -> Pulls:
        """Have one node take objects, and see to it that they are published."""
        verify = self._verify > 0
        asking = self.node.asking
        answers: list[PutResult | str | None] = list(
            asking.put(member.name, words, objects, verify=verify)
        )
        is_there = [answer in THERE for answer in answers]
        self.node.listing.publish_for(member.pool, words[is_there])
        if left := [i for i, answer in enumerate(answers) if answer is None]:
            taken = asking.give(
                member.name, words[left], [objects[i] for i in left], self.node.name, verify=verify
            )
            for i, answer in zip(left, taken, strict=True):
                answers[i] = answer
        return [answer for answer in answers if answer is not None]

    def _settle(self, words: np.ndarray, is_stored: bool) -> None:
        """End the claim to one key."""
        self.node.claims.settle(words, np.array([is_stored]), np.zeros(1, bool))

    def _settle_dropped(self) -> None:
        """End the claims of puts that were dropped, where no lock is held."""
        while self._dropped:
            self._settle(self._dropped.popleft(), False)

    def _homes(self) -> list[Member]:
        """Members whose pools take objects, other than the own one; the emptiest pool first."""
        homes = self._known(lambda m: m.pool not in ("", self.node.pool_name) and not m.is_draining)
        return sorted(homes, key=lambda member: -member.free_bytes)

    def _check_homes(self, num_bytes: int) -> None:
        """Refuse what no pool of others could take."""
        largest = max([member.capacity_bytes for member in self._homes()], default=None)
        if largest is None:
            raise Unavailable("begin: no node with a pool takes it: there is none")
        if num_bytes > largest:
            raise InvalidArgument(
                f"begin: num_bytes must be at most {largest}, as large as a pool, got {num_bytes}"
            )

    def _known(self, condition: Callable[[Member], bool]) -> list[Member]:
        """Members for which it holds; the directory is asked if none is known."""
        found = list(filter(condition, self.members()))
        return found or list(filter(condition, self.node.members(anew=True)))

    def _remove_from(self, pool: str, words: np.ndarray) -> np.ndarray:
        """Have one of a pool's nodes remove objects: ``[n]`` bool, which were there."""
        failure: TransferError | None = None
        for member in self._known(lambda member: member.pool == pool):
            try:
                return self.node.asking.remove(member.name, words)
            except TransferError as error:
                failure = error
        if failure is None:
            return np.zeros(len(words), bool)  # it has no members any more
        raise failure


def _as_buffers(parts: Sequence[Any]) -> list[Buffer]:
    """The memory of parts; what is none is refused."""
    return [as_buffer(part, argument=f"put: buffers[{i}]") for i, part in enumerate(parts)]


def _in_host(buffer: Buffer) -> Buffer:
    """Memory that can be sent: of what is on a GPU, a copy."""
    return buffer if buffer.is_host else as_buffer(copy_to_host([buffer]))
