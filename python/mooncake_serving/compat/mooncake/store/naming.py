"""The name of an object, which stands in front of its bytes.

Pools know objects by a hash. To be listed, and to be told from another of the same hash, each one
that is put by name begins with a header of whole cache lines::

    "MKNAMED1"   the number of bytes of the name, u32   the name, UTF-8   zeros
"""

import struct

from mooncake_kernels.errors import InvalidArgument

_START = struct.Struct("<8sI")
_MAGIC = b"MKNAMED1"
_LINE = 64
MAX_NAME_BYTES = 1 << 16


def header_of(name: str) -> bytes:
    """What stands in front of an object of this name.

    Raises:
        InvalidArgument: it is not a text of 1 to 65536 bytes.
    """
    try:
        text = name.encode()
    except (AttributeError, UnicodeError):
        raise InvalidArgument(f"key must be a string, got {name!r:.80}") from None
    if not 0 < len(text) <= MAX_NAME_BYTES:
        raise InvalidArgument(f"key must have 1 to {MAX_NAME_BYTES} bytes, got {len(text)}")
    header = _START.pack(_MAGIC, len(text)) + text
    return header.ljust(-(-len(header) // _LINE) * _LINE, b"\0")


def name_in(view: memoryview) -> str | None:
    """The name at the beginning of an object; None if it was not put by name."""
    if len(view) < _START.size:
        return None
    magic, num_bytes = _START.unpack_from(view)
    text = bytes(view[_START.size : _START.size + num_bytes])
    if magic != _MAGIC or len(text) != num_bytes:
        return None
    return text.decode(errors="replace")
