"""What agents pass to each other as bytes: their metadata, and lists of descriptors.

``MAGIC``, a version, what it is, the CRC-32 of the rest, and the rest as msgpack. Nothing in it is
executed, and each field is checked, so bytes from anyone cost at most an error.
"""

import struct
import zlib
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from .descriptors import DescList, nixl_mem_t, nixlRegDList, nixlXferDList
from .errors import nixlMismatchError

MAGIC = b"MKNIXL\r\n"
VERSION = 1
_HEADER = struct.Struct("<8sHHI")  # the magic, the version, what it is, a CRC-32
_ROW_BYTES = 24


_MAX_NAME_BYTES = 1024
_MAX_ADDRESS_BYTES = 1024
_MAX_MACHINE_BYTES = 128


class AgentMetadata(msgspec.Struct):
    """An agent: where it listens, and which memory it has registered."""

    name: str
    address: str = ""  # of its engine; empty: unchanged, of partial metadata
    machine: str = ""  # that it runs on, by its boot
    is_partial: bool = False  # whether it adds to what is known, rather than replaces it
    ranges: dict[str, bytes] = {}


class _Descriptors(msgspec.Struct):
    mem_type: int
    rows: bytes
    metas: list[bytes] | None = None  # of a list for registration


_KINDS: tuple[type[msgspec.Struct], ...] = (AgentMetadata, _Descriptors)
Body = TypeVar("Body", bound=msgspec.Struct)


def encode_metadata(metadata: AgentMetadata) -> bytes:
    """The bytes of ``get_agent_metadata``."""
    return _encode(metadata)


def decode_metadata(data: Any) -> AgentMetadata:
    """The reverse.

    Raises:
        nixlMismatchError: these bytes are not that.
    """
    metadata = _decode("add_remote_agent: metadata", data, AgentMetadata)
    for field, text, fewest, most in (
        ("a name", metadata.name, 1, _MAX_NAME_BYTES),
        ("an address", metadata.address, 0, _MAX_ADDRESS_BYTES),
        ("a machine", metadata.machine, 0, _MAX_MACHINE_BYTES),
    ):
        if not fewest <= len(text.encode()) <= most:
            raise nixlMismatchError(
                f"add_remote_agent: metadata must have {field} of {fewest} to {most} bytes, got "
                f"{len(text.encode())} bytes"
            )
    if any(
        kind not in nixl_mem_t.__members__ or len(rows) % _ROW_BYTES
        for kind, rows in metadata.ranges.items()
    ):
        raise nixlMismatchError("add_remote_agent: metadata must have whole rows of memory")
    return metadata


def encode_descs(descs: DescList) -> bytes:
    """The bytes of ``get_serialized_descs``."""
    metas = descs.metas if isinstance(descs, nixlRegDList) else None
    return _encode(_Descriptors(int(descs.getType()), as_bytes(descs.rows), metas))


def decode_descs(data: Any) -> DescList:
    """The reverse.

    Raises:
        nixlMismatchError: these bytes are not that.
    """
    op = "deserialize_descs: serialized_descs"
    body = _decode(op, data, _Descriptors)
    count = len(body.rows) // _ROW_BYTES
    is_kind = body.mem_type in nixl_mem_t.__members__.values()
    if not is_kind or len(body.rows) % _ROW_BYTES or len(body.metas or [b""] * count) != count:
        raise nixlMismatchError(f"{op} must have whole rows of a known kind of memory")
    descs: DescList = (nixlXferDList if body.metas is None else nixlRegDList)(
        nixl_mem_t(body.mem_type), as_array(body.rows)
    )
    if isinstance(descs, nixlRegDList) and body.metas is not None:
        descs.metas = body.metas
    return descs


def as_bytes(rows: np.ndarray) -> bytes:
    """Rows as they travel."""
    return rows.astype("<u8", copy=False).tobytes()


def as_array(data: bytes) -> np.ndarray:
    """The reverse: ``[n, 3]`` uint64, writable."""
    return np.frombuffer(data, "<u8").reshape(-1, 3).astype(np.uint64)


def this_machine() -> str:
    """What tells this machine, since its boot, from others; empty if the kernel does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _encode(body: msgspec.Struct) -> bytes:
    packed = msgspec.msgpack.encode(body)
    return _HEADER.pack(MAGIC, VERSION, _KINDS.index(type(body)), zlib.crc32(packed)) + packed


def _decode(what: str, data: Any, expected: type[Body]) -> Body:
    if not isinstance(data, bytes | bytearray | memoryview):
        raise nixlMismatchError(f"{what} must be bytes, got {type(data).__name__}")
    data = bytes(data)
    if len(data) < _HEADER.size or not data.startswith(MAGIC):
        raise nixlMismatchError(
            f"{what} must come from this library (NIXL's own agents cannot be peers of it), "
            f"got {data[:16]!r}"
        )
    _, version, kind, crc = _HEADER.unpack_from(data)
    if version != VERSION:
        raise nixlMismatchError(f"{what} must be of version {VERSION}, got version {version}")
    packed = data[_HEADER.size :]
    if kind >= len(_KINDS) or _KINDS[kind] is not expected:
        raise nixlMismatchError(f"{what} must be {expected.__name__.strip('_')}, got another kind")
    if zlib.crc32(packed) != crc:
        raise nixlMismatchError(f"{what} must be whole, got {len(data)} bytes with another CRC-32")
    try:
        return msgspec.msgpack.decode(packed, type=expected)
    except msgspec.MsgspecError as error:
        raise nixlMismatchError(f"{what} must be readable: {error}") from None
