"""The name of an object, stored in front of its bytes.

Pools know objects by a hash. So that they can be listed, and told apart from others with the same
hash, objects that are put by name begin with a header of whole cache lines::

    "MKNAMED2"   a random number, u64   bytes of the name, u32   the name, UTF-8   zeros

With the number a reader that reads a value in parts detects that the value was replaced.
"""

import os
import struct

from mooncake_kernels.errors import InvalidArgument

_START = struct.Struct("<8s8sI")
_MAGIC = b"MKNAMED2"
_NUMBER = slice(8, 16)
_LINE = 64
MAX_NAME_BYTES = 1 << 16
MIN_HEADER_BYTES = _LINE


def new_header(name: str) -> bytes:
    """Make the header of an object of this name, a different one each time.

    Raises:
        InvalidArgument: as ``header_of``.
    """
    header = bytearray(header_of(name))
    header[_NUMBER] = os.urandom(8)
    return bytes(header)


def is_header(found: bytes | bytearray | memoryview, header: bytes) -> bool:
    """Whether an object begins with such a header, whatever its number."""
    end, size = _NUMBER.stop, len(header)
    return found[: len(_MAGIC)] == _MAGIC and found[end:size] == header[end:]


def header_of(name: str) -> bytes:
    """Make the header of an object of this name, with 0 in place of the number.

    Raises:
        InvalidArgument: it is not a text of 1 to 65536 bytes.
    """
    text = encoded(name)
    if not 0 < len(text) <= MAX_NAME_BYTES:
        raise InvalidArgument(f"key must have 1 to {MAX_NAME_BYTES} bytes, got {len(text)}")
    return (_START.pack(_MAGIC, bytes(8), len(text)) + text).ljust(_whole(len(text)), b"\0")


def encoded(name: str) -> bytes:
    """The bytes of a name; anything but text is refused."""
    try:
        return name.encode()
    except (AttributeError, UnicodeError):
        raise InvalidArgument(f"key must be a string, got {name!r:.80}") from None


def header_bytes(start: bytes | bytearray | memoryview) -> int:
    """Length of the header that begins with these bytes; 0 if it is not a header."""
    if len(start) < MIN_HEADER_BYTES:
        return 0
    magic, _, num_bytes = _START.unpack_from(start)
    return _whole(num_bytes) if magic == _MAGIC and 0 < num_bytes <= MAX_NAME_BYTES else 0


def name_in(view: memoryview) -> str | None:
    """The name at the beginning of an object; None if it was not put by name."""
    if not 0 < header_bytes(view) <= len(view):
        return None
    *_, num_bytes = _START.unpack_from(view)
    return bytes(view[_START.size : _START.size + num_bytes]).decode(errors="replace")


def _whole(name_bytes: int) -> int:
    return -(-(_START.size + name_bytes) // _LINE) * _LINE
