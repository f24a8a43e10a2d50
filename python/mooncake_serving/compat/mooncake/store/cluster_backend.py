"""Named objects, in the stores of many hosts: here, and on other hosts."""

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from mooncake_kernels.buffers import Buffer
from mooncake_kernels.errors import InvalidArgument, Unavailable
from mooncake_kernels.pool import PutResult
from mooncake_kernels.transfer import Region
from mooncake_serving.store import ClusterStore, Keyspace, Node, Replicator
from mooncake_serving.store.cluster import (
    BufferDestination,
    BytesDestination,
    ClusterPut,
    Destination,
    Outcome,
)
from mooncake_serving.store.directory import Directory
from mooncake_serving.store.replication import ANYWHERE, drop_from

from ..codes import Failed
from .backend import LocalBackend, Views, named
from .buffers import Memory, Places, too_small
from .codes import (
    CHECKSUM_MISMATCH,
    FAILURES,
    INVALID_PARAMS,
    OBJECT_NOT_FOUND,
    Answer,
    code_of,
    fill,
    log,
)
from .naming import MIN_HEADER_BYTES, encoded, header_bytes, header_of, is_header, name_in
from .replicas import ReplicaDescriptor, check_segment, replica, size_of_value
from .replicate_config import PutOptions
from .segments import Segments
from .sessions import ReadSession, ReadSpec, WriteSession

THERE = (PutResult.STORED, PutResult.EXISTS)
_CODES = {
    Outcome.NOT_TAKEN: INVALID_PARAMS,  # the buffers are too small
    Outcome.DAMAGED: CHECKSUM_MISMATCH,
}


class ClusterBackend(LocalBackend):
    """The same over all hosts: local objects are read here, all others from where they are.

    Args:
        cluster: the store of all hosts.
        directory: of its node.
        segments: what this process has mounted.
        namespace: of the objects.
        closing: closes all of it.
    """

    def __init__(
        self,
        cluster: ClusterStore,
        directory: Directory,
        segments: Segments,
        namespace: str,
        closing: ExitStack,
    ):
        own = cluster.node.store
        super().__init__(cluster, own, namespace)
        self._cluster = cluster
        self._copies = Replicator(cluster)
        self._directory = directory
        self._segments = segments
        self._remote = RemoteBackend(cluster, self._keyspace)
        self._here = None if own is None else LocalBackend(own, own, namespace, has_order=False)
        self._closing = closing
        self._lock = threading.Lock()
        self._regions: dict[int, Region] = {}

    def put_each(
        self,
        op: str,
        names: Sequence[str],
        values: Sequence[Sequence[Any]],
        options: PutOptions,
        *,
        replace: bool = False,
    ) -> list[int]:
        """Store values; one lookup and one update of the directory, or two to replace them.

        A name that occurs again is put again, after the others.
        """
        objects: dict[int, list[Any]] = {}

        def check(i: int) -> int:
            objects[i] = self._object(names[i], values[i])
            return 0

        codes = [code_of(op, partial(check, i)) for i in range(len(names))]
        left = [*objects]
        while left:
            firsts = {names[i]: i for i in reversed(left)}
            now = sorted(firsts.values())
            wanted = [names[i] for i in now], [objects[i] for i in now]
            fill(op, codes, now, partial(self._put_each, op, *wanted, options, replace=replace))
            left = [i for i in left if firsts[names[i]] != i]
        self._used(named(names, codes))
        return codes

    def get_into_each(self, op: str, names: Sequence[str], views: Sequence[Views]) -> list[int]:
        """Copy values; remote ones with one request to each host that has some."""
        if self._here is None:
            codes = [code_of(op, partial(_absent, name)) for name in names]
        else:
            codes = self._here.get_into_each(op, names, views)
        self._get_missing(op, codes, names, views.__getitem__)
        self._used(named(names, codes))
        return codes

    def get_at_once(self, op: str, names: Sequence[str], places: Places) -> list[int] | None:
        """Copy local values in one call of the pool; remote ones as ``get_into_each``."""
        codes = None if self._here is None else self._here.get_at_once(op, names, places)
        if codes is not None:
            self._get_missing(op, codes, names, places.views)
            self._used([*names])
        return codes

    def _get_missing(
        self,
        op: str,
        codes: list[int],
        names: Sequence[str],
        views_of: Callable[[int], Views],
    ) -> None:
        """Copy the values that are not here, and note their codes."""
        missing = [i for i, code in enumerate(codes) if code == OBJECT_NOT_FOUND]
        wanted = [names[i] for i in missing], [views_of(i) for i in missing]
        fill(op, codes, missing, lambda: self._remote.get_into_each(op, *wanted))

    def get_each(
        self, op: str, names: Sequence[str], make: Callable[[memoryview], Answer]
    ) -> list[Answer | int]:
        """Make something of values; remote ones come with one request to each host."""
        found: list[Answer | int]
        if self._here is None:
            found = [code_of(op, partial(_absent, name)) for name in names]
        else:
            found = self._here.get_each(op, names, make)
        missing = [
            i for i, one in enumerate(found) if isinstance(one, int) and one == OBJECT_NOT_FOUND
        ]
        wanted = [names[i] for i in missing]
        fill(op, found, missing, lambda: self._remote.get_each(op, wanted, make))
        self._used(named(names, found))
        return found

    def begin_each(
        self, op: str, names: Sequence[str], sizes: Sequence[int], options: PutOptions
    ) -> list[WriteSession | int]:
        """Reserve room, with one lookup in the directory."""
        num_bytes = [0] * len(names)

        def check(i: int) -> int:
            num_bytes[i] = len(self._header(names[i], sizes[i])) + sizes[i]
            return 0

        begun: list[WriteSession | int] = [
            code_of(op, partial(check, i)) for i in range(len(names))
        ]
        right = [i for i, code in enumerate(begun) if code == 0]

        def begin() -> list[WriteSession | int]:
            wanted = [names[i] for i in right]
            sizes = [num_bytes[i] for i in right]
            puts = self._cluster.begin_each(wanted, sizes, **self._options(options))
            return [
                self._writing(op, name, put, options)
                for name, put in zip(wanted, puts, strict=True)
            ]

        fill(op, begun, right, begin)
        return begun

    def commit_each(self, op: str, writings: Sequence[WriteSession]) -> list[int]:
        """Make values visible, with one update of the directory."""
        puts: dict[int, ClusterPut] = {}

        def finish(i: int) -> int:
            put = writings[i].finish()
            assert isinstance(put, ClusterPut)
            puts[i] = put
            return 0

        codes = [code_of(op, partial(finish, i)) for i in range(len(writings))]

        def commit() -> list[int]:
            results = self._cluster.commit_each([*puts.values()])
            return [
                code_of(op, partial(self._check_room, writings[i].name, result))
                for i, result in zip(puts, results, strict=True)
            ]

        fill(op, codes, [*puts], commit)
        for i, put in puts.items():
            if put.result in THERE:  # even if a later one has failed
                codes[i] = 0
                self._copy([writings[i].name], writings[i].options)
            else:
                code_of(op, writings[i].abort)
        self._used([writing.name for writing in writings])
        return codes

    def open_each(self, op: str, names: Sequence[str]) -> list[ReadSession | int]:
        """Open values; for remote ones, one request to each host returns their sizes.

        A remote value is read from wherever it is at that time; its host may evict it.
        """
        opened: list[ReadSession | int]
        if self._here is None:
            opened = [code_of(op, partial(_absent, name)) for name in names]
        else:
            opened = self._here.open_each(op, names)
        missing = [i for i, one in enumerate(opened) if one == OBJECT_NOT_FOUND]
        wanted = [names[i] for i in missing]
        fill(op, opened, missing, lambda: self._remote.open_each(op, wanted))
        self._used(named(names, opened))
        return opened

    def num_bytes(self, name: str) -> int:
        here = OBJECT_NOT_FOUND if self._here is None else self._here.num_bytes(name)
        self._used_one(name)
        return self._remote.num_bytes(name) if here == OBJECT_NOT_FOUND else here

    def read_ranges(self, op: str, wanted: Sequence[ReadSpec]) -> list[int]:
        """Fill buffers; all ranges from one other host come in one request."""
        codes = [0] * len(wanted)
        here = [i for i, one in enumerate(wanted) if one.reading.pinned is not None]
        there = [i for i, one in enumerate(wanted) if one.reading.pinned is None]
        read_here = super().read_ranges
        fill(op, codes, here, lambda: read_here(op, [wanted[i] for i in here]))
        fill(op, codes, there, lambda: self._remote.read_ranges(op, [wanted[i] for i in there]))
        return codes

    def remove_each(self, op: str, names: Sequence[str]) -> list[int]:
        """Remove objects, all at once."""
        codes = [code_of(op, partial(_check, name)) for name in names]
        named = [i for i, code in enumerate(codes) if code == 0]

        def remove() -> list[int]:
            removed = self._store.remove_each([names[i] for i in named]).tolist()
            return [0 if was_there else OBJECT_NOT_FOUND for was_there in removed]

        fill(op, codes, named, remove)
        return codes

    def names(self) -> Iterator[str]:
        """All names that exist anywhere, as far as the directory knows."""
        known = set(super().names())
        yield from known
        for pool in {member.pool for member in self._directory.members() if member.pool}:
            cursor, is_first = 0, True
            while cursor or is_first:
                cursor, keys = self._directory.keys_of(pool, cursor)
                is_first = False
                new = {name for name in self._remote.names_of(keys) if name is not None} - known
                known |= new
                yield from new

    def replicas(
        self, op: str, names: Sequence[str], hostname: str
    ) -> list[list[ReplicaDescriptor]]:
        """For each value, which processes have a copy, as far as the directory knows."""
        node, servers = self._cluster.node, self._servers()
        found: list[list[ReplicaDescriptor]] = [[] for _ in names]
        if self._here is not None:
            found = self._here.replicas(op, names, node.name)
        sizes = {i: size_of_value(known[0]) for i, known in enumerate(found) if known}
        opened: list[ReadSession | int] = [code_of(op, partial(_absent, name)) for name in names]
        missing = [
            i for i, code in enumerate(opened) if code == OBJECT_NOT_FOUND and i not in sizes
        ]
        wanted = [names[i] for i in missing]
        fill(op, opened, missing, lambda: self._remote.open_each(op, wanted))
        sizes |= {i: one.num_bytes for i, one in enumerate(opened) if isinstance(one, ReadSession)}
        pools = node.entries.holders(self._keyspace.keys([names[i] for i in sizes]))
        for (i, size), holders in zip(sizes.items(), pools, strict=True):
            for pool in sorted(set(holders) - {node.pool_name}):
                if pool in servers:
                    found[i].append(replica(size, 0, servers[pool]))
        self._used([name for i, name in enumerate(names) if found[i]])
        return found

    def clear(self, op: str, names: Sequence[str], segment: str, hostname: str) -> list[str]:
        """Remove values from the pool that a process serves, or from all."""
        check_segment(segment)
        if not segment:
            return super().clear(op, names, segment, hostname)
        node = self._cluster.node
        named = [name for name in names if code_of(op, partial(_check, name)) == 0]
        words = self._keyspace.keys(named)
        members = self._directory.members()
        pool = next((m.pool for m in members if m.name == segment and m.pool), None)
        if pool is None:
            log.error("%s: segment_name must be a member with a pool, got %r", op, segment)
            return []
        had = [i for i, holders in enumerate(node.entries.holders(words)) if pool in holders]
        if had and (reason := drop_from(node, pool, words[had], members)):
            raise Unavailable(f"{segment} removes nothing: {reason}")
        node.locations.forget(words)
        return [named[i] for i in had]

    def change(self, name: str, add: Sequence[str], remove: Sequence[str]) -> Callable[[], str]:
        segments = {member.name for member in self._directory.members() if member.pool}
        for segment in (*add, *remove):
            check_segment(segment)
            if segment not in segments:
                raise InvalidArgument(
                    f"segments must be of members with a pool, {sorted(segments)}, got {segment!r}"
                )
        if not self.exist([name])[0]:
            raise Failed(OBJECT_NOT_FOUND, f"there is no value of {name!r:.80}")

        def run() -> str:
            failed = self._copies.change_replica([name], add=add, remove=remove).failed
            self._cluster.node.locations.forget(self._keyspace.keys([name]))
            return failed.get(0, "")

        return run

    def segments(self) -> Segments:
        return self._segments

    def register(self, memory: Memory) -> None:
        if isinstance(memory, Buffer):  # of a GPU: by way of the host
            return
        region = self._cluster.register(memory)
        with self._lock:
            self._regions[region.address] = region

    def deregister(self, address: int) -> None:
        with self._lock:
            region = self._regions.pop(address, None)
        if region is not None:
            self._cluster.deregister(region)

    @property
    def node(self) -> Node:
        return self._cluster.node

    def hostname(self, local_hostname: str) -> str:
        """The name of the engine."""
        return self._cluster.node.name

    def health(self) -> int:
        try:
            self._directory.members()
        except Unavailable:
            return 2
        return 0

    def close(self) -> None:
        if self._order is not None:
            self._order.close()
        self._closing.close()

    def _servers(self) -> dict[str, str]:
        """For each pool, one process that serves it."""
        return {member.pool: member.name for member in self._directory.members() if member.pool}

    def _put(self, name: str, parts: Sequence[Any], options: PutOptions) -> PutResult:
        """Additional copies are best effort: the object counts as stored with the first."""
        result = self._cluster.put_from(name, *parts, **self._options(options))
        if result is PutResult.FULL:
            self._check_room(name, result)
        if result is PutResult.STORED:
            self._copy([name], options)
        return result

    def _options(self, options: PutOptions) -> dict[str, Any]:
        """How values are kept, for puts of the cluster."""
        return {"retention": options.retention, "preferred": options.preferred}

    def _put_each(
        self,
        op: str,
        names: Sequence[str],
        objects: Sequence[Sequence[Any]],
        options: PutOptions,
        *,
        replace: bool,
    ) -> list[int]:
        """Put objects of different names: for each 0, or a code."""
        put_alone = self._replace if replace else self._put

        def put_one(i: int) -> int:
            put_alone(names[i], objects[i], options)
            return 0

        try:
            if replace:
                self._store.remove_each(names)
            results = self._cluster.put_from_each(names, objects, **self._options(options))
        except FAILURES:
            if self.health() != 0:
                raise
            # What is wrong with one of them must not fail the others.
            codes = [code_of(op, partial(put_one, i)) for i in range(len(names))]
            # Those that were stored before it failed are put for the second time now, which makes
            # no copies.
            self._copy([names[i] for i, code in enumerate(codes) if code == 0], options)
            return codes
        stored = [i for i, result in enumerate(results) if result is PutResult.STORED]
        self._copy([names[i] for i in stored], options)

        def finish(i: int) -> int:
            self._check_room(names[i], results[i])
            return put_one(i) if replace and results[i] is not PutResult.STORED else 0

        return [code_of(op, partial(finish, i)) for i in range(len(names))]

    def _copy(self, names: Sequence[str], options: PutOptions) -> None:
        if options.num_copies > 1 and names:
            copies = self._copies
            if options.preferred:
                placement = dataclasses.replace(ANYWHERE, preferred=options.preferred)
                copies = Replicator(self._cluster, placement)
            try:
                failed = copies.replicate(
                    names, options.num_copies, retention=options.retention
                ).failed
            except Unavailable as error:
                failed = dict.fromkeys(range(len(names)), str(error))
            for i, reason in failed.items():
                log.warning("put: %r has fewer copies than asked for: %s", names[i], reason)

    def _find(self, name: str) -> memoryview | None:
        if self._here is not None and (found := self._here._find(name)) is not None:
            return found
        value = self._cluster.get(name)
        return None if value is None else memoryview(value)


def _check(name: str) -> int:
    encoded(name)  # refuses invalid names
    return 0


def _absent(name: str) -> int:
    header_of(name)  # refuses invalid names
    return OBJECT_NOT_FOUND


class RemoteBackend:
    """Objects that are not in this node's pool. Thread-safe.

    Its calls raise what ``ClusterStore.read_each`` does.
    """

    def __init__(self, cluster: ClusterStore, keyspace: Keyspace):
        self._cluster = cluster
        self._keyspace = keyspace

    def get_into_each(
        self, op: str, names: Sequence[str], views: Sequence[Sequence[Memory]]
    ) -> list[int]:
        """Copy values, each into its buffers: for each its size, or a code."""
        headers = [header_of(name) for name in names]
        found = [bytearray(len(header)) for header in headers]
        destinations = [
            BufferDestination(op, (start, *one)) for start, one in zip(found, views, strict=True)
        ]
        outcomes = self._read(names, destinations)
        codes = [_code_of(outcome) for outcome in outcomes]
        for i, header in enumerate(headers):
            if outcomes[i] is Outcome.NOT_TAKEN:
                room, size = (
                    num_bytes - len(header)
                    for num_bytes in (destinations[i].num_bytes, destinations[i].object_bytes)
                )
                log.error("%s: %s", op, too_small(size, room))
            if codes[i] == 0:
                codes[i] = OBJECT_NOT_FOUND  # unless its header has this name
                if is_header(found[i], header):
                    destinations[i].deliver()
                    codes[i] = destinations[i].object_bytes - len(header)
        return codes

    def get_each(
        self, op: str, names: Sequence[str], make: Callable[[memoryview], Answer]
    ) -> list[Answer | int]:
        """For each value what ``make`` makes of it, or a code."""
        destinations = [BytesDestination() for _ in names]
        codes = [_code_of(outcome) for outcome in self._read(names, destinations)]
        found: list[Answer | int] = [code or OBJECT_NOT_FOUND for code in codes]

        def make_one(i: int) -> int:
            header, value = header_of(names[i]), memoryview(destinations[i].value())
            if is_header(value, header):
                found[i] = make(value[len(header) :])
            return 0

        for i, code in enumerate(codes):
            if code == 0:
                found[i] = code_of(op, partial(make_one, i)) or found[i]
        return found

    def open_each(self, op: str, names: Sequence[str]) -> list[ReadSession | int]:
        """Open values that are read range by range: for each a ``ReadSession``, or a code. Their
        holders compare them with their checksums now, and not for each range.
        """
        return self._open_each(op, names, was_compared=False)

    def num_bytes(self, name: str) -> int:
        """The size of a value, which is not compared with its checksum; -704 if there is none."""
        (found,) = self._open_each("get_size", [name], was_compared=True)
        return found if isinstance(found, int) else found.num_bytes

    def read_ranges(self, op: str, wanted: Sequence[ReadSpec]) -> list[int]:
        """Fill buffers from ranges of open values: for each value its bytes, or a code.

        Each range is looked up by itself, and the value may be replaced meanwhile. A header is
        never used again: if it is still there after all reads, it was there all the time.
        """
        owners: list[int] = []
        destinations: list[BufferDestination] = []
        for i, one in enumerate(wanted):
            for (first, last), part in zip(one.places(), one.parts, strict=True):
                if first < last:
                    owners.append(i)
                    start = one.reading.start + first
                    destinations.append(BufferDestination(op, [part], start, was_compared=True))
        outcomes = self._read([wanted[i].reading.name for i in owners], destinations)
        codes = [0] * len(wanted)
        for i, sink, outcome in zip(owners, destinations, outcomes, strict=True):
            if codes[i] >= 0:
                code = _code_of(outcome)
                codes[i] = code or codes[i] + sink.num_bytes
                if code == 0:
                    sink.deliver()
        right = [i for i, code in enumerate(codes) if code >= 0]
        names = [wanted[i].reading.name for i in right]
        for i, now in zip(right, self._open_each(op, names, was_compared=True), strict=True):
            if isinstance(now, int) or now.header != wanted[i].reading.header:
                codes[i] = now if isinstance(now, int) else OBJECT_NOT_FOUND
        return codes

    def names_of(self, keys: np.ndarray) -> list[str | None]:
        """Read the names of objects; None for objects without one."""
        starts = self._read_starts(keys, [MIN_HEADER_BYTES] * len(keys))
        sizes = [header_bytes(start) for start in starts]
        longer = [i for i, size in enumerate(sizes) if size > MIN_HEADER_BYTES]
        rest = self._read_starts(keys[longer], [sizes[i] for i in longer])
        for i, start in zip(longer, rest, strict=True):
            starts[i] = start
        names = [name_in(memoryview(start)) for start in starts]
        return [
            name if name is not None and self._keyspace.key(name) == tuple(key) else None
            for name, key in zip(names, keys.tolist(), strict=True)
        ]

    def _open_each(
        self, op: str, names: Sequence[str], *, was_compared: bool
    ) -> list[ReadSession | int]:
        headers = [header_of(name) for name in names]
        found = [bytearray(len(header)) for header in headers]
        destinations = [
            BufferDestination(op, [start], 0, was_compared=was_compared) for start in found
        ]
        opened: list[ReadSession | int] = []
        for i, outcome in enumerate(self._read(names, destinations)):
            code = _code_of(outcome)
            if code == 0 and is_header(found[i], headers[i]):
                num_bytes = destinations[i].object_bytes - len(headers[i])
                opened.append(ReadSession(names[i], num_bytes, bytes(found[i]), None))
            else:
                opened.append(code or OBJECT_NOT_FOUND)
        return opened

    def _read(self, names: Sequence[str], destinations: Sequence[Destination]) -> list[Outcome]:
        return self._cluster.read_each(self._keyspace.keys(names), destinations)

    def _read_starts(self, keys: np.ndarray, sizes: Sequence[int]) -> list[bytearray]:
        starts = [bytearray(size) for size in sizes]
        destinations = [BufferDestination("names", [start], 0) for start in starts]
        outcomes = self._cluster.node.reads.read_each(keys, destinations, verify=False)
        return [
            start if outcome is Outcome.DONE else bytearray()
            for start, outcome in zip(starts, outcomes, strict=True)
        ]


def _code_of(outcome: Outcome) -> int:
    return 0 if outcome is Outcome.DONE else _CODES.get(outcome, OBJECT_NOT_FOUND)
