"""The name of an object, stored in front of its bytes.

Pools know objects by a hash. So that they can be listed, and told apart from others with the same
hash, objects that are put by name begin with a header of whole cache lines::

    "MKNAMED2"   a random number, u64   bytes of the name, u32   the name, UTF-8   zeros

With the number a reader that reads a value in parts detects that the value was replaced.
"""

import contextlib
import os
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from mooncake_kernels.errors import InvalidArgument

_START = struct.Struct("<8s8sI")
_MAGIC = b"MKNAMED2"
NUMBER = 8, 16  # where it is
_NUMBER_BYTES = 8
_NO_NUMBER = bytes(_NUMBER_BYTES)
_LINE = 64
MAX_NAME_BYTES = 1 << 16
MIN_HEADER_BYTES = _LINE


def new_header(name: str) -> bytes:
    """Make the header of an object of this name, a different one each time.

    Raises:
        InvalidArgument: as ``header_of``.
    """
    return header_of(name, os.urandom(_NUMBER_BYTES))


def new_headers(names: Sequence[str]) -> list[bytes]:
    """``new_header`` of each."""
    size = _NUMBER_BYTES
    numbers = os.urandom(size * len(names))
    return [header_of(name, numbers[i * size : (i + 1) * size]) for i, name in enumerate(names)]


def is_header(found: bytes | bytearray | memoryview, header: bytes) -> bool:
    """Whether an object begins with such a header, whatever its number."""
    begin, end = NUMBER
    return found[:begin] == _MAGIC and found[end : len(header)] == header[end:]


def header_of(name: str, number: bytes = _NO_NUMBER) -> bytes:
    """Make the header of an object of this name, with this number, or 0.

    Raises:
        InvalidArgument: it is not a text of 1 to 65536 bytes.
    """
    text = encoded(name)
    if not 0 < len(text) <= MAX_NAME_BYTES:
        raise InvalidArgument(f"key must have 1 to {MAX_NAME_BYTES} bytes, got {len(text)}")
    start = _MAGIC + number + len(text).to_bytes(4, "little") + text
    return start.ljust(-(-len(start) // _LINE) * _LINE, b"\0")


def as_text(keys: Any, depth: int = 2) -> Any:
    """A key, or lists of keys, as text: Mooncake takes its UTF-8 for the same key.

    Bytes that are not UTF-8, and values that are not keys, stay unchanged.
    """
    if isinstance(keys, bytes | bytearray):
        with contextlib.suppress(UnicodeDecodeError):
            return keys.decode()
    elif depth and isinstance(keys, list | tuple) and set(map(type, keys)) != {str}:
        return [as_text(key, depth - 1) for key in keys]
    elif isinstance(keys, np.ndarray) and keys.ndim == 1 and keys.dtype.kind in "SO":
        return [as_text(key, 0) for key in keys]
    return keys


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
