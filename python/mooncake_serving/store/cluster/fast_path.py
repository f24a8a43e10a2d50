"""Reads and puts of objects in one round trip: to one other node, or to the directory.

This is the usual case, and small objects arrive sooner than Python gets through the modules that
serve all cases. So it has a way of its own, with as few steps as possible; whatever is unusual is
left to them.
"""

import logging
from collections.abc import Callable, Sequence

import numpy as np

from mooncake_kernels.buffers import Buffer, copy_into
from mooncake_kernels.errors import TransferError, Unavailable
from mooncake_kernels.pool import ObjectPut, PutResult
from mooncake_kernels.transfer import MAX_RPC_KEYS, Peer, RedisPublisher

from ...rpc import Peers
from ..directory import Member
from ..store import Store
from .destinations import Destination, Outcome
from .directory_entries import DirectoryEntries, Locations
from .membership import Membership, PeerBackoff
from .node_server import PoolService
from .object_rpc import UNSURE, NewResult, ObjectRpc
from .retention import put_arguments

logger = logging.getLogger(__name__)

NOT_READ = -1
MAX_PUT_BYTES = 4 << 20  # above, asking whether they exist costs little compared with sending them


class FastPath:
    """Reads by key from the only holder, and puts into one pool. Thread-safe.

    Args:
        peers: connections to the nodes.
        object_rpc: reads and puts.
        locations: where objects are.
        membership: who is there.
        backoff: nodes that are not asked.
        answer_s: how long connecting may take.
        entries: of this node's pool.
        store: of this node's pool; None for none.
        served: the pool, if the engine serves it.
    """

    def __init__(
        self,
        peers: Peers,
        object_rpc: ObjectRpc,
        locations: Locations,
        membership: Membership,
        backoff: PeerBackoff,
        answer_s: float,
        entries: DirectoryEntries,
        store: Store | None,
        served: PoolService | None,
    ):
        self._peers = peers
        self._object_rpc = object_rpc
        self._locations = locations
        self._membership = membership
        self._backoff = backoff
        self._answer_s = answer_s
        self._entries = entries
        self._store = store
        self._served = served

    def read(
        self, keys: np.ndarray, destinations: Sequence[Destination], *, verify: bool
    ) -> list[bool] | None:
        """Read n objects, if it is remembered that the same node has all of them, and no other.

        Args:
            keys: ``[n, 2]``.
            destinations: n destinations.
            verify: whether what has arrived is compared with its checksum.

        Returns:
            For each whether it is in its destination; the others are to be read another way. None
            instead of a list: all are.
        """
        if len(destinations) > MAX_RPC_KEYS:
            return None
        pool = self._locations.only_pool(keys)
        member = None if pool is None else self._membership.server_of(pool)
        if member is None or member in self._backoff:
            return None
        try:
            return self._peers.use(
                member.name,
                self._answer_s,
                lambda peer: self._read_from(peer, keys, destinations, verify),
            )
        except (TransferError, Unavailable) as error:
            self._pass_over(member, error)
            return None

    def _read_from(
        self, peer: Peer, keys: np.ndarray, destinations: Sequence[Destination], verify: bool
    ) -> list[bool] | None:
        places = [
            destination.places for destination in destinations if destination.places is not None
        ]
        if len(places) < len(
            destinations
        ):  # of some the size is not known, or only a part is wanted
            outcomes = self._object_rpc.read(peer, keys, destinations, verify=verify)
            return None if outcomes is None else [outcome is Outcome.DONE for outcome in outcomes]
        sizes = self._object_rpc.read_into(peer, keys, places, verify=verify)
        if sizes is None:
            return None
        are_read = []
        for destination, size in zip(destinations, sizes.tolist(), strict=True):
            are_read.append(size != NOT_READ)
            if size != NOT_READ:
                destination.fill(size)
        return are_read

    def put(
        self,
        keys: np.ndarray,
        objects: Sequence[Sequence[Buffer]],
        home: Member | None,
        *,
        verify: bool,
    ) -> list[NewResult] | None:
        """Put n objects into a pool, if its node's engine also publishes them, and none of them is
        known to be somewhere. Objects that others have, or are writing, are not stored.

        No one is asked beforehand, so it is for few bytes: they may be sent to no effect.

        Args:
            keys: ``[n, 2]``.
            objects: the parts of each, in order.
            home: whose pool it is; None: the emptiest.
            verify: whether what has arrived is compared with what is here.

        Returns:
            For each ``STORED``; ``BEING_WRITTEN`` by another writer; None: it is to be put another
            way, which also finds out why; ``UNSURE``: likewise, but it may be listed without being
            anywhere. None instead of a list: all are to be put another way.
        """
        member = home or next(iter(self._membership.homes()), None)
        if member is None or not member.publishes or not 0 < len(keys) <= MAX_RPC_KEYS:
            return None
        places, num_bytes = [], 0
        for parts in objects:
            place = []
            for part in parts:
                if not part.is_host:
                    return None
                num_bytes += part.num_bytes
                place.append((part.address, part.num_bytes))
            places.append(place)
        if num_bytes > min(MAX_PUT_BYTES, member.free_bytes) or member in self._backoff:
            return None
        if self._locations.knows_any(keys):
            return None
        try:
            with self._peers.lease(member.name, self._answer_s) as peer:
                return self._object_rpc.put_new(peer, keys, places, num_bytes, verify=verify)
        except TransferError as error:
            self._pass_over(member, error)
            return None

    def put_here(
        self,
        keys: np.ndarray,
        objects: Sequence[Sequence[Buffer]],
        make_options: Callable[[], np.ndarray],
    ) -> list[NewResult] | None:
        """Put n objects into this node's pool, in one round trip to the directory.

        They are copied first. Then the directory lists those that no one else has or writes, and
        these become visible. What others have is copied to no effect: so this is for few bytes, and
        for objects that are probably new. Nothing is evicted. The rest is left to puts under
        claims.

        Args:
            keys: ``[n, 2]``.
            objects: the parts of each, in order.
            make_options: returns ``[n]`` of ``PUT_OPTIONS``.

        Returns:
            For each ``STORED``; ``EXISTS`` here; None: it is to be put another way; ``UNSURE``:
            likewise, and it may be listed. None instead of a list: all are, since that cannot be
            done here now, is probably to no effect, or there is no room.

        Raises:
            Unavailable: the directory does not answer; objects may be listed, and are not stored.
            Whatever a put does; some may be stored.
        """
        publisher = None if self._served is None else self._served.publisher
        if publisher is None or not 0 < len(keys) <= MAX_RPC_KEYS:
            return None
        num_bytes = sum(part.num_bytes for parts in objects for part in parts)
        if num_bytes > MAX_PUT_BYTES or self._locations.knows_any(keys):
            return None
        assert self._store is not None
        options = make_options()
        results: list[NewResult] = [
            PutResult.EXISTS if is_here else None for is_here in self._store.has_keys(keys).tolist()
        ]
        puts: dict[int, ObjectPut] = {}
        try:
            for i, (first, second) in enumerate(keys.tolist()):
                if results[i] is not None:
                    continue
                num_bytes = sum(part.num_bytes for part in objects[i])
                begun = self._store.begin_unless_full(
                    (first, second), num_bytes, **put_arguments(options[i])
                )
                if isinstance(begun, ObjectPut):
                    puts[i] = begun
                elif begun is PutResult.FULL:
                    return None
                elif begun is PutResult.EXISTS:
                    results[i] = begun
            for i, put in puts.items():
                copy_into(put.buffer, objects[i])
            if puts:
                self._list_and_commit(publisher, keys, puts, results)
        finally:
            for put in puts.values():
                put.abort()
        return results

    def _list_and_commit(
        self,
        publisher: RedisPublisher,
        keys: np.ndarray,
        puts: dict[int, ObjectPut],
        results: list[NewResult],
    ) -> None:
        asked = list(puts)
        try:
            listed = publisher.publish(keys[asked])
            if listed is None:
                self._entries.is_stale = True
                if publisher.is_late:  # so would be the answer to a claim
                    raise Unavailable("put: the directory does not answer in time")
                for i in asked:
                    results[i] = UNSURE
                return
            for i, is_listed in zip(asked, listed.tolist(), strict=True):
                if is_listed:
                    puts[i].commit()
                    results[i] = PutResult.STORED
        except BaseException:
            self._entries.is_stale = True  # what it lists may not be there
            raise
        stored = [i for i in asked if results[i] is PutResult.STORED]
        self._entries.note_listed(keys[stored], np.array([puts[i].id for i in stored], np.uint64))

    def _pass_over(self, member: Member, error: TransferError | Unavailable) -> None:
        logger.info("%s is passed over: %s", member.name, error)
        self._backoff.failed(member, error)
