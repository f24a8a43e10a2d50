"""The half of ``SsdTier`` that finds and reads objects. It takes a lock for lookups only."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import Key

from .arguments import as_arrays, as_pairs
from .index import Entry, Index
from .layout import PAGE, checksum
from .reading import Reader
from .stats import Counters
from .watch import TierWatch

ABSENT, TOO_SMALL, DAMAGED = -1, -2, -4  # as ObjectPool.get_into_each has them


class TierReads:
    """The operations that do not change what is on the disk.

    Attributes:
        path: of the file.
    """

    path: str
    _index: Index
    _reader: Reader
    _counters: Counters
    _closed: bool

    def get_into_each(
        self, keys: Any, buffers: Sequence[Any], *, verify: bool = True
    ) -> np.ndarray:
        """Read objects, each into its buffer. Counts as a use.

        Args:
            keys: ``[n, 2]``.
            buffers: n of packed, writable host memory, each at least as large as its object.
            verify: compare each object with its checksum.

        Returns:
            ``[n]`` int64: sizes of the objects; -1 where there is none, -2 where the buffer is too
            small, -4 where the object could not be read, or was verified and damaged: it was
            removed, and its buffer is filled with zeros.

        Raises:
            InvalidArgument: an argument is wrong.
            TransferError: the deadline passed.
        """
        pairs = as_pairs("get_into_each", keys)
        arrays = as_arrays("get_into_each", "buffers", buffers, len(pairs), writable=True)
        self._check_open("get_into_each")
        sizes = np.full(len(pairs), ABSENT, np.int64)
        entries = self._index.pin_each(pairs)
        try:
            wanted = []
            for i, entry in enumerate(entries):
                if entry is not None:
                    num_bytes = entry.record.num_bytes
                    sizes[i] = num_bytes if num_bytes <= len(arrays[i]) else TOO_SMALL
                    if sizes[i] >= 0:
                        wanted.append((i, entry, arrays[i][:num_bytes]))
            ranges = [(entry.record.offset + PAGE, out) for _, entry, out in wanted]
            failed = self._reader.read_each(ranges)
            for j, (i, entry, out) in enumerate(wanted):
                if j in failed or (verify and checksum(out) != entry.record.checksum):
                    out[:] = 0
                    sizes[i] = DAMAGED
                    self._drop_damaged(pairs[i], entry)
        finally:
            self._index.unpin_each([entry for entry in entries if entry is not None])
        self._counters.num_hits += int((sizes >= 0).sum())
        self._counters.num_misses += int((sizes == ABSENT).sum())
        return sizes

    def read_starts(self, keys: Any, num_bytes: int) -> list[bytes]:
        """The first bytes of the objects of ``[n, 2]`` keys, none where there is none, or it cannot
        be read. Does not count as a use; they are not compared with a checksum.

        Raises:
            TransferError: the deadline passed.
        """
        pairs = as_pairs("read_starts", keys)
        self._check_open("read_starts")
        entries = self._index.pin_each(pairs, is_use=False)
        try:
            sizes = [0 if e is None else min(e.record.num_bytes, num_bytes) for e in entries]
            starts = [np.empty(size, np.uint8) for size in sizes]
            found = [i for i, entry in enumerate(entries) if entry is not None]
            ranges = [
                (entry.record.offset + PAGE, starts[i])
                for i, entry in enumerate(entries)
                if entry is not None
            ]
            failed = {found[j] for j in self._reader.read_each(ranges)}
        finally:
            self._index.unpin_each([entry for entry in entries if entry is not None])
        return [b"" if i in failed else start.tobytes() for i, start in enumerate(starts)]

    def num_bytes_each(self, keys: Any) -> np.ndarray:
        """Sizes of the objects of ``[n, 2]`` keys, ``[n]`` int64; -1 where there is none."""
        self._check_open("num_bytes_each")
        entries = [self._index.find(pair) for pair in as_pairs("num_bytes_each", keys)]
        return np.array([ABSENT if e is None else e.record.num_bytes for e in entries], np.int64)

    def positions_each(self, keys: Any) -> np.ndarray:
        """The positions with which they were put: ``[n]`` int64; 0 where there is none."""
        self._check_open("positions_each")
        entries = [self._index.find(pair) for pair in as_pairs("positions_each", keys)]
        return np.array([0 if e is None else e.record.position for e in entries], np.int64)

    def contains_each(self, keys: Any) -> np.ndarray:
        """Return which of ``[n, 2]`` keys are there: ``[n]`` bool. Does not count as a use."""
        self._check_open("contains_each")
        return self._exist(as_pairs("contains_each", keys))

    def match_prefix(self, keys: Any) -> int:
        """Count the leading ``[n, 2]`` keys that are there, up to the first that is not."""
        self._check_open("match_prefix")
        missing = np.flatnonzero(~self._exist(as_pairs("match_prefix", keys)))
        return int(missing[0]) if len(missing) else len(keys)

    def keys(self) -> np.ndarray:
        """Keys of all objects, ``[n, 2]`` uint64, in no particular order."""
        self._check_open("keys")
        return np.array(self._index.keys(), np.uint64).reshape(-1, 2)

    def keys_by_use(self) -> np.ndarray:
        """The same, the most recently used first, as far as the tier knows: objects read since they
        were written, as of this start, before the others; of each the last written first.
        """
        self._check_open("keys_by_use")
        return np.array(self._index.keys_by_use(), np.uint64).reshape(-1, 2)

    def watch(self) -> TierWatch:
        """Watch which objects come and go."""
        self._check_open("watch")
        return TierWatch(self._index)

    def _exist(self, pairs: list[Key]) -> np.ndarray:
        return np.array([pair in self._index for pair in pairs], bool)

    def _drop_damaged(self, key: Key, entry: Entry) -> None:
        if self._index.drop(key, entry):
            self._counters.damaged(key)

    def _check_open(self, op: str) -> None:
        if self._closed:
            raise InvalidArgument(f"{op}: tier must be open, got the closed {self.path!r}")
