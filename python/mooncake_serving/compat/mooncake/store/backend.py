"""Named objects, in a store of this host."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_kernels.buffers import Buffer, as_buffer
from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import PinnedObject, PutResult
from mooncake_serving.store import ABSENT, Keyspace, Store

from ..codes import Failed
from .buffers import Memory, Places, size_of, too_small
from .codes import (
    FAILURES,
    INTERNAL_ERROR,
    INVALID_PARAMS,
    NO_AVAILABLE_HANDLE,
    OBJECT_ALREADY_EXISTS,
    OBJECT_NOT_FOUND,
    Answer,
    code_of,
    log,
)
from .naming import (
    NUMBER,
    encoded,
    header_bytes,
    header_of,
    is_header,
    name_in,
    new_header,
    new_headers,
)
from .prompt_order import PromptOrder
from .replicas import ReplicaDescriptor, check_segment, disk_replica, replica
from .replicate_config import PutOptions
from .sessions import ReadSession, ReadSpec, WriteSession

if TYPE_CHECKING:  # it needs an extra, which a pool of one host does not need
    from mooncake_serving.store import ClusterStore, Node

    from .segments import Segments
    from .sessions import AnyPut

    AnyStore = Store | ClusterStore

_REPLACE_S = 10.0  # to replace an object that others are writing too
_PAUSE_S = 1e-3
_LISTED_AT_ONCE = 1024
_START_BYTES = 1 << 10  # of an object, with most headers

Views = Sequence[Memory]


class LocalBackend:
    """The objects of a host's store with names in one namespace. Thread-safe.

    An object is its header and its value, as two parts that are written and read in one call.
    Errors call names ``key``, as callers do.

    Args:
        store: of the objects.
        own: the same, or the part of it that is in this process; None: nothing is.
        namespace: of the objects.
        has_order: whether LRU evicts the values of a prompt from tail to head, see ``PromptOrder``.
    """

    def __init__(
        self, store: "AnyStore", own: Store | None, namespace: str, *, has_order: bool = True
    ):
        self._store = store
        self._own = own
        self._keyspace = Keyspace(namespace)
        self._order = PromptOrder(own) if own is not None and has_order else None

    def put(self, name: str, parts: Sequence[Any], options: PutOptions) -> None:
        """Store a value if the name has none yet; otherwise the existing value stays.

        Raises:
            InvalidArgument: an argument is wrong, or the value is empty.
            Failed: there is no room.
        """
        if self._put(name, self._object(name, parts), options) is PutResult.STORED:
            self._used_one(name)

    def replace(self, name: str, parts: Sequence[Any], options: PutOptions) -> None:
        """Store a value, replacing an existing one. Current readers keep the old one.

        Raises:
            InvalidArgument, Failed: as in ``put``; but if there is no room, the old value is gone.
        """
        self._replace(name, self._object(name, parts), options)
        self._used_one(name)

    def put_each(
        self,
        op: str,
        names: Sequence[str],
        values: Sequence[Sequence[Any]],
        options: PutOptions,
        *,
        replace: bool = False,
    ) -> list[int]:
        """Store values of one or many parts, as ``put`` or ``replace``: for each 0, or a code.

        The last of them first, so that it is the least recently used; but not those that nothing
        evicts: of these the first must be there if there is no room for all.
        """
        put = self._replace if replace else self._put

        def put_one(i: int) -> int:
            put(names[i], self._object(names[i], values[i]), options)
            return 0

        are_names = set(map(type, names)) == {str}
        if len(names) > 1 and are_names:
            with contextlib.suppress(*FAILURES):  # then each is put alone, which reports why
                buffers = [[as_buffer(part) for part in value] for value in values]
                places = _places(buffers)  # which the buffers keep alive
                codes = places and self.put_at_once(op, names, places, options, replace=replace)
                if codes:
                    return codes
        step = _step(names, options) if are_names else 1
        codes = [code_of(op, partial(put_one, i)) for i in range(len(names))[::step]][::step]
        self._used(named(names, codes))
        return codes

    def put_at_once(
        self,
        op: str,
        names: Sequence[str],
        places: Places,
        options: PutOptions,
        *,
        replace: bool = False,
    ) -> list[int] | None:
        """``put_each`` of values in host memory, in one call of the pool; another before it removes
        those to be replaced.

        Returns:
            None if the store has more than a pool, or a value cannot fit into it: none was stored.

        Raises:
            InvalidArgument, Unavailable, OSError: some may be stored, or removed.
        """
        store = self._plain_store()
        if store is None:
            return None
        headers = new_headers(names)
        longest, largest = max(map(len, headers)), int(places.sizes.sum(1).max())
        if longest + largest > store.pool.capacity_bytes:
            return None
        keys = self._keyspace.keys(names)
        if replace:
            store.remove_keys(keys)
        step = _step(names, options)
        results = store.put_headed(
            keys[::step],
            headers[::step],
            places.addresses[::step],
            places.sizes[::step],
            retention=options.retention,
        )[::step]
        are_new = results.count(PutResult.STORED) == len(results)
        self._used([*names], is_tail_first=are_new and step < 0)

        def finish(i: int) -> int:
            if results[i] is not PutResult.FULL:  # others have put it again
                self.replace(names[i], places.views(i), options)
            return self._check_room(names[i], results[i])

        done = {PutResult.STORED} if replace else set(PutResult) - {PutResult.FULL}
        return [
            0 if result in done else code_of(op, partial(finish, i))
            for i, result in enumerate(results)
        ]

    def begin_each(
        self, op: str, names: Sequence[str], sizes: Sequence[int], options: PutOptions
    ) -> list[WriteSession | int]:
        """Reserve room for values written by ranges: for each a ``WriteSession``, or a code."""
        begun: list[WriteSession | int] = [0] * len(names)

        def begin(i: int) -> int:
            num_bytes = len(self._header(names[i], sizes[i])) + sizes[i]
            put = self._store.begin(names[i], num_bytes, retention=options.retention)
            begun[i] = self._writing(op, names[i], put, options)
            return 0

        for i in range(len(names)):
            begun[i] = code_of(op, partial(begin, i)) or begun[i]
        return begun

    def commit_each(self, op: str, writings: Sequence[WriteSession]) -> list[int]:
        """Make values visible: for each 0, or a code; those that failed are given up."""

        def commit(writing: WriteSession) -> int:
            try:
                writing.finish().commit()
            except BaseException:
                writing.abort()
                raise
            return 0

        codes = [code_of(op, partial(commit, writing)) for writing in reversed(writings)][::-1]
        self._used([writing.name for writing in writings])
        return codes

    def open_each(self, op: str, names: Sequence[str]) -> list[ReadSession | int]:
        """Open values to be read by ranges: for each a ``ReadSession``, -704 if absent, or a code.

        A local one stays until it is forgotten, even if it is removed.
        """
        opened: list[ReadSession | int] = [OBJECT_NOT_FOUND] * len(names)

        def open_one(i: int) -> int:
            opened[i] = self._open(names[i]) or OBJECT_NOT_FOUND
            return 0

        for i in range(len(names)):
            opened[i] = code_of(op, partial(open_one, i)) or opened[i]
        self._used(named(names, opened))
        return opened

    def read_ranges(self, op: str, wanted: Sequence[ReadSpec]) -> list[int]:
        """Fill buffers from ranges of open values: for each value its bytes, or a code."""
        return [code_of(op, one.read) for one in wanted]

    def get_into(self, name: str, views: Views) -> int:
        """Copy a value into buffers in order, which may be larger than it.

        Returns:
            Its size; -704 if there is none.

        Raises:
            InvalidArgument: the buffers are too small.
            ChecksumError: it was verified and is damaged.
        """
        num_bytes = self._get_into(name, views)
        self._used_one(name)
        return num_bytes

    def _get_into(self, name: str, views: Views) -> int:
        header = header_of(name)
        found = bytearray(len(header))
        try:
            num_bytes = self._store.get_into(name, found, *views)
        except InvalidArgument:  # in terms of the object, header included
            if (size := self.num_bytes(name)) > (room := sum(map(size_of, views))):
                raise InvalidArgument(too_small(size, room)) from None
            raise
        if num_bytes is None or not is_header(found, header):
            return OBJECT_NOT_FOUND
        return num_bytes - len(header)

    def get_into_each(self, op: str, names: Sequence[str], views: Sequence[Views]) -> list[int]:
        """Copy values, each into its buffers: for each what ``get_into`` returns, or a code.

        They are read from the last to the first, so that the tail of a prefix is the least recently
        used.
        """
        pairs = list(zip(names, views, strict=True))
        codes = [code_of(op, partial(self._get_into, *pair)) for pair in reversed(pairs)][::-1]
        self._used(named(names, codes))
        return codes

    def get_at_once(self, op: str, names: Sequence[str], places: Places) -> list[int] | None:
        """``get_into_each`` with registered host memory, in one call of the pool.

        Returns:
            None if the store has more than a pool.

        Raises:
            InvalidArgument, Unavailable: some may have been copied.
        """
        store = self._plain_store()
        if store is None:
            return None
        headers = [header_of(name) for name in names]
        sizes = store.get_headed(self._keyspace.keys(names), headers, *places, free=NUMBER).tolist()
        codes = [size if size >= 0 else OBJECT_NOT_FOUND for size in sizes]
        unusual = [i for i, size in enumerate(sizes) if size < ABSENT]  # nothing of it is there
        for i in reversed(unusual):
            codes[i] = code_of(op, partial(self._get_into, names[i], places.views(i)))
        self._used([*names], is_tail_first=not unusual)
        return codes

    def get_range(self, name: str, offset: int, view: Memory) -> int:
        """Fill a buffer from a part of a value; returns its size, -704 if there is no value.

        Raises:
            InvalidArgument: the part is not within the value.
        """
        start, size = len(header_of(name)), size_of(view)
        try:
            num_bytes = self._store.get_into(name, view, offset=start + offset)
        except InvalidArgument:
            if 0 <= (there := self.num_bytes(name)) < offset + size:
                raise InvalidArgument(
                    f"src_offset and size must be within the value's {there} bytes, got {size} "
                    f"from {offset}"
                ) from None
            raise
        self._used_one(name)
        return OBJECT_NOT_FOUND if num_bytes is None else size

    def ranges_of(self, name: str) -> Callable[[int, Memory], int]:
        """Return ``get_range`` of a value for many parts of it; one in this node's pool is compared
        with its checksum once, here.

        Raises:
            InvalidArgument: it is not a name.
            ChecksumError: the value was verified and is damaged.
        """
        with contextlib.suppress(Failed):  # it is on the SSD, from which each part is read
            if (reading := self._open(name)) is not None:
                self._used_one(name)
                return lambda offset, view: ReadSpec(reading, [offset], [view]).read()
        return partial(self.get_range, name)

    def view(self, name: str) -> memoryview | None:
        """A value, which stays for as long as the view lives; None if there is none."""
        found = self._view(name)
        self._used_one(name)
        return found

    def _view(self, name: str) -> memoryview | None:
        header = header_of(name)
        found = self._find(name)
        if found is None or not is_header(found, header):
            return None
        return found[len(header) :]

    def get_each(
        self, op: str, names: Sequence[str], make: Callable[[memoryview], Answer]
    ) -> list[Answer | int]:
        """For each value what ``make`` makes of it, -704 if there is none, or a code.

        What it makes may keep the value's view, of which a pool has a limited number.
        """
        found: list[Answer | int] = [OBJECT_NOT_FOUND] * len(names)

        def make_one(i: int) -> int:
            if (value := self._view(names[i])) is not None:
                found[i] = make(value)
            return 0

        for i in range(len(names)):
            found[i] = code_of(op, partial(make_one, i)) or found[i]
        self._used(named(names, found))
        return found

    def num_bytes(self, name: str) -> int:
        """The size of a value, which is not compared with its checksum; -704 if there is none."""
        header = header_of(name)
        num_bytes = None if self._own is None else self._own.num_bytes(name)
        self._used_one(name)
        return OBJECT_NOT_FOUND if num_bytes is None else num_bytes - len(header)

    def exist(self, names: Sequence[str]) -> list[bool]:
        """Return which names exist. Does not count as a use."""
        if not all(issubclass(kind, str) for kind in set(map(type, names))):
            raise InvalidArgument(f"key must be a string, got one that is none in {names!r:.80}")
        if not len(names):  # also of an array
            return []
        found: list[bool] = self._store.exists_each(listed := [*names]).tolist()
        if self._order is not None:
            self._order.shown(listed, found)
        return found

    def remove(self, name: str) -> bool:
        """Remove an object; current readers keep it. Returns whether it was there."""
        encoded(name)
        return self._store.remove(name)

    def remove_each(self, op: str, names: Sequence[str]) -> list[int]:
        """Remove objects: for each 0, -704 if there was none, or a code."""
        store = self._store
        if isinstance(store, Store) and len(names) > 1 and set(map(type, names)) == {str}:
            with contextlib.suppress(*FAILURES):  # then none was removed, unless a disk failed
                removed = store.remove_each(names)
                return [0 if was_there else OBJECT_NOT_FOUND for was_there in removed.tolist()]
        return [code_of(op, partial(self._remove, name)) for name in names]

    def remove_named(self, op: str, names: Iterator[str]) -> int:
        """Remove objects: how many there were, or the first code of those that stay."""
        count = 0
        while some := list(islice(names, _LISTED_AT_ONCE)):
            codes = self.remove_each(op, some)
            count += codes.count(0)
            if failed := [code for code in codes if code not in (0, OBJECT_NOT_FOUND)]:
                return failed[0]
        return count

    def names(self) -> Iterator[str]:
        """All existing names, in no particular order. Reads each object's header, which does not
        count as a use.
        """
        own = self._own
        if own is None:
            return
        keys, _ = own.list_objects()
        for i in range(0, len(keys), _LISTED_AT_ONCE):
            some = keys[i : i + _LISTED_AT_ONCE]
            for key, start in zip(some, own.read_starts(some, _START_BYTES), strict=True):
                if (size := header_bytes(start)) > len(start):
                    [start] = own.read_starts(key[None], size)
                name = name_in(memoryview(start))
                if name is not None and self._keyspace.key(name) == tuple(key.tolist()):
                    yield name

    def replicas(
        self, op: str, names: Sequence[str], hostname: str
    ) -> list[list[ReplicaDescriptor]]:
        """For each value, which processes have a copy; ``hostname``: of this process. It is not
        compared with its checksum.
        """
        own = self._own
        assert own is not None
        found: list[list[ReplicaDescriptor]] = [[] for _ in names]

        def describe(i: int) -> int:  # one at a time: a pool has a limited number of pins
            header = header_of(names[i])  # refuses invalid names
            pinned = own.pool.pin(self._keyspace.key(names[i]))
            if pinned is not None:
                if (one := _reading(names[i], header, pinned)) is not None:
                    found[i] = [replica(one.num_bytes, one.address, hostname)]
            elif (size := self.num_bytes(names[i])) >= 0:
                found[i] = [disk_replica(size)]
            return 0

        for i in range(len(names)):
            code_of(op, partial(describe, i))
        self._used([name for i, name in enumerate(names) if found[i]])
        return found

    def clear(self, op: str, names: Sequence[str], segment: str, hostname: str) -> list[str]:
        """Remove values from a segment; "": from all. Returns the names of those it had."""
        check_segment(segment)
        if segment not in ("", hostname):
            return []
        codes = self.remove_each(op, names)
        return [name for name, code in zip(names, codes, strict=True) if code == 0]

    def change(self, name: str, add: Sequence[str], remove: Sequence[str]) -> Callable[[], str]:
        """Return a function that copies a value to segments and removes it from others.

        It returns the reason of a failure, or "".

        Raises:
            InvalidArgument: there is no such segment.
            Failed: there is no such value.
        """
        raise InvalidArgument("targets must be other hosts, and a pool of one host has none")

    def segments(self) -> "Segments":
        """The segments that this process has mounted.

        Raises:
            InvalidArgument: it can mount nothing.
        """
        raise InvalidArgument(
            "master_server_addr must be the URL of a directory for segments that come and go: a "
            "pool of one host keeps its size"
        )

    def register(self, memory: Memory) -> None:
        """Allow values to be moved to and from this memory, which stays until ``deregister``."""

    def deregister(self, address: int) -> None:
        """Undo ``register``."""

    @property
    def own(self) -> Store | None:
        """The store, or the part of it that is in this process."""
        return self._own

    @property
    def node(self) -> "Node | None":
        """What connects this process to others; None on one host."""
        return None

    def hostname(self, local_hostname: str) -> str:
        """Name of this process."""
        return local_hostname

    def health(self) -> int:
        """0; 2 if the directory does not answer."""
        return 0

    def close(self) -> None:
        if self._order is not None:
            self._order.close()
        self._store.close()

    def _used(self, names: list[str], *, is_tail_first: bool = False) -> None:
        """Put values that were used together in the order of their prompt."""
        if self._order is not None:
            self._order.used(names, is_tail_first=is_tail_first)

    def _used_one(self, name: str) -> None:
        """Do the same with a value that was used by itself."""
        if self._order is not None:
            self._order.used_one(name)

    def _plain_store(self) -> Store | None:
        """The store, if it is a pool that takes all puts for which it has room."""
        store = self._store
        if isinstance(store, Store) and store.is_pool_all and not store.has_quota:
            return store
        return None

    def _remove(self, name: str) -> int:
        return 0 if self.remove(name) else OBJECT_NOT_FOUND

    def _open(self, name: str) -> ReadSession | None:
        """A value in this node's pool, pinned there; None if there is none."""
        header = header_of(name)
        pinned = None if self._own is None else self._own.view(name)
        if pinned is None and self._is_on_disk(name):
            raise Failed(
                NO_AVAILABLE_HANDLE, f"there is no room for {name!r:.80}, which is on the SSD"
            )
        return None if pinned is None else _reading(name, header, pinned)

    def _find(self, name: str) -> memoryview | None:
        pinned = self._store.view(name)
        if pinned is not None:
            return pinned.view  # the pin ends with the view
        if not self._is_on_disk(name):
            return None
        value = self._store.get(name)  # there is no room for it in the pool
        return None if value is None else memoryview(value)

    def _is_on_disk(self, name: str) -> bool:
        """Whether a value that was not in the pool is on a disk behind it."""
        own = self._own
        return own is not None and not own.is_pool_all and own.exists(name)

    def _object(self, name: str, parts: Sequence[Any]) -> list[Any]:
        """The parts of an object: the header, and those of its value."""
        return [self._header(name, sum(map(_num_bytes, parts))), *parts]

    def _header(self, name: str, num_bytes: int) -> bytes:
        """Make the header of a value of this size, which must fit into the pool."""
        header = new_header(name)
        if num_bytes == 0:
            raise InvalidArgument("value must have at least 1 byte, got none")
        room = None if self._own is None else self._own.pool.capacity_bytes
        if room is not None and len(header) + num_bytes > room:
            raise Failed(
                NO_AVAILABLE_HANDLE,
                f"value and key must fit into the pool's {room} bytes, "
                f"got {len(header) + num_bytes}",
            )
        return header

    def _writing(
        self, op: str, name: str, put: "AnyPut | PutResult", options: PutOptions
    ) -> WriteSession | int:
        """The writing of a value whose object was begun, or the code of why it was not."""
        if isinstance(put, PutResult):
            code = code_of(op, partial(self._check_room, name, put))
            if code == 0:
                log.error("%s: there is a value of %r, or it is being written", op, name)
            return code or OBJECT_ALREADY_EXISTS
        header = new_header(name)
        put.view[: len(header)] = header
        return WriteSession(name, put, len(header), options)

    def _replace(self, name: str, parts: Sequence[Any], options: PutOptions) -> None:
        """``replace`` with the parts of an object."""
        until_s = time.monotonic() + _REPLACE_S
        while True:
            self._store.remove(name)
            if self._put(name, parts, options) is PutResult.STORED:
                return
            if time.monotonic() > until_s:
                raise Failed(INTERNAL_ERROR, f"others write {name!r:.80} all the time")
            time.sleep(_PAUSE_S)

    def _put(self, name: str, parts: Sequence[Any], options: PutOptions) -> PutResult:
        """``put`` with the parts of an object."""
        result = self._store.put_from(name, *parts, retention=options.retention)
        if result is PutResult.FULL:
            self._check_room(name, result)
        return result

    def _check_room(self, name: str, result: PutResult) -> int:
        """0, unless there was no room."""
        if result is PutResult.FULL:
            raise Failed(
                NO_AVAILABLE_HANDLE, f"there is no room for {name!r:.80}: all must stay that is"
            )
        return 0


def _step(names: Sequence[str], options: PutOptions) -> int:
    """In which order the values of a batch are put, see ``LocalBackend.put_each``: of a name that
    comes twice, which value counts depends on it.
    """
    return 1 if options.retention == "hard" or len(set(names)) < len(names) else -1


def named(names: Sequence[str], answers: Sequence[Any]) -> list[str]:
    """Those names of a batch which are some, of which no answer was that they are wrong."""
    return [
        name
        for name, answer in zip(names, answers, strict=True)
        if not (isinstance(answer, int) and answer == INVALID_PARAMS) and isinstance(name, str)
    ]


def _reading(name: str, header: bytes, pinned: PinnedObject) -> ReadSession | None:
    """The value in an object; None if the object is another's."""
    if not is_header(pinned.view, header):
        return None
    identity = bytes(pinned.view[: len(header)])
    return ReadSession(name, pinned.num_bytes - len(header), identity, pinned)


def _places(buffers: Sequence[Sequence[Buffer]]) -> Places | None:
    """Where the parts of values are; None unless all are host memory, and no value is empty."""
    if not all(part.is_host for parts in buffers for part in parts):
        return None
    width = max(map(len, buffers))
    rows = [
        [(part.address, part.num_bytes) for part in parts] + [(0, 0)] * (width - len(parts))
        for parts in buffers
    ]
    table = np.array(rows, np.uint64).reshape(len(rows), width, 2)
    places = Places(table[..., 0].copy(), table[..., 1].copy())
    return places if places.sizes.any(1).all() else None


def _num_bytes(part: Any) -> int:
    if isinstance(part, memoryview) and part.c_contiguous:
        return part.nbytes
    return as_buffer(part, argument="value").num_bytes
