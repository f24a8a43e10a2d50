"""Objects that have names, in the stores of many hosts."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from mooncake_kernels.buffers import Buffer
from mooncake_kernels.errors import Unavailable
from mooncake_kernels.pool import PutResult
from mooncake_kernels.transfer import Region
from mooncake_serving.store import ClusterStore, Copies
from mooncake_serving.store.directory import Directory
from mooncake_serving.store.node.arriving import Outcome
from mooncake_serving.store.node.sinks import IntoBuffers

from .buffers import Memory
from .codes import CHECKSUM_MISMATCH, INVALID_PARAMS, OBJECT_NOT_FOUND, code_of, log
from .naming import MIN_HEADER_BYTES, encoded, header_bytes, header_of, name_in
from .objects import Objects, Views
from .replicate_config import Keeping

_CODES = {
    Outcome.NOT_TAKEN: INVALID_PARAMS,  # the buffers are too small
    Outcome.DAMAGED: CHECKSUM_MISMATCH,
}


class ClusterObjects(Objects):
    """The same over all hosts: what is here is read here, all else from where it is.

    Args:
        cluster: the store of all hosts.
        directory: of its node.
        namespace: whose objects they are.
        closing: closes all of it.
    """

    def __init__(
        self, cluster: ClusterStore, directory: Directory, namespace: str, closing: ExitStack
    ):
        own = cluster.node.store
        super().__init__(cluster, None if own is None else own.pool, namespace)
        self._cluster = cluster
        self._copies = Copies(cluster)
        self._directory = directory
        self._here = None if own is None else Objects(own, own.pool, namespace)
        self._closing = closing
        self._lock = threading.Lock()
        self._regions: dict[int, Region] = {}

    def get_into_each(self, op: str, names: Sequence[str], views: Sequence[Views]) -> list[int]:
        """Copy values; those that are not here in one request to each host that has some."""
        if self._here is None:
            codes = [code_of(op, partial(_absent, name)) for name in names]
        else:
            codes = self._here.get_into_each(op, names, views)
        missing = [i for i, code in enumerate(codes) if code == OBJECT_NOT_FOUND]

        def read() -> int:
            headers = [header_of(names[i]) for i in missing]
            found = [bytearray(len(header)) for header in headers]
            sinks = [
                IntoBuffers(op, (start, *views[i])) for start, i in zip(found, missing, strict=True)
            ]
            words = self._keyspace.keys([names[i] for i in missing])
            outcomes = self._cluster.read_each(words, sinks)
            for n, i in enumerate(missing):
                codes[i] = _CODES.get(outcomes[n], OBJECT_NOT_FOUND)
                if outcomes[n] is Outcome.DONE and found[n] == headers[n]:
                    sinks[n].deliver()
                    codes[i] = sinks[n].object_bytes - len(headers[n])
            return 0

        if missing and (failure := code_of(op, read)):
            for i in missing:
                codes[i] = failure
        return codes

    def remove_each(self, op: str, names: Sequence[str]) -> list[int]:
        """Remove objects, in one go."""
        codes = [code_of(op, partial(_check, name)) for name in names]
        named = [i for i, code in enumerate(codes) if code == 0]

        def remove() -> int:
            removed = self._store.remove_each([names[i] for i in named])
            for i, was_there in zip(named, removed.tolist(), strict=True):
                codes[i] = 0 if was_there else OBJECT_NOT_FOUND
            return 0

        if named and (failure := code_of(op, remove)):
            for i in named:
                codes[i] = failure
        return codes

    def names(self) -> Iterator[str]:
        """All names that are anywhere, as far as the directory knows."""
        known = set(super().names())
        yield from known
        for pool in {member.pool for member in self._directory.members() if member.pool}:
            cursor, is_first = 0, True
            while cursor or is_first:
                cursor, keys = self._directory.keys_of(pool, cursor)
                is_first = False
                new = {name for name in self._names_of(keys) if name is not None} - known
                known |= new
                yield from new

    def register(self, memory: Memory) -> None:
        if isinstance(memory, Buffer):  # of a GPU: it goes by way of the host
            return
        region = self._cluster.register(memory)
        with self._lock:
            self._regions[region.address] = region

    def deregister(self, address: int) -> None:
        with self._lock:
            region = self._regions.pop(address, None)
        if region is not None:
            self._cluster.deregister(region)

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
        self._closing.close()

    def _put(self, name: str, parts: Sequence[Any], keeping: Keeping) -> PutResult:
        """Further copies are tried: the object is stored with the first."""
        result = super()._put(name, parts, keeping)
        if result is PutResult.STORED and keeping.num_copies > 1:
            try:
                failed = list(self._copies.replicate([name], keeping.num_copies).failed.values())
            except Unavailable as error:
                failed = [str(error)]
            for reason in failed:
                log.warning("put: %r has fewer copies than asked for: %s", name, reason)
        return result

    def _find(self, name: str) -> memoryview | None:
        if self._here is not None and (found := self._here._find(name)) is not None:
            return found
        value = self._cluster.get(name)
        return None if value is None else memoryview(value)

    def _names_of(self, keys: np.ndarray) -> list[str | None]:
        """Read the names of objects of other hosts."""
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

    def _read_starts(self, keys: np.ndarray, sizes: Sequence[int]) -> list[bytearray]:
        starts = [bytearray(size) for size in sizes]
        sinks = [IntoBuffers("names", [start], 0) for start in starts]
        outcomes = self._cluster.node.read(keys, sinks, verify=False) if len(keys) else []
        return [
            start if outcome is Outcome.DONE else bytearray()
            for start, outcome in zip(starts, outcomes, strict=True)
        ]


def _check(name: str) -> int:
    encoded(name)  # which refuses what is no name
    return 0


def _absent(name: str) -> int:
    header_of(name)  # which refuses what is no name
    return OBJECT_NOT_FOUND
