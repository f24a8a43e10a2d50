"""The layout of a tier's file: version 3, as in docs/internals/ssd.md."""

import struct
from dataclasses import dataclass

import numpy as np

from mooncake_kernels.errors import InvalidArgument, Unavailable
from mooncake_kernels.pool import Key, checksum_of

VERSION = 3
PAGE = 4096
FIRST_BUCKET = 1 << 20
OBJECT, REMOVAL = 1, 2  # kinds of records

# Each begins with its magic and the version, and is followed by its checksum.
TIER_ID = "16s"
SUPERBLOCK = struct.Struct(f"<8sII{TIER_ID}Q")  # ..., page, tier, bucket_bytes
BUCKET = struct.Struct(f"<8sII{TIER_ID}2Q")  # ..., index, tier, sequence, epoch
RECORD = struct.Struct(f"<8sII{TIER_ID}8Q")  # ..., kind, tier, epoch, run, a Record
FOOTER = struct.Struct(f"<8sII{TIER_ID}5Q")  # ..., index, tier, sequence, epoch, run, entries
CHECKSUM = struct.Struct("<Q")

SUPERBLOCK_MAGIC = b"MKSSDT\0\1"
BUCKET_MAGIC = b"MKSSDB\0\1"
RECORD_MAGIC = b"MKSSDR\0\1"
FOOTER_MAGIC = b"MKSSDF\0\1"

FIELDS = ("offset", "hash", "scope", "num_bytes", "checksum", "position", "kind")
ENTRY = np.dtype([(name, "<u8") for name in FIELDS])  # of a footer: a record


@dataclass(frozen=True, slots=True)
class Record:
    """The header of a record; the data begins one page after it.

    Attributes:
        offset: of the header in the file.
        key: of the object.
        num_bytes: of the data.
        checksum: of the data.
        position: of the object in its prompt.
        kind: ``OBJECT``, or ``REMOVAL`` of what has this key in earlier records.
    """

    offset: int
    key: Key
    num_bytes: int = 0
    checksum: int = 0
    position: int = 0
    kind: int = OBJECT

    @property
    def end(self) -> int:
        return self.offset + record_bytes(self.num_bytes)


def pages(num_bytes: int) -> int:
    """Size of the pages that this many bytes occupy."""
    return -(-num_bytes // PAGE) * PAGE


def record_bytes(num_bytes: int) -> int:
    """Space of a record with this many bytes of data."""
    return PAGE + pages(num_bytes)


def footer_bytes(num_records: int) -> int:
    """Size of the footer of this many records: their entries, and the page that ends a bucket."""
    return pages(num_records * ENTRY.itemsize) + PAGE


def checksum(data: np.ndarray) -> int:
    """XXH3-64 of ``[n]`` uint8, padded with zeros to words of 4 bytes, at least one."""
    missing = -len(data) % 4 if len(data) else 4
    return checksum_of(data, bytes(missing)) if missing else checksum_of(data)


def pack_superblock(tier_id: bytes, bucket_bytes: int) -> np.ndarray:
    return _page(SUPERBLOCK.pack(SUPERBLOCK_MAGIC, VERSION, PAGE, tier_id, bucket_bytes))


def unpack_superblock(page: np.ndarray, path: str) -> tuple[bytes, int]:
    """Return the id of the tier, and the size of its buckets.

    Raises:
        InvalidArgument: it is the page of something else, or damaged.
        Unavailable: the layout has another version.
    """
    raw = page.tobytes()
    magic, version = struct.unpack_from("<8sI", raw)
    if magic != SUPERBLOCK_MAGIC:
        raise InvalidArgument(f"SsdTier: path must be a tier or a new file, got {path!r}")
    if version != VERSION:
        raise Unavailable(f"SsdTier: {path!r} has layout {version}, this is for layout {VERSION}")
    fields = _fields(SUPERBLOCK, raw)
    if fields is None:
        raise InvalidArgument(f"SsdTier: path must be a tier, got {path!r}, whose head is damaged")
    return fields[3], fields[4]


def pack_bucket(tier_id: bytes, index: int, sequence: int, epoch: int) -> np.ndarray:
    return _page(BUCKET.pack(BUCKET_MAGIC, VERSION, index, tier_id, sequence, epoch))


def unpack_bucket(page: np.ndarray, tier_id: bytes, index: int) -> tuple[int, ...] | None:
    """Sequence number and epoch of a bucket's content, 0 for none; None if the page is invalid."""
    fields = _fields(BUCKET, page.tobytes())
    return fields[4:] if fields and fields[:4] == (BUCKET_MAGIC, VERSION, index, tier_id) else None


def pack_record(tier_id: bytes, epoch: int, run: int, record: Record) -> np.ndarray:
    data = (record.num_bytes, record.checksum, record.position)
    words = (epoch, run, record.offset, *record.key, *data)
    return _page(RECORD.pack(RECORD_MAGIC, VERSION, record.kind, tier_id, *words))


def unpack_record(
    page: np.ndarray, tier_id: bytes, epoch: int, offset: int
) -> tuple[Record, int] | None:
    """The record of this header, and its run; None if it is of another tier, epoch or offset."""
    fields = _fields(RECORD, page.tobytes())
    if fields is None:
        return None
    magic, version, kind, tier, content, run, place, first, second, *data = fields
    if (magic, version, tier, content, place) != (RECORD_MAGIC, VERSION, tier_id, epoch, offset):
        return None
    num_bytes, expected, position = data
    return Record(offset, (first, second), num_bytes, expected, position, kind), run


def pack_footer(
    tier_id: bytes, index: int, sequence: int, epoch: int, run: int, records: list[Record]
) -> np.ndarray:
    """Make the end of a bucket: entries, followed by the page that describes them."""
    rows = [(r.offset, *r.key, r.num_bytes, r.checksum, r.position, r.kind) for r in records]
    entries = np.array(rows, ENTRY).view(np.uint8)
    padding = np.zeros(pages(len(entries)) - len(entries), np.uint8)
    words = (sequence, epoch, run, len(records), checksum(entries))
    last = _page(FOOTER.pack(FOOTER_MAGIC, VERSION, index, tier_id, *words))
    return np.concatenate([entries, padding, last])


def unpack_footer(page: np.ndarray, tier_id: bytes, index: int) -> tuple[int, ...] | None:
    """Sequence number, epoch, last run, number of entries before this page, and their checksum;
    None if it is not a footer.
    """
    fields = _fields(FOOTER, page.tobytes())
    return fields[4:] if fields and fields[:4] == (FOOTER_MAGIC, VERSION, index, tier_id) else None


def unpack_entries(data: np.ndarray, expected_checksum: int) -> list[Record] | None:
    """The records of a footer; None if its entries are damaged."""
    if checksum(data) != expected_checksum:
        return None
    return [
        Record(offset, (first, second), *fields)
        for offset, first, second, *fields in data.view(ENTRY).tolist()
    ]


def _page(fields: bytes) -> np.ndarray:
    """A page of these fields, their checksum, and zeros."""
    page = np.zeros(PAGE, np.uint8)
    sealed = fields + CHECKSUM.pack(checksum(np.frombuffer(fields, np.uint8)))
    page[: len(sealed)] = np.frombuffer(sealed, np.uint8)
    return page


def _fields(form: struct.Struct, page: bytes) -> tuple | None:
    """The fields of a page; None if their checksum does not match, or the rest is not zeros."""
    (expected,) = CHECKSUM.unpack_from(page, form.size)
    if checksum(np.frombuffer(page, np.uint8, form.size)) != expected:
        return None
    if not page.endswith(bytes(PAGE - form.size - CHECKSUM.size)):
        return None
    return form.unpack_from(page)
