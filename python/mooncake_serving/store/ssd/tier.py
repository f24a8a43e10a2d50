"""The SSD tier: objects in a file on a local disk, found again after a restart."""

import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from mooncake_kernels.closing import Closing
from mooncake_kernels.errors import InvalidArgument, TransferError, Unavailable
from mooncake_kernels.pool import Key, PutResult

from .appending import Appender
from .arguments import as_arrays, as_number, as_pairs, as_path, as_positions
from .disk import Disk
from .health import Health
from .index import Bucket, Entry, Index
from .layout import (
    FIRST_BUCKET,
    PAGE,
    REMOVAL,
    footer_bytes,
    record_bytes,
)
from .log import Log
from .reading import Reader
from .recovery import begin, recover
from .stats import Counters, SsdStats
from .tier_reads import TierReads

NUM_HALVES = 2  # of the appender's memory
MAX_BYTES = 1 << 62


class SsdTier(TierReads, Closing):
    """Immutable objects under 128-bit keys, in a file on a local disk. A context manager.

    ::

        with SsdTier("/mnt/ssd/kv", 1 << 40) as tier:
            tier.put_each(keys, blocks)
            tier.sync()                              # from now on they outlast a loss of power
            sizes = tier.get_into_each(keys, buffers)

    The file is a log of large buckets that are written one after the other and reused in turn, as a
    whole: objects that were read meanwhile are moved, the others dropped. Thread-safe; reads take a
    lock for a lookup only. Only one tier at a time can have the file open. Layout and guarantees:
    docs/store_ssd.md.

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
        as_number("bucket_bytes", bucket_bytes, 64 << 10, MAX_BYTES)
        as_number("capacity_bytes", capacity_bytes, 2 * bucket_bytes, MAX_BYTES)
        as_number("slot_bytes", slot_bytes, PAGE, 1 << 30)
        as_number("num_slots", num_slots, 1, 1024)
        retry_s = as_number("retry_s", retry_s, 0, MAX_BYTES, float)
        deadline_s = as_number("deadline_s", deadline_s, 1e-3, 1e6, float)
        move_ratio = as_number("move_ratio", move_ratio, 0, 0.5, float)
        for name, value in (("bucket_bytes", bucket_bytes), ("slot_bytes", slot_bytes)):
            if value % PAGE:
                raise InvalidArgument(f"SsdTier: {name} must be whole pages of 4096, got {value}")
        self._bucket_bytes = bucket_bytes
        self.max_object_bytes = bucket_bytes - PAGE - footer_bytes(1) - record_bytes(0)
        num_buckets = capacity_bytes // bucket_bytes
        num_bytes = FIRST_BUCKET + num_buckets * bucket_bytes
        staging_bytes = (NUM_HALVES + num_slots) * slot_bytes
        self._disk = Disk(as_path(path), bucket_bytes, num_bytes, staging_bytes, deadline_s)
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
        pairs = as_pairs("put_each", keys)
        arrays = as_arrays("put_each", "values", values, len(pairs), writable=False)
        places = as_positions("put_each", positions, len(pairs))
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
        pairs = as_pairs(op, keys)
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
