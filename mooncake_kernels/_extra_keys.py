"""What a block's KV depends on apart from tokens, as arguments of ``block_hashes``."""

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import _host
from ._arguments import as_utf8
from .errors import InvalidArgument, shown

OP = "block_hashes"
LOW, END = -(2**63), 2**64  # of an int: those of 64 bits, signed or not
MAX_DEPTH = 16
EMPTY = b"t" + bytes(8)  # a sequence of nothing, encoded


def hash_extra_keys(
    extra_keys: Any, block_extra_keys: Any, num_blocks: Sequence[int], seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Hash the extra keys of all blocks of all sequences.

    Args:
        extra_keys: as in ``block_hashes``; None for no argument.
        block_extra_keys: likewise.
        num_blocks: full blocks of each sequence.
        seed: as in ``block_hashes``.

    Returns:
        ``[sum(num_blocks)]`` uint64, 0 where there is none, and uint8, 1 where there is one.

    Raises:
        InvalidArgument: an argument is not as there.
    """
    of_sequence = _entries("extra_keys", extra_keys, len(num_blocks), "sequences")
    of_blocks = _entries("block_extra_keys", block_extra_keys, len(num_blocks), "sequences")
    numbers: dict[bytes, int] = {}  # of distinct encodings; an image's blocks share one
    owners = np.full(sum(num_blocks), -1, np.int64)
    at = 0
    for i, count in enumerate(num_blocks):
        whole = EMPTY if of_sequence is None else _encoded(f"extra_keys[{i}]", of_sequence[i])
        if whole != EMPTY and count:
            owners[at : at + count] = numbers.setdefault(whole + EMPTY, len(numbers))
        if of_blocks is not None and of_blocks[i] is not None:
            name = f"block_extra_keys[{i}]"
            for j, block in enumerate(_entries(name, of_blocks[i], count, "full blocks") or ()):
                one = EMPTY if block is None else _encoded(f"{name}[{j}]", block)
                if one != EMPTY:
                    owners[at + j] = numbers.setdefault(whole + one, len(numbers))
        at += count
    present = owners >= 0
    hashes = np.zeros(len(owners), np.uint64)
    hashes[present] = _host.hash_extras(list(numbers), seed)[owners[present]]
    return hashes, present.astype(np.uint8)


def _entries(name: str, values: Any, count: int, of: str) -> Sequence[Any] | None:
    if values is None:
        return None
    if not isinstance(values, list | tuple):
        raise InvalidArgument(
            f"{OP}: {name} must be a list or tuple with an entry for each of {count} {of}, got "
            f"{shown(values)}"
        )
    if len(values) != count:
        raise InvalidArgument(
            f"{OP}: {name} must have one entry for each of {count} {of}, got {len(values)}"
        )
    return values


def _encoded(name: str, entry: Any) -> bytes:
    """An entry as a sequence: None is an empty one, a single value a sequence of itself."""
    if entry is None:
        return EMPTY
    out: list[bytes] = []
    _encode(name, entry if isinstance(entry, list | tuple) else (entry,), out, 1)
    return b"".join(out)


def _encode(name: str, value: Any, out: list[bytes], depth: int) -> None:
    """Append a form that no other value has, whatever follows: kind, size, content."""
    if value is None:
        out.append(b"n")
    elif isinstance(value, list | tuple) and depth <= MAX_DEPTH:
        out.append(b"t" + len(value).to_bytes(8, "little"))
        for i, item in enumerate(value):
            _encode(f"{name}[{i}]", item, out, depth + 1)
    else:
        kind, content = _content(name, value)
        out.append(kind + len(content).to_bytes(8, "little") + content)


def _content(name: str, value: Any) -> tuple[bytes, bytes]:
    if isinstance(value, str):
        return b"s", as_utf8(OP, name, value)
    if isinstance(value, bytes | bytearray | memoryview):
        return b"b", bytes(value)
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        number = operator.index(value)
        if LOW <= number < END:
            return b"i", b"%d" % number
    raise InvalidArgument(
        f"{OP}: {name} must be a str, bytes, an integer in [-2**63, 2**64), None or a list or "
        f"tuple of these, at most {MAX_DEPTH} deep, got {shown(value)}"
    )
