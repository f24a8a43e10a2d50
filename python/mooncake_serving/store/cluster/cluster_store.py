"""The store over all hosts: the calls of ``Store``, which look in the local pool first."""

import logging
import math
import random
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mooncake_kernels.buffers import Buffer, as_buffer, as_writable
from mooncake_kernels.closeable import Closeable
from mooncake_kernels.errors import ChecksumError, InvalidArgument, TransferError, Unavailable
from mooncake_kernels.pool import PinnedObject, PoolStats, PutResult, Retention
from mooncake_kernels.transfer import Region

from ..checks import (
    check_number,
    check_pairs,
    check_positive,
    check_retention,
    check_share,
)
from ..directory import Member
from ..keyspace import Keyspace, StoreKey, StoreKeys
from ..store import ABSENT, DAMAGED, Store
from .copies import Copies
from .destinations import Destination, Outcome
from .hot_keys import HotKeys
from .membership import check_preferred
from .node import Node
from .put import ClusterPut, PutBatch, prompt_options
from .reads import BufferDestination, BytesDestination
from .writes import Writes

logger = logging.getLogger(__name__)

TOO_SMALL = -2  # of ObjectPool.get_into_each
PAUSE_S = 0.001  # between looks while another process of this host brings an object here


class ClusterStore(Closeable):
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
                f"ClusterStore: namespace must be None where a store has its own, got {namespace!r}"
            )
        self.node = node
        self._store = node.store
        self._keyspace = node.store.keyspace if node.store else Keyspace(namespace or "")
        self._wait_s = claim_s
        self._reads = node.reads
        self._verify = float(verify)
        self._hot = hot
        self._writes = Writes(node, node.reads, verify=verify > 0, claim_s=claim_s)

    def get(self, key: StoreKey) -> bytes | None:
        """Return a copy of an object; None if none can be reached.

        Raises:
            ChecksumError: every copy is damaged; the damaged copies were removed.
            Unavailable: it is not here, and the directory does not answer.
        """
        value, is_damaged = self._get_here(key)
        if value is not None:
            return value
        words = self._keyspace.row(key, "get")
        destination = BytesDestination()
        [outcome] = self.read_each(words, [destination])
        if outcome is Outcome.DONE:
            return destination.value()
        if is_damaged or outcome is Outcome.DAMAGED:
            raise _damaged("get", words[0])
        return None

    def get_into(self, key: StoreKey, *buffers: Any, offset: int | None = None) -> int | None:
        """Copy an object, or the part of it from ``offset`` on, see ``ObjectPool.get_into``.

        Returns:
            Size of the object; None if none can be reached: the content of the buffers is then
            undefined.

        Raises:
            InvalidArgument: the buffers are too small, or the requested part is not in the object.
            ChecksumError, Unavailable: as in ``get``.
        """
        is_damaged = False
        if self._store is not None:
            try:
                size = self._store.get_into(key, *buffers, offset=offset)
                if size is not None:
                    return size
            except ChecksumError:
                is_damaged = True
                self._withdraw(key)
        destination = BufferDestination("get_into", buffers, offset)
        words = self._keyspace.row(key, "get_into")
        [outcome] = self.read_each(words, [destination])
        if outcome is Outcome.DONE:
            destination.deliver()
            return destination.object_bytes
        if outcome is Outcome.NOT_TAKEN:
            raise destination.refusal("get_into")
        if is_damaged or outcome is Outcome.DAMAGED:
            raise _damaged("get_into", words[0])
        return None

    def get_each(self, keys: StoreKeys) -> list[bytes | None]:
        """Return copies of many objects, see ``get``; those of one holder are read at once."""
        words = self._keyspace.keys(keys, "get_each")
        here = [self._get_here(key) for key in reversed(list(keys))][::-1]  # as Store.get_each
        found = [value for value, _ in here]
        missing = [i for i, value in enumerate(found) if value is None]
        destinations = [BytesDestination() for _ in missing]
        outcomes = self.read_each(words[missing], destinations)
        for i, destination, outcome in zip(missing, destinations, outcomes, strict=True):
            if outcome is Outcome.DONE:
                found[i] = destination.value()
            elif outcome is Outcome.DAMAGED or here[i][1]:
                raise _damaged("get_each", words[i])
        return found

    def get_into_each(self, keys: StoreKeys, buffers: Sequence[Any]) -> np.ndarray:
        """Copy many objects, each into its buffer; the objects of one holder are read at once.

        Args:
            keys: n of them.
            buffers: n of packed, writable memory, each at least as large as its object. Objects
                from other nodes reach a GPU by way of host memory.

        Returns:
            ``[n]`` int64: sizes of the objects; -1 where none can be reached, -2 where the buffer
            is too small, -4 where every copy is damaged.

        Raises:
            InvalidArgument: an argument is wrong; nothing was read.
            Unavailable: the directory does not answer, and some objects are not here; those that
                are here were copied.
        """
        check_pairs("get_into_each", "buffers", keys, buffers)
        words = self._keyspace.keys(keys, "get_into_each")
        sizes = np.full(len(words), ABSENT, np.int64)
        missing = list(range(len(words)))
        left = words
        if self._store is None:
            buffers = as_writable("get_into_each", buffers)
        else:
            sizes = self._store.get_into_each(keys, buffers)
            self.node.entries.withdraw(words[sizes == DAMAGED])
            missing = np.flatnonzero((sizes == ABSENT) | (sizes == DAMAGED)).tolist()
            left = words[missing]
        destinations = [BufferDestination("get_into_each", [buffers[i]]) for i in missing]
        outcomes = self.read_each(left, destinations)
        for i, destination, outcome in zip(missing, destinations, outcomes, strict=True):
            if outcome is Outcome.DONE:
                destination.deliver()
                sizes[i] = destination.object_bytes
            elif outcome is Outcome.NOT_TAKEN:
                sizes[i] = TOO_SMALL
            elif outcome is Outcome.DAMAGED:
                sizes[i] = DAMAGED
        return sizes

    def view(self, key: StoreKey) -> PinnedObject | None:
        """Return an object in place in this node's pool, into which it is copied first if need be.

        Returns:
            See ``Store.view``; None if none can be reached.

        Raises:
            InvalidArgument: the node has no pool.
            Unavailable: there is no room in the pool, another process brings it and does not
                finish, or the directory does not answer.
            ChecksumError: as in ``get``.
        """
        store, copies = self._own_pool("view")
        until = time.monotonic() + self._wait_s
        words = self._keyspace.row(key, "view")
        was_only_on_disk = False
        while True:
            is_damaged = False
            try:
                if (pinned := store.view(key)) is not None:
                    return pinned
            except ChecksumError:
                is_damaged = True
                self._withdraw(key)
            if not self.node.is_open:
                raise self.node.not_open()
            [result], [outcome] = copies.fetch(words, verify=random.random() < self._verify)
            if result is None:
                if is_damaged or outcome is Outcome.DAMAGED:
                    raise _damaged("view", words[0])
                return None
            is_only_on_disk = (
                result is PutResult.EXISTS and not store.pool.contains_each(words).any()
            )
            if result in (PutResult.FULL, PutResult.OVER_QUOTA) or (
                is_only_on_disk and was_only_on_disk  # twice: it may just have been evicted
            ):
                raise Unavailable("view: the own pool has no room, and nothing can be evicted")
            if time.monotonic() > until:
                raise Unavailable(f"view: the object is not here after {self._wait_s:g} s")
            if result is not PutResult.STORED:
                time.sleep(PAUSE_S)
            was_only_on_disk = is_only_on_disk

    def fetch(self, keys: StoreKeys) -> list[PutResult | None]:
        """Copy objects from other pools into this node's, and publish them.

        Returns:
            For each key ``STORED``; ``EXISTS``: it was here; ``BEING_WRITTEN``: another process
            brings it; ``FULL``; None: none can be reached, or every copy is damaged.

        Raises:
            InvalidArgument: the node has no pool.
            Unavailable: the directory does not answer, and some objects are not here.
        """
        _, copies = self._own_pool("fetch")
        if not self.node.is_open:
            raise self.node.not_open()
        words = self._keyspace.keys(keys, "fetch")
        return copies.fetch(words, verify=random.random() < self._verify)[0]

    def exists(self, key: StoreKey) -> bool:
        """Tell whether any pool has an object, as far as the directory knows."""
        self._keyspace.key(key, "exists")
        return bool(self.exists_each([key])[0])

    def exists_each(self, keys: StoreKeys) -> np.ndarray:
        """Tell which of n keys any pool has: ``[n]`` bool.

        Raises:
            Unavailable: the directory does not answer, and some objects are not here.
        """
        return self._reads.exist(self._keyspace.keys(keys, "exists_each"))

    def match_prefix(self, keys: StoreKeys) -> int:
        """Count the leading keys that any pool has, up to the first that none has.

        One round trip, unless this node's pool has some that the directory does not know. The
        locations are remembered: a read that follows does not ask again.

        Raises:
            Unavailable: the directory does not answer, and some objects are not here.
        """
        return self._reads.match_prefix(self._keyspace.keys(keys, "match_prefix"))

    def read_each(self, words: np.ndarray, destinations: Sequence[Destination]) -> list[Outcome]:
        """Read objects of other pools; those that are read repeatedly are copied here.

        Args:
            words: ``[n, 2]`` keys of pools, of objects that are not in this node's.
            destinations: n destinations; the caller calls ``deliver``.

        Returns:
            For each: ``DONE``; ``NOT_TAKEN`` by its destination; ``DAMAGED``: every copy is;
            ``ABSENT``.

        Raises:
            Unavailable: the directory does not answer.
        """
        if not len(words):
            return []
        if not self.node.is_open:
            raise self.node.not_open()
        verify = random.random() < self._verify
        outcomes = self._reads.read_each(words, destinations, verify=verify)
        if self._hot is not None and self.node.copies is not None and not self.node.is_draining:
            read = words[[i for i, outcome in enumerate(outcomes) if outcome is Outcome.DONE]]
            self._copy_hot(self._hot, self.node.copies, read, verify)
        return outcomes

    def put(
        self,
        key: StoreKey,
        value: Any,
        *,
        retention: Retention = "normal",
        position: int = 0,
        preferred: Sequence[str] = (),
    ) -> PutResult:
        """Store a value: bytes, a packed tensor or array. See ``put_from``."""
        words = self._keyspace.row(key, "put")
        named = "put", "value", ""
        return self._put(*named, [key], words, [(value,)], retention, position, preferred)[0]

    def put_from(
        self,
        key: StoreKey,
        *parts: Any,
        retention: Retention = "normal",
        position: int = 0,
        preferred: Sequence[str] = (),
    ) -> PutResult:
        """Store an object of one or many parts; its bytes are the parts in order.

        It is put into this node's pool. A node that has none, or is draining, has another node take
        it out of its memory, which is registered meanwhile. If the other node's engine takes it by
        itself, ``position`` is 0 there; with a ``retention`` it does not.

        Args:
            key: of the object.
            parts: of it, in order.
            retention: see ``Store.put_from``.
            position: likewise.
            preferred: names of members, or hosts, the best first, as in ``Placement``: those before
                this node take it first, into pools that evict for it as for any put. What none of
                them takes, because it is full, draining, silent or unknown, goes where it would
                without them. It is ignored for an object that exists.

        Returns:
            As ``Store.put_from``, of all hosts. ``STORED`` also if the directory went away after it
            has granted a claim: then it is notified later.

        Raises:
            InvalidArgument: as ``Store.put_from``.
            Unavailable: it is not here, and the directory does not answer; or, without a pool, no
                other node takes it.
        """
        words = self._keyspace.row(key, "put_from")
        named = "put_from", "parts", "[{}]"
        return self._put(*named, [key], words, [parts], retention, position, preferred)[0]

    def put_each(
        self,
        keys: StoreKeys,
        values: Sequence[Any],
        *,
        position: int = 0,
        preferred: Sequence[str] = (),
    ) -> list[PutResult]:
        """Store many objects, in their order; the directory is queried and notified once.

        An error ends the call: later objects are not stored. A key that is named twice is put once:
        its later values get ``EXISTS``, or the result of the first if that is not ``STORED``.

        Raises:
            InvalidArgument: an argument is wrong, or a value is larger than this node's pool;
                nothing was stored.
        """
        check_pairs("put_each", "values", keys, values)
        words = self._keyspace.keys(keys, "put_each")
        objects = [(value,) for value in values]
        named = "put_each", "values[{}]", ""
        return self._put(*named, keys, words, objects, "normal", position, preferred)

    def put_from_each(
        self,
        keys: StoreKeys,
        objects: Sequence[Sequence[Any]],
        *,
        retention: Retention = "normal",
        position: int = 0,
        preferred: Sequence[str] = (),
    ) -> list[PutResult]:
        """``put_each`` of objects of many parts, see ``put_from``.

        Args:
            keys: n of them.
            objects: n, each a sequence of its parts.
            retention: of all of them.
            position: of the first.
            preferred: who takes them, see ``put_from``.
        """
        check_pairs("put_from_each", "objects", keys, objects)
        for i, parts in enumerate(objects):
            if not isinstance(parts, Iterable):
                raise InvalidArgument(
                    f"put_from_each: objects[{i}] must be a sequence of parts, got {parts!r:.80}"
                )
        words = self._keyspace.keys(keys, "put_from_each")
        named = "put_from_each", "objects[{}]", "[{}]"
        return self._put(*named, keys, words, objects, retention, position, preferred)

    def begin(
        self,
        key: StoreKey,
        num_bytes: int,
        *,
        retention: Retention = "normal",
        position: int = 0,
        preferred: Sequence[str] = (),
    ) -> ClusterPut | PutResult:
        """Reserve space for an object that is written in place, layer by layer for example::

            put = cluster.begin(key, sum(layer.nbytes for layer in layers))
            if isinstance(put, PutResult):
                return  # EXISTS somewhere, BEING_WRITTEN by another writer, or FULL
            with put:
                put.view[first:last] = layer  # each as it comes; or put.buffer, if it is on a GPU

        The space is in this node's pool, and this node has the exclusive right to write the key for
        ``claim_s``; a put that takes longer may lose to another node, which the commit detects. On
        a node that has no pool, or is draining, or if another is preferred (see ``put_from``), the
        object is written in memory of the process, and another node is asked to take it at the
        commit.

        Returns:
            A put to be committed; or a result as of ``put_from`` that says why there is none.

        Raises:
            InvalidArgument: as ``Store.begin``.
            Unavailable: the directory does not answer; or no other node with a pool is known.
        """
        words = self._keyspace.row(key, "begin")
        check_number("begin", "num_bytes", num_bytes)
        return self._begin("begin", [key], words, [num_bytes], retention, position, preferred)[0]

    def begin_each(
        self,
        keys: StoreKeys,
        num_bytes: Sequence[int],
        *,
        retention: Retention = "normal",
        position: int = 0,
        preferred: Sequence[str] = (),
    ) -> list[ClusterPut | PutResult]:
        """Reserve space for many objects, see ``begin``; the directory is asked once.

        On an error nothing is reserved. A key that is named twice is begun once, and then
        ``BEING_WRITTEN``.
        """
        check_pairs("begin_each", "num_bytes", keys, num_bytes)
        for i, size in enumerate(num_bytes):
            check_number("begin_each", f"num_bytes[{i}]", size)
        words = self._keyspace.keys(keys, "begin_each")
        return self._begin("begin_each", keys, words, num_bytes, retention, position, preferred)

    def commit_each(self, puts: Sequence[ClusterPut]) -> list[PutResult]:
        """Commit the puts that ``begin_each`` returned, see ``ClusterPut.commit``; the directory is
        notified once.

        An error ends the call: puts committed before it are visible, the rest are still open.
        """
        return self._writes.commit_each(puts)

    def order_prompt(self, keys: StoreKeys) -> None:
        """Have LRU evict a prompt's objects in this node's pool from tail to head, see
        ``Store.order_prompt``.
        """
        if not self.node.is_open:
            raise self.node.not_open()
        words = self._keyspace.keys(keys, "order_prompt")
        if self._store is not None:
            self._store.age_tail_first(words)

    def remove(self, key: StoreKey) -> bool:
        """Remove an object everywhere; current readers keep it. Returns whether any pool had it.

        Raises:
            Unavailable: the directory, or a node that has it, does not answer; the object was
                removed from all other pools.
        """
        words = self._keyspace.row(key, "remove")
        if not self.node.is_open:
            raise self.node.not_open()
        return bool(self._writes.remove_each(words)[0])

    def remove_each(self, keys: StoreKeys) -> np.ndarray:
        """Remove n objects everywhere; current readers keep them.

        Returns:
            ``[n]`` bool: whether any pool had each.

        Raises:
            Unavailable: the directory, or a node that has some, does not answer; the objects were
                removed from all other pools.
        """
        if not self.node.is_open:
            raise self.node.not_open()
        words = self._keyspace.keys(keys, "remove_each")
        return self._writes.remove_each(words)

    def retain(self, key: StoreKey, retention: Retention) -> bool:
        """Set how long an object's copies shall stay, in all pools that have one by now.

        Returns:
            Whether any pool had it; what is only on a disk behind one does not count.

        Raises:
            Unavailable: the directory, or every node of a pool that has it, does not answer; it is
                set in all other pools.
        """
        if not self.node.is_open:
            raise self.node.not_open()
        words = self._keyspace.row(key, "retain")
        check_retention("retain", retention)
        return self._writes.retain(words, retention)

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

    def _own_pool(self, op: str) -> tuple[Store, Copies]:
        if self._store is None or self.node.copies is None:
            raise InvalidArgument(f"{op}: node must have a pool, got {self.node.name} without")
        return self._store, self.node.copies

    def _copy_hot(self, hot: HotKeys, copies: Copies, read: np.ndarray, verify: bool) -> None:
        """Count reads of ``[n, 2]`` objects of other pools; copy here what is read repeatedly."""
        try:
            pools, _ = self.node.locations.find(read)
            chosen = hot.read(read, np.array([len(names) for names in pools]))
            if chosen.any():
                copies.fetch(read[chosen], verify=verify)
        except Unavailable as error:  # the requested objects have been read
            logger.info("hot objects are not copied here: %s", error)

    def _get_here(self, key: StoreKey) -> tuple[bytes | None, bool]:
        """Return the local object, and whether it was damaged and is now removed."""
        try:
            return None if self._store is None else self._store.get(key), False
        except ChecksumError:
            self._withdraw(key)
            return None, True

    def _withdraw(self, key: StoreKey) -> None:
        """Tell the directory that the local object is gone because it was damaged."""
        self.node.entries.withdraw(self._keyspace.row(key))

    def _put(
        self,
        op: str,
        whole: str,
        part: str,
        keys: StoreKeys,
        words: np.ndarray,
        objects: Sequence[Sequence[Any]],
        retention: Retention,
        position: int,
        preferred: Sequence[str],
    ) -> list[PutResult]:
        """Store many objects.

        Args:
            op: the call.
            whole: its name of an object, with ``{}`` for the index.
            part: what follows in the name of a part of it, with ``{}`` for the index.
            keys: n of them.
            words: ``[n, 2]``: the same in the pool.
            objects: n of them.
            retention: of all of them.
            position: of the first.
            preferred: who takes them.
        """
        options = self._put_options(op, len(words), retention, position, preferred)
        store = self._store
        most = math.inf
        if store is not None and self.node.admission.is_open:
            most = store.pool.capacity_bytes
        buffers: list[list[Buffer]] = []
        for i, memories in enumerate(objects):
            num_bytes, parts = 0, []
            for j, memory in enumerate(memories):
                try:
                    buffer = as_buffer(memory)
                except InvalidArgument:  # to name it each time takes long
                    as_buffer(memory, argument=f"{op}: {whole.format(i)}{part.format(j)}")
                    raise
                num_bytes += buffer.num_bytes
                parts.append(buffer)
            if num_bytes > most and store is not None:
                store.check_size(op, whole.format(i), num_bytes)
            buffers.append(parts)
        if store is not None:
            store.check_puts(op, keys)
        return self._writes.put_each(PutBatch(words, buffers, options), preferred)

    def _begin(
        self,
        op: str,
        keys: StoreKeys,
        words: np.ndarray,
        num_bytes: Sequence[int],
        retention: Retention,
        position: int,
        preferred: Sequence[str],
    ) -> list[ClusterPut | PutResult]:
        options = self._put_options(op, len(words), retention, position, preferred)
        return self._writes.begin_each(op, keys, words, num_bytes, options, preferred)

    def _put_options(
        self,
        op: str,
        num_objects: int,
        retention: Retention,
        position: int,
        preferred: Sequence[str],
    ) -> np.ndarray:
        """Check how n objects are to be put, and return it as ``[n]`` of ``PUT_OPTIONS``."""
        if not self.node.is_open:
            raise self.node.not_open()
        options = prompt_options(op, num_objects, retention, position)
        if preferred != ():
            check_preferred(op, preferred)
        return options


def _damaged(op: str, key: np.ndarray) -> ChecksumError:
    return ChecksumError(f"{op}: object {tuple(key.tolist())} is damaged wherever it is")
