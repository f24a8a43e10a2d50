"""Objects of pools, by key: what an engine serves to its peers and requests from them."""

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import _host
from .._arguments import as_bool, as_integers, as_seconds
from .._host import RedisPublisher as RedisPublisher
from ..closeable import Closeable
from ..errors import InvalidArgument, shown
from ..pool import ObjectPool
from ..pool.values import as_keys, closed_pool
from .arguments import as_deadline
from .handles import Peer

Place = tuple[int, int]  # address and bytes of local memory

WHOLE = _host.WHOLE_OBJECT
MAX_RPC_KEYS = _host.MAX_RPC_KEYS
MAX_RPC_BYTES = _host.MAX_RPC_BYTES  # in one request, or one answer


class ObjectStatus(enum.IntEnum):
    """A peer's answer about one object. Of csrc/served/object_wire.h."""

    ABSENT = 0  # or it is being written
    DONE = 1  # sent, stored, removed
    DAMAGED = 2  # it differs from its checksum
    BUSY = 3  # ask again: the answer has no room for it, or the peer has no free pin
    DOES_NOT_FIT = 4  # it is larger than requested, or ends before the requested range
    TOO_LARGE = 5  # for any answer; read it by address
    EXISTS = 6
    BEING_WRITTEN = 7
    FULL = 8
    ELSEWHERE = 9  # not in the pool, but its owner may have it elsewhere
    UNLISTED = 10  # not stored: another pool has it or gets it, or there is no directory
    UNSURE = 11  # not stored, and perhaps listed: the directory has not answered
    LATE = 12  # likewise: it has not answered in time


class Served(NamedTuple):
    """What peers have done with a served pool since the last call. ``ObjectPool.counts`` counts it.

    Attributes:
        read: ``[n, 2]`` keys of the first of what they have read; empty if the pool ``is_all``.
        is_listed_in_vain: the directory may list for this pool what was not stored.
    """

    read: np.ndarray
    is_listed_in_vain: bool


class ServedPool(Closeable):
    """A pool that an engine serves: what ``TransferEngine.serve`` returns. A context manager.

    It is served until it is closed, or its engine is, or serves another one; not only as long as
    this object exists.
    """

    def __init__(self, engine: _host.TransferEngine, service: _host.ObjectService):
        self._engine = engine
        self._service = service

    def close(self) -> None:
        """Stop serving it, unless the engine serves another one by now. What peers have pinned or
        begun goes on. Idempotent.
        """
        self._engine.stop_serving(self._service)

    def take(self) -> Served:
        """Return what peers have done since the last call."""
        return Served(*self._service.take_done())

    def let_put(self, takes_puts: bool) -> None:
        """Set whether peers that may write may put objects from now on; they may always remove.

        A put that arrives all the same had already begun: ``ObjectPool.stats().num_writing`` counts
        it until it is stored or given up.

        Raises:
            InvalidArgument: it is not a bool.
        """
        _check_bool("let_put", takes_puts=takes_puts)
        self._service.let_put(takes_puts)

    def let_publish(self, publisher: RedisPublisher | None) -> None:
        """Have objects listed in a directory before they are stored, if peers ask for that.

        Args:
            publisher: lists them; None: nothing can be listed.
        """
        if not isinstance(publisher, RedisPublisher | None):
            raise InvalidArgument(
                f"let_publish: publisher must be a RedisPublisher or None, got {shown(publisher)}"
            )
        self._service.let_publish(publisher)


class ObjectsResponse(Closeable):
    """Objects that a peer sends: what ``TransferEngine.read_objects`` returns. A context manager.

    Until it is received or closed, but for at most a minute, it holds a connection and, at the
    peer, the objects.

    Attributes:
        statuses: ``[n]`` uint8 of ``ObjectStatus``; those that are ``DONE`` are sent.
        object_bytes: ``[n]`` uint64: sizes of the objects, 0 where unknown.
    """

    def __init__(self, reply: _host.ObjectsResponse):
        self._reply = reply
        self.statuses: np.ndarray = reply.statuses
        self.object_bytes: np.ndarray = reply.object_bytes

    def receive(
        self, places: Sequence[Sequence[Place]], *, verify: bool, deadline_s: float | None = None
    ) -> np.ndarray:
        """Receive what is sent. Call it once.

        Args:
            places: n of them: pieces of local host memory, (address, bytes) each, filled in order
                with what is sent of the object; with no pieces, it is discarded.
            verify: compare what has arrived with the checksums that the peer sent.
            deadline_s: seconds from now; None: the setting ``deadline_s``.

        Returns:
            ``[n]`` bool: False where the bytes do not match the checksum.

        Raises:
            InvalidArgument: the sizes of an object's pieces do not add up to what is sent of it.
            TransferError: the peer is gone or the deadline passed; the pieces' contents are
                undefined.
        """
        _check_bool("receive", verify=verify)
        limit_s = as_deadline("receive", deadline_s)
        try:
            return self._reply.receive(places, verify, limit_s)
        except TypeError:
            raise _wrong_places("receive", "places", len(self.statuses), places) from None

    def close(self) -> None:
        """Discard what was not received, which costs the connection. Idempotent."""
        self._reply.close()


class ObjectCalls:
    """The calls of ``TransferEngine`` about objects of pools."""

    _engine: _host.TransferEngine
    _closed: bool

    def serve(
        self,
        pool: ObjectPool | None,
        *,
        is_all: bool = True,
        may_write: bool = False,
        checksum: bool = True,
    ) -> ServedPool | None:
        """Let peers read a pool's objects by key and, if allowed, write some.

        The engine answers by itself, without Python. An object being read is pinned until it is
        sent; one being written becomes visible once all of it has arrived. An engine serves one
        pool, until the next call.

        Args:
            pool: in host memory; None: serve none. It stays mapped, and is served even after its
                own ``close()``, until what is returned is closed, or the engine is, or serves
                another one.
            is_all: there are no objects outside the pool. If False, peers are told that an
                absent object may be ``ELSEWHERE``.
            may_write: peers may put objects, if there is room, and remove them.
            checksum: keep an XXH3-64 of what they put.

        Returns:
            An object that reports what peers have done; None for no pool.

        Raises:
            InvalidArgument: the engine is closed, the pool is on a GPU, or an argument is wrong.
        """
        if pool is None:  # allowed on a closed engine too, which serves none
            self._engine.serve_objects(None)
            return None
        self._check_open("serve")
        if not isinstance(pool, ObjectPool):
            raise InvalidArgument(f"serve: pool must be an ObjectPool or None, got {pool!r}")
        if pool.device is not None:
            raise InvalidArgument(
                f"serve: pool must be in host memory, got one on GPU {pool.device}"
            )
        if pool.closed:
            raise closed_pool(pool.path)
        _check_bool("serve", is_all=is_all, may_write=may_write, checksum=checksum)
        service = _host.ObjectService(pool.native, is_all, may_write, checksum)
        self._engine.serve_objects(service)
        return ServedPool(self._engine, service)

    def read_objects(
        self,
        peer: Peer,
        keys: Any,
        *,
        offsets: Any = None,
        sizes: Any = None,
        sums: bool = True,
        compare: bool = False,
        deadline_s: float | None = None,
    ) -> ObjectsResponse:
        """Ask a peer for objects of the pool it serves: one round trip, without addresses.

        Equivalent to, in the peer's process::

            for key, offset, size in zip(keys, offsets, sizes):
                if pin := pool.pin(key):
                    send(pin[offset : offset + size])   # all of it, if the offset is WHOLE

        Use it as ``with engine.read_objects(peer, keys) as reply: reply.receive(places,
        verify=True)``. It uses a connection of its own, even if the peer's transport is not tcp.
        Ctrl-C takes effect only after the answer or the deadline.

        Args:
            peer: an open one; not ``local``, nor a file.
            keys: ``[n, 2]`` uint64, n from 1 to 1024.
            offsets: ``[n]``: where the wanted range begins in its object; ``WHOLE``: all of it.
                None: all of every object.
            sizes: ``[n]``: bytes from there on; for whole objects, the most to accept. None: any
                size.
            sums: request checksums of what is sent; they are computed where none is stored.
            compare: the peer does not send what differs from its checksum.
            deadline_s: seconds until the answer begins; None: the setting ``deadline_s``.

        Raises:
            InvalidArgument: an argument is wrong.
            TransferError: the peer is gone, or did not answer in time.
            Unavailable: it serves no pool, or its transport does not allow the request.
        """
        self._check_peer("read_objects", peer)
        words = _as_asked("read_objects", keys)
        starts = _as_each("read_objects", "offsets", offsets, len(words))
        counts = _as_each("read_objects", "sizes", sizes, len(words))
        _check_bool("read_objects", sums=sums, compare=compare)
        deadline_s = as_deadline("read_objects", deadline_s)
        return ObjectsResponse(
            read_checked(self, peer, words, starts, counts, sums, compare, deadline_s)
        )

    def read_objects_into(
        self,
        peer: Peer,
        keys: Any,
        places: Sequence[Sequence[Place]],
        *,
        verify: bool = True,
        answer_s: float | None = None,
        deadline_s: float | None = None,
    ) -> np.ndarray:
        """Read whole objects of the pool that a peer serves into memory: one round trip.

        As ``read_objects`` and its reply, where it is known beforehand where the objects go; with
        fewer steps, which small objects notice.

        Args:
            peer: see ``read_objects``.
            keys: see there.
            places: n of them: pieces of local host memory, (address, bytes) each, with room for
                the object, filled in order.
            verify: compare what has arrived with checksums.
            answer_s: seconds until the answer begins; None: ``deadline_s``.
            deadline_s: seconds for all of it; None: the setting ``deadline_s``.

        Returns:
            ``[n]`` int64: sizes of the objects. -1 where there is none, or it has not arrived
            intact, for any reason: ``read_objects`` says which.

        Raises:
            InvalidArgument, TransferError, Unavailable: as ``read_objects``; the contents of the
                memory are then undefined.
        """
        if self._is_ours(peer):  # the common case, in few steps, as in ``Requests``
            begin_s = deadline_s if answer_s is None else answer_s
            sizes = self._engine.read_plain(peer._peer, keys, places, verify, begin_s, deadline_s)
            if sizes is not None:
                return sizes
        self._check_peer("read_objects_into", peer)
        words = _as_asked("read_objects_into", keys)
        as_bool("read_objects_into", "verify", verify)
        deadline_s = as_deadline("read_objects_into", deadline_s)
        if answer_s is not None:
            as_seconds("read_objects_into", "answer_s", answer_s, minimum=1e-6)
        try:
            return self._engine.read_objects_into(
                peer._peer, words, places, verify, answer_s or deadline_s, deadline_s
            )
        except TypeError:
            raise _wrong_places("read_objects_into", "places", len(words), places) from None

    def write_objects(
        self,
        peer: Peer,
        keys: Any,
        objects: Sequence[Sequence[Place]],
        *,
        publish: bool = False,
        verify: bool = True,
        deadline_s: float | None = None,
    ) -> np.ndarray:
        """Have a peer store objects in the pool it serves: one round trip.

        The first object under a key wins. An object that does not arrive whole is not stored.

        Args:
            peer: see ``read_objects``.
            keys: see there.
            objects: n of them: pieces of local host memory, concatenated; 64 MiB in all.
            publish: have the peer list them in its directory first, see ``ServedPool.let_publish``;
                those that it cannot list are ``UNLISTED``, ``UNSURE`` or ``LATE``, and not stored.
            verify: have the peer compare what arrives with checksums computed here.
            deadline_s: seconds for all of it; None: the setting ``deadline_s``.

        Returns:
            ``[n]`` uint8 of ``ObjectStatus``: ``DONE``, ``EXISTS``, ``BEING_WRITTEN``, ``FULL``
            (the peer evicts nothing for it), ``DAMAGED`` on the way, ``TOO_LARGE`` for the pool, or
            ``UNLISTED``, ``UNSURE``, ``LATE``.

        Raises:
            InvalidArgument, Unavailable: as ``read_objects``; also where the pool is read-only.
            TransferError: as ``read_objects``; some objects may have been stored.
        """
        if self._is_ours(peer):
            statuses = self._engine.write_plain(
                peer._peer, keys, objects, publish, verify, deadline_s
            )
            if statuses is not None:
                return statuses
        self._check_peer("write_objects", peer)
        words = _as_asked("write_objects", keys)
        as_bool("write_objects", "publish", publish)
        as_bool("write_objects", "verify", verify)
        deadline_s = as_deadline("write_objects", deadline_s)
        try:
            return self._engine.write_objects(
                peer._peer, words, objects, publish, verify, deadline_s
            )
        except TypeError:
            raise _wrong_places("write_objects", "objects", len(words), objects) from None

    def remove_objects(
        self, peer: Peer, keys: Any, *, deadline_s: float | None = None
    ) -> np.ndarray:
        """Have a peer remove objects from the pool it serves; their readers keep them.

        Returns:
            ``[n]`` uint8 of ``ObjectStatus``: ``DONE`` or ``ABSENT``.

        Raises:
            InvalidArgument, Unavailable, TransferError: as ``write_objects``.
        """
        self._check_peer("remove_objects", peer)
        words = _as_asked("remove_objects", keys)
        deadline_s = as_deadline("remove_objects", deadline_s)
        return self._engine.remove_objects(peer._peer, words, deadline_s)

    def _is_ours(self, peer: Peer) -> bool:
        raise NotImplementedError

    def _check_peer(self, op: str, peer: Peer) -> None:
        raise NotImplementedError

    def _check_open(self, op: str) -> None:
        raise NotImplementedError


def read_checked(
    engine: ObjectCalls,
    peer: Peer,
    keys: np.ndarray,
    offsets: np.ndarray,
    sizes: np.ndarray,
    sums: bool,
    compare: bool,
    deadline_s: float,
) -> _host.ObjectsResponse:
    """``TransferEngine.read_objects`` of arguments that are right: only whether the engine is still
    open is checked again.

    Args:
        engine: of the peer.
        peer: see ``read_objects``.
        keys: ``[n, 2]`` uint64, packed, n from 1 to 1024.
        offsets: ``[n]`` uint64.
        sizes: ``[n]`` uint64.
        sums: see ``read_objects``.
        compare: see there.
        deadline_s: see there.

    Returns:
        What ``ObjectsResponse`` wraps; to be closed.

    Raises:
        InvalidArgument: the engine is closed.
        TransferError, Unavailable: as ``read_objects``; a closed peer is a ``TransferError``.
    """
    if engine._closed:
        engine._check_open("read_objects")
    return engine._engine.read_objects(peer._peer, keys, offsets, sizes, sums, compare, deadline_s)


def read_into_checked(
    engine: ObjectCalls,
    peer: Peer,
    keys: np.ndarray,
    places: list[list[Place]],
    verify: bool,
    answer_s: float,
    deadline_s: float,
) -> np.ndarray:
    """``TransferEngine.read_objects_into`` of arguments that are right, as ``read_checked``."""
    if engine._closed:
        engine._check_open("read_objects_into")
    read = peer._peer, keys, places, verify, answer_s, deadline_s
    sizes = engine._engine.read_plain(*read)
    return engine._engine.read_objects_into(*read) if sizes is None else sizes


def write_checked(
    engine: ObjectCalls,
    peer: Peer,
    keys: np.ndarray,
    objects: list[list[Place]],
    publish: bool,
    verify: bool,
    deadline_s: float,
) -> np.ndarray:
    """``TransferEngine.write_objects`` of arguments that are right, as ``read_checked``."""
    if engine._closed:
        engine._check_open("write_objects")
    write = peer._peer, keys, objects, publish, verify, deadline_s
    statuses = engine._engine.write_plain(*write)
    return engine._engine.write_objects(*write) if statuses is None else statuses


def remove_checked(
    engine: ObjectCalls, peer: Peer, keys: np.ndarray, deadline_s: float
) -> np.ndarray:
    """``TransferEngine.remove_objects`` of arguments that are right, as ``read_checked``."""
    if engine._closed:
        engine._check_open("remove_objects")
    return engine._engine.remove_objects(peer._peer, keys, deadline_s)


def _as_each(op: str, argument: str, values: Any, count: int) -> np.ndarray:
    if values is None:
        return np.full(count, WHOLE)
    array = as_integers(op, argument, values, "[n]")
    if array.shape != (count,):
        raise InvalidArgument(
            f"{op}: {argument} must be as many as keys, got shape {array.shape} and {count} keys"
        )
    return array


def _check_bool(op: str, **flags: bool) -> None:
    for name, value in flags.items():
        as_bool(op, name, value)


def _wrong_places(op: str, argument: str, count: int, given: Any) -> InvalidArgument:
    """The error for an argument that the host code rejects as lists of places."""
    return InvalidArgument(
        f"{op}: {argument} must be {count} lists of (address, num_bytes), got {shown(given)}"
    )


def _as_asked(op: str, keys: Any) -> np.ndarray:
    words = as_keys(op, keys)
    if not 1 <= len(words) <= MAX_RPC_KEYS:
        raise InvalidArgument(f"{op}: keys must be 1 to {MAX_RPC_KEYS}, got {len(words)}")
    return words
