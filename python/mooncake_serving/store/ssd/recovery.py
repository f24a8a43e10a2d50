"""Recovers the content of a file: from footers, and where there are none from the records."""

import os
from collections.abc import Iterator

import numpy as np

from mooncake_kernels.errors import FailureKind, TransferError

from .disk import Disk, Reader
from .index import Bucket, Entry, Index
from .layout import (
    ENTRY,
    OBJECT,
    PAGE,
    RECORD_MAGIC,
    Record,
    checksum,
    footer_bytes,
    pack_superblock,
    unpack_bucket,
    unpack_entries,
    unpack_footer,
    unpack_record,
)
from .log import Appender

WINDOW_BYTES = 8 << 20


def begin(disk: Disk, appender: Appender, bucket_bytes: int) -> bytes:
    """Initialize a new file as a tier; return its id.

    Raises:
        TransferError: it cannot be written.
    """
    tier_id = os.urandom(16)
    appender.seek(0)
    appender.add(pack_superblock(tier_id, bucket_bytes))
    appender.flush()
    disk.sync_name()
    return tier_id


def recover(
    reader: Reader,
    path: str,
    tier_id: bytes,
    bucket_bytes: int,
    buckets: list[Bucket],
    index: Index,
) -> None:
    """Find the content of all buckets, and index their objects: for each key the latest.

    A torn record, or one whose data does not match its checksum, is skipped.

    Raises:
        TransferError: neither a head nor its footer can be read: there may be a bucket of which
            the place among the others is unknown.
    """
    heads = [np.empty(PAGE, np.uint8) for _ in buckets]
    lasts = [np.empty(PAGE, np.uint8) for _ in buckets]
    places = [(bucket.offset, head) for bucket, head in zip(buckets, heads, strict=True)]
    places += [
        (bucket.offset + bucket_bytes - PAGE, last)
        for bucket, last in zip(buckets, lasts, strict=True)
    ]
    unreadable = reader.read_each(places)
    for i in unreadable:
        places[i][1][:] = 0  # as if nothing were there
    for i, (bucket, head, last) in enumerate(zip(buckets, heads, lasts, strict=True)):
        bucket.clear()
        footer = unpack_footer(last, tier_id, bucket.index)
        content = unpack_bucket(head, tier_id, bucket.index)
        has_head = content is not None
        if content is None and footer is not None:
            content = footer[:2]  # the head is damaged, or cannot be read
        if content is None and i in unreadable:
            cause = f"the head of bucket {bucket.index} cannot be read, at offset {bucket.offset}"
            raise TransferError(path, f"{cause}, and it has no footer", kind=FailureKind.DEVICE)
        if content is None or not content[0]:
            continue
        bucket.sequence, bucket.epoch = content
        records = None
        if footer is not None and footer[:2] == content:
            records = _by_footer(reader, bucket, bucket_bytes, *footer[2:])
        bucket.is_sealed = records is not None
        bucket.may_have_footer = True  # one that cannot be read now may be readable later
        if records is None:
            records = list(_by_headers(reader, tier_id, bucket, bucket_bytes))
        bucket.records = records
        if bucket.has_gaps or not has_head:  # without its footer it would be lost
            bucket.end = bucket.offset + bucket_bytes
        elif records:
            bucket.end = records[-1].end
    for bucket in sorted(buckets, key=lambda bucket: bucket.sequence):
        for record in bucket.records:
            if record.kind == OBJECT:
                index.add(record.key, Entry(bucket, record, is_stored=True))
            else:
                index.remove(record.key)


def _by_footer(
    reader: Reader, bucket: Bucket, bucket_bytes: int, run: int, num_records: int, expected: int
) -> list[Record] | None:
    offset = bucket.offset + bucket_bytes - footer_bytes(num_records)
    entries = reader.read(offset, num_records * ENTRY.itemsize)
    records = None if entries is None else unpack_entries(entries, expected)
    if records is not None:
        bucket.run = run
    return records


def _by_headers(
    reader: Reader, tier_id: bytes, bucket: Bucket, bucket_bytes: int
) -> Iterator[Record]:
    """Check every page: one that is unreadable or torn does not say where the next record is."""
    stop, end = bucket.offset + bucket_bytes, bucket.end
    for start in range(end, stop, WINDOW_BYTES):
        window, has_gaps = _read_window(reader, start, min(WINDOW_BYTES, stop - start))
        bucket.has_gaps |= has_gaps
        rows = window.reshape(-1, PAGE)
        is_header = (rows[:, : len(RECORD_MAGIC)] == np.frombuffer(RECORD_MAGIC, np.uint8)).all(1)
        for row in np.flatnonzero(is_header).tolist():
            offset = start + row * PAGE
            if offset < end:
                continue  # looks like a header, but is data of an object
            found = unpack_record(rows[row], tier_id, bucket.epoch, offset)
            record, run = found or (None, 0)
            if record is None or record.end > stop or run < bucket.run:
                continue  # another page, or a remnant of an earlier run
            bucket.run = run
            place = (row + 1) * PAGE
            data: np.ndarray | None = window[place : place + record.num_bytes]
            if has_gaps or record.end > start + len(window):
                data = reader.read(offset + PAGE, record.num_bytes)
            if data is not None and record.checksum == checksum(data):
                end = record.end
                yield record


def _read_window(reader: Reader, offset: int, num_bytes: int) -> tuple[np.ndarray, bool]:
    """``[num_bytes]`` uint8, and whether some pages cannot be read: these are zeros."""
    window = reader.read(offset, num_bytes)
    if window is not None:
        return window, False
    rows = np.zeros((num_bytes // PAGE, PAGE), np.uint8)
    reader.read_each([(offset + i * PAGE, row) for i, row in enumerate(rows)])
    return rows.reshape(-1), True
