"""The buckets as one log: records are appended, and the oldest bucket is freed in time.

Pages are written in sequence from two halves of memory: one is filled while one is written.
"""

import os
import struct
from collections import deque

import numpy as np

from mooncake_kernels.errors import FailureKind, TransferError
from mooncake_kernels.pool import Key
from mooncake_kernels.transfer import Ticket

from .disk import Disk, Reader
from .index import Bucket, Entry, Index
from .layout import (
    OBJECT,
    PAGE,
    REMOVAL,
    Record,
    checksum,
    footer_bytes,
    pack_bucket,
    pack_footer,
    pack_record,
    pack_superblock,
    record_bytes,
)
from .stats import Counters


class Appender:
    """Writes pages in sequence, from the offset of ``seek`` on. For one thread at a time.

    After an exception during a wait nothing is in flight, and what was added since the last
    ``flush`` is forgotten. A caller that lets any other exception pass calls ``forget``.

    Args:
        disk: what is written.
        half_bytes: size of each half, the first two parts of its staging memory; whole pages.

    Attributes:
        num_bytes: written in total.
    """

    def __init__(self, disk: Disk, half_bytes: int):
        self._disk = disk
        self._half_bytes = half_bytes
        self._tickets: list[Ticket | None] = [None, None]
        self._half = 0  # the half that is being filled
        self._filled = 0
        self._offset = 0  # in the file, of the half that is being filled
        self.num_bytes = 0

    def seek(self, offset: int) -> None:
        """Continue elsewhere; everything added must have been flushed."""
        self._offset = offset

    def add(self, data: np.ndarray) -> None:
        """Append ``[n]`` uint8, and zeros up to the next page.

        Raises:
            TransferError: something added before cannot be written.
        """
        while len(data):
            if not self._filled:
                self._wait(self._half)  # for the last write from this half
            room = self._half_bytes - self._filled
            part, data = data[:room], data[room:]
            self._staged(len(part))[:] = part
            self._filled += len(part)
            if self._filled == self._half_bytes:
                self._submit()
        self._staged(-self._filled % PAGE)[:] = 0
        self._filled += -self._filled % PAGE
        if self._filled == self._half_bytes:
            self._submit()

    def flush(self) -> None:
        """Wait until everything added is written.

        Raises:
            TransferError: something cannot be written.
        """
        if self._filled:
            self._submit()
        self._wait(0)
        self._wait(1)

    def forget(self) -> None:
        """End what is in flight, and forget what was added."""
        for half, ticket in enumerate(self._tickets):
            if ticket is not None:
                ticket.cancel()  # it waits for what the disk has begun
                self._tickets[half] = None
        self._filled = 0

    def _staged(self, num_bytes: int) -> np.ndarray:
        start = self._half * self._half_bytes + self._filled
        return self._disk.staging[start : start + num_bytes]

    def _submit(self) -> None:
        start = self._half * self._half_bytes
        self._tickets[self._half] = self._disk.write(self._offset, start, self._filled)
        self.num_bytes += self._filled
        self._offset += self._filled
        self._filled = 0
        self._half = 1 - self._half

    def _wait(self, half: int) -> None:
        ticket = self._tickets[half]
        if ticket is None:
            return
        try:
            ticket.wait()
        except BaseException:  # including Ctrl-C, after which the write would continue
            self.forget()
            raise
        self._tickets[half] = None


MAX_GIVEN_UP = 1 << 16


class Step:
    """A block of calls of a log, which gives up what was appended unless the block completes.

    Half a record must not be followed by another, nor what was given up be stored by a later call.
    If Ctrl-C interrupts that as well, the next step does it first. This is no generator, which
    would go on whenever it is collected.
    """

    def __init__(self, log: "Log"):
        self._log = log

    def __enter__(self) -> None:
        self._log._begin_step()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._log._end_step(kind is None)


class Log:
    """Appends records to the newest bucket, for one thread at a time.

    Buckets are reused in the order in which they were written, so that all wear alike. One is
    always kept free: the used objects of the oldest bucket are copied into the newest, and only
    when the copies are durable is the oldest freed.

    A step that raises ``TransferError`` can be retried: what was appended since the last ``flush``
    is not stored, and everything else is unchanged.
    """

    def __init__(
        self,
        disk: Disk,
        reader: Reader,
        appender: Appender,
        index: Index,
        counters: Counters,
        buckets: list[Bucket],
        *,
        tier_id: bytes,
        bucket_bytes: int,
        move_ratio: float,
        deadline_s: float,
    ):
        self._disk, self._reader, self._appender = disk, reader, appender
        self._index, self._counters, self._buckets = index, counters, buckets
        self._bucket_bytes = bucket_bytes
        self._move_bytes = int(move_ratio * bucket_bytes)
        self._deadline_s = deadline_s
        self._end = 0  # where the next record goes
        self._is_head_known = True  # whether the disk is known to have the id of the tier
        self._is_torn = False  # whether a step was begun, and neither completed nor given up
        self._is_written = False  # whether all that is pending is on the disk
        self._tier_id = tier_id
        self._begin()

    def _begin(self) -> None:
        """Continue at the end of the newest bucket."""
        self._no_key = struct.unpack("<2Q", self._tier_id)  # random, and so not that of an object
        self._free: deque[Bucket] = deque()
        self._find_newest()
        self._pending: deque[Entry] = deque()
        self._given_up: dict[Key, None] = {}  # in order; of the newest bucket
        self._begin_run()
        self._content_id = self._tier_id  # of what is in the buckets

    def _find_newest(self) -> None:
        """Tell the newest bucket, and those that are free, the longest so first."""
        free = [bucket for bucket in self._free if not bucket.sequence]
        known = {bucket.index for bucket in free}
        free += [b for b in self._buckets if not b.sequence and b.index not in known]
        self._free = deque(free)
        newest = max(self._buckets, key=lambda bucket: bucket.sequence)
        self._newest = newest if newest.sequence else None

    @property
    def sequence(self) -> int:
        """Sequence number of the newest bucket: how many were begun since the file was made."""
        return self._newest.sequence if self._newest else 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def room_bytes(self) -> int:
        """Bytes of records for which no bucket need be freed: the rest of the newest, and all those
        that are free but the one that stays so. Without a lock.
        """
        newest, room = self._newest, max(0, len(self._free) - 1) * self._usable(1)
        if newest is not None:
            used = self._end - newest.offset - PAGE
            room += max(0, self._usable(len(newest.records) + 1) - used)
        return room

    def may_reappear(self, key: Key) -> bool:
        """Whether a start could find an object of this key, which is not there. Within a step.

        A failed write may have written it, and nothing was written since; or it could not be read,
        now or at the start.
        """
        return (
            key in self._given_up
            or self._index.was_dropped(key)
            or any(bucket.has_gaps for bucket in self._buckets)
        )

    def step(self) -> "Step":
        """A block of calls: what it has appended and not flushed is given up if it raises."""
        return Step(self)

    def append(self, key: Key, data: np.ndarray, kind: int = OBJECT, *, position: int = 0) -> Entry:
        """Write a record after the last one; it becomes visible after ``flush``. Within a step."""
        if not self._is_head_known:
            self._write_head(self._tier_id)
        if not self._fits(len(data)):
            self._roll(len(data))
        return self._append(key, data, kind, position)

    def flush(self) -> None:
        """Wait for what was appended, and make it visible. Within a step."""
        self._appender.flush()
        self._is_written = True
        self._commit()

    def _commit(self) -> None:
        """Make visible what was written; what Ctrl-C leaves of that, the end of the step does."""
        if self._pending:  # a record of a later run, see docs/internals/ssd.md
            self._given_up.clear()
        while self._pending:
            entry = self._pending[0]
            bucket, record = entry.bucket, entry.record
            if bucket.records[-1:] != [record]:
                bucket.records.append(record)
            bucket.end = record.end
            entry.is_stored = True
            if record.kind == OBJECT:
                self._index.add(record.key, entry)
            else:
                self._index.remove(record.key)
            self._pending.popleft()
        self._is_written = False

    def close(self) -> None:
        """Write a footer, so that the next start need not check each record."""
        with self.step():
            if not self._is_head_known:
                self._write_head(self._tier_id)
            if self._newest is not None and not self._newest.is_sealed:
                self._seal(self._newest)

    def clear(self, tier_id: bytes) -> None:
        """Start over with another id of the tier, of which nothing is on the disk.

        If only the sync fails, it is done, but may not survive a loss of power.
        """
        with self.step():
            self._write_head(tier_id)
            self._tier_id = tier_id  # from now on nothing is there, also if Ctrl-C comes
            self._is_head_known = True
            self._drop_all()
            self._disk.sync()

    def _drop_all(self) -> None:
        """Forget what has the former id of the tier."""
        self._index.clear()
        for bucket in self._buckets:
            bucket.clear()
        self._begin()

    def _begin_step(self) -> None:
        if self._is_torn:
            self._forget()
        self._is_torn = True

    def _end_step(self, is_complete: bool) -> None:
        if not is_complete:
            self._forget()
        self._is_torn = False

    def _write_head(self, tier_id: bytes) -> None:
        """Write the id of the tier; a failed write may have written it, or not."""
        self._is_head_known = False
        self._write(0, pack_superblock(tier_id, self._bucket_bytes))
        self._is_head_known = tier_id == self._tier_id

    def _append(self, key: Key, data: np.ndarray, kind: int = OBJECT, position: int = 0) -> Entry:
        assert self._newest is not None
        if self._newest.may_have_footer:
            self._unseal(self._newest)
        record = Record(self._end, key, len(data), checksum(data), position, kind)
        entry = Entry(self._newest, record)
        self._pending.append(entry)  # first: once it is added, it may get to the disk
        self._appender.add(pack_record(self._tier_id, self._newest.epoch, self._newest.run, record))
        self._appender.add(data)
        self._end = record.end
        return entry

    def _usable(self, num_records: int) -> int:
        """Bytes of a bucket for that many records, without its head and footer."""
        return self._bucket_bytes - PAGE - footer_bytes(num_records)

    def _fits(self, *sizes: int) -> bool:
        """Whether the newest bucket has room for records with that many bytes of data each."""
        if self._newest is None:
            return False
        num_records = len(self._newest.records) + len(self._pending) + len(sizes)
        end = self._end + sum(map(record_bytes, sizes)) + footer_bytes(num_records)
        return end <= self._newest.offset + self._bucket_bytes

    def _roll(self, num_bytes: int) -> None:
        """Seal the newest bucket, and begin a free one, which has room for that many bytes of data
        in one record.
        """
        self.flush()
        if not self._free:  # after an error, or a crash: there is little room to move anything to
            self._reclaim()
        if self._newest is not None and not self._newest.is_sealed:
            self._seal(self._newest)
        bucket, sequence = self._free[0], self.sequence + 1
        if not self._index.wait_unread(bucket, self._deadline_s):
            what = "a bucket is still being read"
            raise TransferError(self._disk.path, what, kind=FailureKind.TIMED_OUT)
        epoch = int.from_bytes(os.urandom(8), "little")
        self._write(bucket.offset, pack_bucket(self._tier_id, bucket.index, sequence, epoch))
        bucket.clear()  # in case Ctrl-C has interrupted that
        bucket.epoch = epoch
        bucket.sequence = sequence  # from now on it is the newest
        self._free.popleft()
        self._newest = bucket
        self._begin_run()
        if not self._free:
            self._reclaim(num_bytes)

    def _seal(self, bucket: Bucket) -> None:
        if self._given_up:  # a start that finds no footer would find it
            self._append(self._no_key, np.empty(0, np.uint8), REMOVAL)
            self.flush()
        self._disk.sync()  # a footer vouches for the data
        if bucket.has_gaps:
            return
        content = (bucket.sequence, bucket.epoch, bucket.run)
        footer = pack_footer(self._tier_id, bucket.index, *content, bucket.records)
        bucket.may_have_footer = True  # also if the write fails, or Ctrl-C interrupts it
        self._write(bucket.offset + self._bucket_bytes - len(footer), footer)
        bucket.is_sealed = True

    def _unseal(self, bucket: Bucket) -> None:
        """Remove the footer, which would hide what is appended now, and its run."""
        bucket.is_sealed = False
        self._write(bucket.offset + self._bucket_bytes - PAGE, np.zeros(PAGE, np.uint8))
        self._disk.sync()
        bucket.may_have_footer = False

    def _reclaim(self, *reserved: int) -> None:
        """Free the oldest bucket: move the used objects, as far as allowed, and drop the rest.

        ``reserved``: as ``_fits`` takes them, of records for which room must be left.
        """
        in_use = [b for b in self._buckets if b.sequence and b is not self._newest]
        oldest = min(in_use, key=lambda bucket: bucket.sequence)
        self._move_used(oldest, *reserved)
        self._disk.sync()  # the copies, before the originals are overwritten
        self._unseal(oldest)
        self._write(oldest.offset, pack_bucket(self._tier_id, oldest.index, 0, 0))
        self._counters.num_dropped += self._index.remove_bucket(oldest)
        oldest.clear()
        self._free.append(oldest)

    def _move_used(self, bucket: Bucket, *reserved: int) -> None:
        budget = self._move_bytes
        for record in bucket.records:
            entry = self._index.find(record.key)
            if entry is None or entry.record is not record or not entry.is_used:
                continue
            size = record_bytes(record.num_bytes)
            if size > budget or not self._fits(record.num_bytes, *reserved):
                continue
            data = self._reader.read(record.offset + PAGE, record.num_bytes)
            if data is None or checksum(data) != record.checksum:
                self._counters.damaged(record.key)
                self._index.drop(record.key, entry)
                continue
            self._append(record.key, data, position=record.position)
            budget -= size
            self._counters.num_moved += 1
            self._counters.moved_bytes += record.num_bytes
        self.flush()

    def _write(self, offset: int, data: np.ndarray) -> None:
        """Write pages elsewhere; nothing may be pending."""
        self._appender.seek(offset)
        self._appender.add(data)
        self._appender.flush()
        self._appender.seek(self._end)

    def _forget(self) -> None:
        """Give up what was appended since the last ``flush``."""
        if self._content_id != self._tier_id:
            self._drop_all()
        if self._is_written:
            self._commit()
        for entry in self._pending:
            self._given_up.pop(entry.record.key, None)  # so that it comes last
            self._given_up[entry.record.key] = None
        # While nothing can be written, the latest overwrite the others, or none gets to the disk.
        for key in list(self._given_up)[:-MAX_GIVEN_UP]:
            del self._given_up[key]
        self._pending.clear()
        self._appender.forget()
        self._find_newest()  # Ctrl-C may have come between two steps of `_roll` or `_reclaim`
        self._begin_run()

    def _begin_run(self) -> None:
        """Continue at the end of the newest bucket, over the remains of a failed write."""
        if self._newest is not None:
            self._newest.run += 1
            self._end = self._newest.end
            self._appender.seek(self._end)
