"""Values on other hosts: one request to each host that has some, however many are read."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from mooncake_serving.store.cluster.destinations import (
    BufferDestination,
    BytesDestination,
    Destination,
    Outcome,
)
from mooncake_serving.store.keyspace import Keyspace

from .buffers import Memory, too_small
from .codes import (
    CHECKSUM_MISMATCH,
    INVALID_PARAMS,
    OBJECT_NOT_FOUND,
    Answer,
    code_of,
    log,
)
from .naming import MIN_HEADER_BYTES, header_bytes, header_of, is_header, name_in
from .sessions import Reading, Wanted

if TYPE_CHECKING:
    from mooncake_serving.store import ClusterStore

_CODES = {
    Outcome.NOT_TAKEN: INVALID_PARAMS,  # the buffers are too small
    Outcome.DAMAGED: CHECKSUM_MISMATCH,
}


class Elsewhere:
    """Objects that are not in this node's pool. Thread-safe.

    Its calls raise what ``ClusterStore.read_each`` does.
    """

    def __init__(self, cluster: "ClusterStore", keyspace: Keyspace):
        self._cluster = cluster
        self._keyspace = keyspace

    def get_into_each(
        self, op: str, names: Sequence[str], views: Sequence[Sequence[Memory]]
    ) -> list[int]:
        """Copy values, each into its buffers: for each its size, or a code."""
        headers = [header_of(name) for name in names]
        found = [bytearray(len(header)) for header in headers]
        sinks = [
            BufferDestination(op, (start, *one)) for start, one in zip(found, views, strict=True)
        ]
        outcomes = self._read(names, sinks)
        codes = [_code_of(outcome) for outcome in outcomes]
        for i, header in enumerate(headers):
            if outcomes[i] is Outcome.NOT_TAKEN:
                room, size = (
                    num_bytes - len(header)
                    for num_bytes in (sinks[i].num_bytes, sinks[i].object_bytes)
                )
                log.error("%s: %s", op, too_small(size, room))
            if codes[i] == 0:
                codes[i] = OBJECT_NOT_FOUND  # unless its header has this name
                if is_header(found[i], header):
                    sinks[i].deliver()
                    codes[i] = sinks[i].object_bytes - len(header)
        return codes

    def get_each(
        self, op: str, names: Sequence[str], make: Callable[[memoryview], Answer]
    ) -> list[Answer | int]:
        """For each value what ``make`` makes of it, or a code."""
        sinks = [BytesDestination() for _ in names]
        codes = [_code_of(outcome) for outcome in self._read(names, sinks)]
        found: list[Answer | int] = [code or OBJECT_NOT_FOUND for code in codes]

        def make_one(i: int) -> int:
            header, value = header_of(names[i]), memoryview(sinks[i].value())
            if is_header(value, header):
                found[i] = make(value[len(header) :])
            return 0

        for i, code in enumerate(codes):
            if code == 0:
                found[i] = code_of(op, partial(make_one, i)) or found[i]
        return found

    def open_each(self, op: str, names: Sequence[str]) -> list[Reading | int]:
        """Open values that are read range by range: for each a ``Reading``, or a code. Their
        holders compare them with their checksums now, and not for each range.
        """
        return self._open_each(op, names, was_compared=False)

    def num_bytes(self, name: str) -> int:
        """The size of a value, which is not compared with its checksum; -704 if there is none."""
        (found,) = self._open_each("get_size", [name], was_compared=True)
        return found if isinstance(found, int) else found.num_bytes

    def read_ranges(self, op: str, wanted: Sequence[Wanted]) -> list[int]:
        """Fill buffers from ranges of open values: for each value its bytes, or a code.

        Each range is looked up by itself, and the value may be replaced meanwhile. A header is
        never used again: if it is still there after all reads, it was there all the time.
        """
        owners: list[int] = []
        sinks: list[BufferDestination] = []
        for i, one in enumerate(wanted):
            for (first, last), part in zip(one.places(), one.parts, strict=True):
                if first < last:
                    owners.append(i)
                    start = one.reading.start + first
                    sinks.append(BufferDestination(op, [part], start, was_compared=True))
        outcomes = self._read([wanted[i].reading.name for i in owners], sinks)
        codes = [0] * len(wanted)
        for i, sink, outcome in zip(owners, sinks, outcomes, strict=True):
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
    ) -> list[Reading | int]:
        headers = [header_of(name) for name in names]
        found = [bytearray(len(header)) for header in headers]
        sinks = [BufferDestination(op, [start], 0, was_compared=was_compared) for start in found]
        opened: list[Reading | int] = []
        for i, outcome in enumerate(self._read(names, sinks)):
            code = _code_of(outcome)
            if code == 0 and is_header(found[i], headers[i]):
                num_bytes = sinks[i].object_bytes - len(headers[i])
                opened.append(Reading(names[i], num_bytes, bytes(found[i]), None))
            else:
                opened.append(code or OBJECT_NOT_FOUND)
        return opened

    def _read(self, names: Sequence[str], sinks: Sequence[Destination]) -> list[Outcome]:
        return self._cluster.read_each(self._keyspace.keys(names), sinks)

    def _read_starts(self, keys: np.ndarray, sizes: Sequence[int]) -> list[bytearray]:
        starts = [bytearray(size) for size in sizes]
        sinks = [BufferDestination("names", [start], 0) for start in starts]
        outcomes = self._cluster.node.read(keys, sinks, verify=False) if len(keys) else []
        return [
            start if outcome is Outcome.DONE else bytearray()
            for start, outcome in zip(starts, outcomes, strict=True)
        ]


def _code_of(outcome: Outcome) -> int:
    return 0 if outcome is Outcome.DONE else _CODES.get(outcome, OBJECT_NOT_FOUND)
