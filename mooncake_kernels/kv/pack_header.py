"""What a receiver must know of packed blocks: ``mk.PackHeader`` and its wire form."""

import json
import struct
import zlib
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..errors import InvalidArgument
from .layout import PACKED_AXES

MAGIC, VERSION = b"MKPK", 2
PREFIX = struct.Struct("<4sHHII")  # magic, version, 0, bytes of JSON, their CRC-32
MAX_BLOCKS = 1 << 24  # per header: bounds the number of chunks a sender can make a receiver list
ALIGNMENT = 128  # of a view in a record, and of a record: a GPU's cache line
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


def align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class PackedView:
    """One view's part of a record: packed, at ``offset``.

    Attributes:
        dtype: torch's name of it.
        axes: in the order of the sender's cache; "layer kv token head dim", for example. Without
            "head" or "token" if the cache has none.
        layers: their numbers in the model.
        first_head: its number in the model.
        kv, heads, tokens, dim: sizes, 1 for an axis that does not exist.
        offset: in the record.
    """

    dtype: str
    axes: str
    layers: tuple[int, ...]
    kv: int
    first_head: int
    heads: int
    tokens: int
    dim: int
    offset: int

    @property
    def has_heads(self) -> bool:
        return "head" in self.axes.split()

    @property
    def has_tokens(self) -> bool:
        return "token" in self.axes.split()

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        sizes = (len(self.layers), self.kv, self.heads, self.tokens, self.dim)
        by_name = dict(zip(PACKED_AXES, sizes, strict=True))
        return tuple(by_name[axis] for axis in self.axes.split())

    @property
    def num_bytes(self) -> int:
        elements = len(self.layers) * self.kv * self.heads * self.tokens * self.dim
        return elements * DTYPES[self.dtype].itemsize

    def check(self) -> bool:
        """Tell whether it is valid: a header may come from an untrusted source."""
        counts = (self.kv, self.heads, self.tokens, self.dim, self.first_head + 1, self.offset + 1)
        numbers = (*counts, *(layer + 1 for layer in self.layers))
        return (
            isinstance(self.dtype, str)
            and self.dtype in DTYPES
            and self._has_good_axes()
            and bool(self.layers)
            and len(set(self.layers)) == len(self.layers)
            and all(type(number) is int and 1 <= number < 2**62 for number in numbers)
            and self.kv <= 2
            and (self.has_heads or self.heads == 1)
            and (self.has_tokens or self.tokens == 1)
            and self.offset % ALIGNMENT == 0
        )

    def _has_good_axes(self) -> bool:
        names = self.axes.split() if isinstance(self.axes, str) else []
        optional = [axis for axis in ("head", "token") if axis not in names]
        return sorted([*names, *optional]) == sorted(PACKED_AXES) and names[-1] == "dim"


@dataclass(frozen=True)
class Chunk:
    """A range of a staging buffer that can be sent once it is ready."""

    offset: int
    num_bytes: int
    first_block: int
    num_blocks: int


@dataclass(frozen=True)
class PackHeader:
    """A description of packed blocks: made by ``pack``, sent along with them, read by ``unpack``.

    Block i is record i of the staging buffer: its views in order and, if there are checksums, a
    final 8-byte checksum in ``ALIGNMENT`` bytes. All offsets and sizes are multiples of
    ``ALIGNMENT``. ``docs/internals/formats.md`` gives the bytes.

    Attributes:
        num_blocks: number of records.
        record_bytes: size of a record.
        chunk_blocks: records per chunk; the last chunk may have fewer.
        has_checksums: whether records end in checksums.
        views: the contents of a record.
    """

    num_blocks: int
    record_bytes: int
    chunk_blocks: int
    has_checksums: bool
    views: tuple[PackedView, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the staging buffer that are used."""
        return self.num_blocks * self.record_bytes

    @property
    def checksum_offset(self) -> int:
        """Offset of the checksum in a record."""
        return self.record_bytes - ALIGNMENT

    @property
    def chunks(self) -> list[Chunk]:
        """The ranges to send, in order."""
        firsts = range(0, self.num_blocks, self.chunk_blocks)
        counts = [min(self.chunk_blocks, self.num_blocks - first) for first in firsts]
        size = self.record_bytes
        return [
            Chunk(first * size, count * size, first, count)
            for first, count in zip(firsts, counts, strict=True)
        ]

    def to_bytes(self) -> bytes:
        """Return the form that ``from_bytes`` reads: a prefix with a CRC-32, and JSON."""
        return framed(MAGIC, VERSION, asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> "PackHeader":
        """Read a header.

        Raises:
            InvalidArgument: it is not a header, has another version or reserved bytes that are not
                0, or was damaged in transit.
        """
        return cls.from_json(unframed("PackHeader", data, MAGIC, VERSION))

    @classmethod
    def from_json(cls, values: Any) -> "PackHeader":
        """Read the fields of a header, as JSON has them; errors are those of ``from_bytes``."""
        try:
            views = tuple(
                PackedView(**{**view, "layers": tuple(view["layers"])}) for view in values["views"]
            )
            header = cls(**{**values, "views": views})
            good = header.check()
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise InvalidArgument(f"PackHeader: data must be a header's, got {error!r}") from None
        if not good:
            raise InvalidArgument(f"PackHeader: data must describe packed blocks, got {values}")
        return header

    def check(self) -> bool:
        """Tell whether records can hold their views, and chunks their records."""
        numbers = (self.num_blocks + 1, self.record_bytes, self.chunk_blocks)
        if not all(type(number) is int and 1 <= number < 2**62 for number in numbers):
            return False
        if self.num_blocks > MAX_BLOCKS:
            return False
        if type(self.has_checksums) is not bool:
            return False
        if not self.views or not all(view.check() for view in self.views):
            return False
        ends = [view.offset + view.num_bytes for view in self.views]
        starts = [*(view.offset for view in self.views[1:]), self.record_bytes]
        if self.has_checksums:
            starts[-1] = self.checksum_offset
        in_order = all(end <= start for end, start in zip(ends, starts, strict=True))
        return in_order and self.record_bytes % ALIGNMENT == 0


def framed(magic: bytes, version: int, fields: dict[str, Any]) -> bytes:
    """Return a prefix with a CRC-32, and the fields as JSON."""
    body = json.dumps(fields, separators=(",", ":")).encode()
    return PREFIX.pack(magic, version, 0, len(body), zlib.crc32(body)) + body


def unframed(op: str, data: bytes, magic: bytes, version: int) -> Any:
    """Return what ``framed`` was given, if it is that.

    Raises:
        InvalidArgument: it has another magic or version, or reserved bytes that are not 0; or was
            damaged in transit.
    """
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise InvalidArgument(f"{op}: data must be bytes, got {type(data).__name__}")
    data = bytes(data)
    if len(data) < PREFIX.size or not data.startswith(magic):
        raise InvalidArgument(f"{op}: data must begin with {magic!r}, got {data[:4]!r}")
    _, got_version, reserved, length, crc = PREFIX.unpack_from(data)
    if got_version != version:
        raise InvalidArgument(f"{op}: data must be of version {version}, got {got_version}")
    if reserved:
        raise InvalidArgument(f"{op}: data must have 0 in its reserved bytes, got {reserved:#x}")
    body = data[PREFIX.size :]
    if len(body) != length or zlib.crc32(body) != crc:
        raise InvalidArgument(
            f"{op}: data must be {length} bytes with CRC {crc:#x}, got {len(body)} with "
            f"{zlib.crc32(body):#x}"
        )
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{op}: data must be a header's, got {error!r}") from None
