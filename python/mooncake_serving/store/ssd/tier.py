"""The SSD tier: objects in a file on a local disk, found again after a restart."""

import ctypes
import operator
import os
import threading
from collections.abc import Sequence, Sized
from typing import Any

import numpy as np

from mooncake_kernels.buffers import as_buffer
from mooncake_kernels.closeable import Closeable
from mooncake_kernels.errors import InvalidArgument, TransferError, Unavailable
from mooncake_kernels.pool import Key, PoolChanges, PutResult

from .disk import Disk, Health, Reader
from .index import Bucket, Entry, Index
from .layout import FIRST_BUCKET, PAGE, REMOVAL, checksum, footer_bytes, record_bytes
from .log import Appender, Log
from .recovery import begin, recover
from .stats import Counters, SsdStats

ABSENT, TOO_SMALL, DAMAGED = -1, -2, -4  # as ObjectPool.get_into_each has them
NUM_HALVES = 2  # of the appender's memory
MAX_BYTES = 1 << 62
MAX_POSITION = (1 << 16) - 1  # as a pool keeps


class TierWatch(Closeable):
    """What ``SsdTier.watch`` returns. Thread-safe. A context manager."""

    def __init__(self, index: Index):
        self._index = index
        self._changed = index.watch()

    def look(self) -> PoolChanges:
        """Return what came and went since the last look; the first time, everything that is there.

        An object that came and went in between is not reported, nor one that went and came.
        """
        removed, stored = self._index.take_changes(self._changed)
        return PoolChanges(
            np.array(removed, np.uint64).reshape(-1, 2), np.array(stored, np.uint64).reshape(-1, 2)
        )

    def close(self) -> None:
        """Stop collecting changes. Idempotent."""
        self._index.unwatch(self._changed)


class SsdTier(Closeable):
    """Immutable objects under 128-bit keys, in a file on a local disk. A context manager.

    ::

        with SsdTier("/mnt/ssd/kv", 1 << 40) as tier:
            tier.put_each(keys, blocks)
            tier.sync()                              # from now on they outlast a loss of power
            sizes = tier.get_into_each(keys, buffers)

    The file is a log of large buckets that are written one after the other and reused in turn, as a
    whole: objects that were read meanwhile are moved, the others dropped. Thread-safe; reads take a
    lock for a lookup only. Only one tier at a time can have the file open. Layout and guarantees:
    docs/store/ssd.md.

    Args:
        path: of the file; made if it does not exist.
        capacity_bytes: of all buckets, allocated at once; the same or more when it is opened again.
        bucket_bytes: whole pages of 4 KiB, at least 64 KiB; at least two buckets must fit into
            ``capacity_bytes``. One bucket is always free. An object is smaller than a bucket.
        move_ratio: how much of a bucket that is freed may be moved, 0 to 0.5: writes are amplified
            by ``1 / (1 - move_ratio)`` at most, apart from headers and padding.
        retry_s: after a failed write, how long puts are answered ``FULL``, in seconds.
        deadline_s: for each read, write and sync, in seconds.
        slot_bytes: what is read or written at once: whole pages.
        num_slots: how many reads are in flight at once.

    Attributes:
        path: of the file.
        max_object_bytes: size of the largest object that it takes.

    Raises:
        InvalidArgument: an argument is wrong, or the file is not a tier, or has other buckets.
        Unavailable: the layout has another version, or another tier has the file open.
        OSError: the file cannot be made, or there is no space for it.
        TransferError: it cannot be read, or not the head of a bucket that has no footer either.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        capacity_bytes: int,
        *,
        bucket_bytes: int = 256 << 20,
        move_ratio: float = 0.25,
        retry_s: float = 10.0,
        deadline_s: float = 30.0,
        slot_bytes: int = 4 << 20,
        num_slots: int = 4,
    ):
        _as_number("bucket_bytes", bucket_bytes, 64 << 10, MAX_BYTES)
        _as_number("capacity_bytes", capacity_bytes, 2 * bucket_bytes, MAX_BYTES)
        _as_number("slot_bytes", slot_bytes, PAGE, 1 << 30)
        _as_number("num_slots", num_slots, 1, 1024)
        retry_s = _as_number("retry_s", retry_s, 0, MAX_BYTES, float)
        deadline_s = _as_number("deadline_s", deadline_s, 1e-3, 1e6, float)
        move_ratio = _as_number("move_ratio", move_ratio, 0, 0.5, float)
        for name, value in (("bucket_bytes", bucket_bytes), ("slot_bytes", slot_bytes)):
            if value % PAGE:
                raise InvalidArgument(f"SsdTier: {name} must be whole pages of 4096, got {value}")
        self._bucket_bytes = bucket_bytes
        self.max_object_bytes = bucket_bytes - PAGE - footer_bytes(1) - record_bytes(0)
        num_buckets = capacity_bytes // bucket_bytes
        num_bytes = FIRST_BUCKET + num_buckets * bucket_bytes
        staging_bytes = (NUM_HALVES + num_slots) * slot_bytes
        self._disk = Disk(_as_path(path), bucket_bytes, num_bytes, staging_bytes, deadline_s)
        self.path = self._disk.path
        self._closed = False
        self._write_lock = threading.Lock()
        self._index, self._counters = Index(), Counters()
        self._health = Health(self.path, retry_s)
        self._appender = Appender(self._disk, slot_bytes)
        self._buckets = [Bucket(i, FIRST_BUCKET + i * bucket_bytes) for i in range(num_buckets)]
        try:
            reader = Reader(self._disk, NUM_HALVES * slot_bytes, num_slots, slot_bytes)
            tier_id = self._disk.tier_id or begin(self._disk, self._appender, bucket_bytes)
            recover(reader, self.path, tier_id, bucket_bytes, self._buckets, self._index)
        except BaseException:
            self._disk.close()
            raise
        self._reader = reader
        self._log = Log(
            self._disk,
            reader,
            self._appender,
            self._index,
            self._counters,
            self._buckets,
            tier_id=tier_id,
            bucket_bytes=bucket_bytes,
            move_ratio=move_ratio,
            deadline_s=deadline_s,
        )

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
        pairs = _as_pairs("get_into_each", keys)
        arrays = _as_arrays("get_into_each", "buffers", buffers, len(pairs), writable=True)
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
        pairs = _as_pairs("read_starts", keys)
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
        entries = [self._index.find(pair) for pair in _as_pairs("num_bytes_each", keys)]
        return np.array([ABSENT if e is None else e.record.num_bytes for e in entries], np.int64)

    def positions_each(self, keys: Any) -> np.ndarray:
        """The positions with which they were put: ``[n]`` int64; 0 where there is none."""
        self._check_open("positions_each")
        entries = [self._index.find(pair) for pair in _as_pairs("positions_each", keys)]
        return np.array([0 if e is None else e.record.position for e in entries], np.int64)

    def contains_each(self, keys: Any) -> np.ndarray:
        """Return which of ``[n, 2]`` keys are there: ``[n]`` bool. Does not count as a use."""
        self._check_open("contains_each")
        return self._exist(_as_pairs("contains_each", keys))

    def match_prefix(self, keys: Any) -> int:
        """Count the leading ``[n, 2]`` keys that are there, up to the first that is not."""
        self._check_open("match_prefix")
        missing = np.flatnonzero(~self._exist(_as_pairs("match_prefix", keys)))
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

    def put_each(
        self, keys: Any, values: Sequence[Any], positions: Sequence[int] | None = None
    ) -> list[PutResult]:
        """Store objects, in their order. They survive this process, and after ``sync`` its host.

        Args:
            keys: ``[n, 2]``.
            values: n of packed host memory, which must not change during the call.
            positions: n, of the objects in their prompts: kept with them. None: 0.

        Returns:
            n of: ``STORED``; ``EXISTS``: nothing was done; ``FULL``: the disk could not be written,
            now or less than ``retry_s`` ago, see ``stats()``.

        Raises:
            InvalidArgument: an argument is wrong, or an object is larger than ``max_object_bytes``;
                nothing was stored.
        """
        pairs = _as_pairs("put_each", keys)
        arrays = _as_arrays("put_each", "values", values, len(pairs), writable=False)
        places = _as_positions("put_each", positions, len(pairs))
        for i, array in enumerate(arrays):
            if len(array) > self.max_object_bytes:
                raise InvalidArgument(
                    f"put_each: values[{i}] must be at most {self.max_object_bytes} bytes, "
                    f"got {len(array)}"
                )
        appended: dict[Key, Entry] = {}
        with self._write_lock:
            self._check_open("put_each")
            existed = self._exist(pairs)
            try:
                if self._health.is_writable:
                    with self._log.step():
                        for pair, array, place in zip(pairs, arrays, places, strict=True):
                            if pair not in self._index and pair not in appended:
                                appended[pair] = self._log.append(pair, array, position=place)
                        self._log.flush()
            except TransferError as error:
                self._health.failed(error)
            else:
                if appended:
                    self._health.succeeded()
        stored = {pair for pair, entry in appended.items() if entry.is_stored}
        results = []
        for pair, array, exists in zip(pairs, arrays, existed, strict=True):
            if pair in stored:
                stored.remove(pair)  # of a key named twice, the first is stored
                self._counters.user_bytes += len(array)
                results.append(PutResult.STORED)
            else:
                exists = exists or pair in self._index
                results.append(PutResult.EXISTS if exists else PutResult.FULL)
        return results

    def remove(self, key: Key) -> bool:
        """Remove an object, which takes a page of the disk; returns whether it was there.

        Raises:
            Unavailable: the disk could not be written; the object is still there, or, if its put
                failed before, or it could not be read, may be there after a restart.
        """
        return bool(self._remove_each("remove", [key])[0])

    def remove_each(self, keys: Any) -> np.ndarray:
        """Remove the objects of ``[n, 2]`` keys, see ``remove``: ``[n]`` bool, which were there.

        Raises:
            Unavailable: as in ``remove``; some may be removed.
        """
        return self._remove_each("remove_each", keys)

    def _remove_each(self, op: str, keys: Any) -> np.ndarray:
        pairs = _as_pairs(op, keys)
        removed: set[Key] = set()
        with self._write_lock:
            self._check_open(op)
            were_there = self._exist(pairs)
            try:
                with self._log.step():
                    for i, pair in enumerate(pairs):
                        were_there[i] &= pair not in removed
                        if were_there[i] or self._log.may_reappear(pair):
                            self._log.append(pair, np.empty(0, np.uint8), REMOVAL)
                            removed.add(pair)
                    if removed:
                        self._log.flush()
            except TransferError as error:
                self._health.failed(error)
                raise Unavailable(f"{op}: {self.path!r} could not be written: {error}") from None
        return were_there

    def remove_all(self) -> int:
        """Remove all objects; returns how many there were.

        Raises:
            Unavailable: the disk could not be written, and they are still there; or it could not be
                synced: they are removed, but may be back after a loss of power.
        """
        with self._write_lock:
            self._check_open("remove_all")
            num_removed = len(self._index)
            try:
                self._log.clear(os.urandom(16))
            except TransferError as error:
                self._health.failed(error)
                raise Unavailable(
                    f"remove_all: {self.path!r} could not be written: {error}"
                ) from None
        return num_removed

    def sync(self) -> None:
        """Wait until everything stored and removed is durable across a loss of power (fdatasync).

        Raises:
            Unavailable: the disk could not guarantee it.
        """
        self._check_open("sync")
        try:
            self._disk.sync()
        except TransferError as error:
            self._health.failed(error)
            raise Unavailable(f"sync: {self.path!r} could not be synced: {error}") from None

    @property
    def room_bytes(self) -> int:
        """Bytes of records, each with its header and padding, that can be written before a bucket
        must be freed; about, for none is divided between buckets.
        """
        return self._log.room_bytes

    def stats(self) -> SsdStats:
        self._check_open("stats")
        return SsdStats(
            capacity_bytes=len(self._buckets) * self._bucket_bytes,
            num_buckets=len(self._buckets),
            num_free_buckets=self._log.num_free,
            num_buckets_begun=self._log.sequence,
            num_objects=len(self._index),
            live_bytes=self._index.live_bytes,
            written_bytes=self._appender.num_bytes,
            is_writable=self._health.is_writable,
            num_write_errors=self._health.num_errors,
            error=self._health.error,
            **vars(self._counters),
        )

    def close(self) -> None:
        """Wait for reads and writes in flight, and close the file. Idempotent.

        If Ctrl-C interrupts it, the file is closed all the same: reads in flight fail.
        """
        with self._write_lock:
            if self._disk.closed:
                return
            self._closed = True
            try:
                for bucket in self._buckets:
                    self._index.wait_unread(bucket, None)
                self._log.close()
            except TransferError as error:  # then the next start checks each record
                self._health.failed(error)
            finally:
                self._disk.close()

    def _exist(self, pairs: list[Key]) -> np.ndarray:
        return np.array([pair in self._index for pair in pairs], bool)

    def _drop_damaged(self, key: Key, entry: Entry) -> None:
        if self._index.drop(key, entry):
            self._counters.damaged(key)

    def _check_open(self, op: str) -> None:
        if self._closed:
            raise InvalidArgument(f"{op}: tier must be open, got the closed {self.path!r}")


def _as_number(argument: str, value: Any, low: float, high: float, kind: type = int) -> Any:
    """Check a number of the constructor: within [low, high]."""
    is_number = isinstance(value, (int, np.integer, kind)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        what = "an integer" if kind is int else "a number"
        raise InvalidArgument(
            f"SsdTier: {argument} must be {what} from {low} to {high}, got {value!r}"
        )
    return kind(value)


def _as_path(path: Any) -> str:
    """Check the name of a file, before it is made."""
    try:
        name = os.fspath(path)
        is_name = isinstance(name, str) and bool(name) and b"\0" not in name.encode()
    except (TypeError, UnicodeEncodeError):
        is_name = False
    if not is_name:
        raise InvalidArgument(f"SsdTier: path must be the name of a file, got {path!r:.80}")
    return name


def _as_pairs(op: str, keys: Any) -> list[Key]:
    """``[n, 2]`` words as tuples."""
    if isinstance(keys, np.ndarray):
        keys = keys.tolist()
    try:
        pairs = [(operator.index(first), operator.index(second)) for first, second in keys]
    except (TypeError, ValueError):
        raise InvalidArgument(f"{op}: keys must be [n, 2] integers, got {keys!r:.100}") from None
    for pair in pairs:
        if not all(0 <= word < 1 << 64 for word in pair):
            raise InvalidArgument(f"{op}: keys must be from 0 to 2**64 - 1, got {pair}")
    return pairs


def _as_arrays(
    op: str, argument: str, buffers: Sequence[Any], num_keys: int, *, writable: bool
) -> list[np.ndarray]:
    """Packed host memory as ``[bytes]`` uint8; the caller keeps the buffers alive."""
    if not isinstance(buffers, Sized):
        raise InvalidArgument(f"{op}: {argument} must be as many as keys, got {buffers!r:.80}")
    if len(buffers) != num_keys:
        raise InvalidArgument(
            f"{op}: {argument} must be as many as keys, got {len(buffers)} and {num_keys}"
        )
    return [
        _as_array(f"{op}: {argument}[{i}]", buffer, writable) for i, buffer in enumerate(buffers)
    ]


def _as_positions(op: str, positions: Sequence[int] | None, num_keys: int) -> list[int]:
    """Positions of objects in their prompts; None: 0."""
    if positions is None:
        return [0] * num_keys
    try:
        places = [operator.index(position) for position in positions]
    except TypeError:
        places = []
    if len(places) != num_keys or not all(0 <= place <= MAX_POSITION for place in places):
        raise InvalidArgument(
            f"{op}: positions must be an integer from 0 to {MAX_POSITION} for each key, got "
            f"{positions!r:.80}"
        )
    return places


def _as_array(what: str, memory: Any, writable: bool) -> np.ndarray:
    buffer = as_buffer(memory, argument=what)
    if not buffer.is_host:
        raise InvalidArgument(f"{what} must be host memory, got {buffer.location}")
    if writable and not buffer.writable:
        raise InvalidArgument(f"{what} must be writable, got read-only memory")
    if not buffer.num_bytes:
        return np.empty(0, np.uint8)
    raw = (ctypes.c_uint8 * buffer.num_bytes).from_address(buffer.address)
    return np.frombuffer(memoryview(raw), np.uint8)
