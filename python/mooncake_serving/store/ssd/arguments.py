"""Checks of the arguments of a tier."""

import ctypes
import operator
import os
from collections.abc import Sequence, Sized
from typing import Any

import numpy as np

from mooncake_kernels.buffers import as_buffer
from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import Key

MAX_POSITION = (1 << 16) - 1  # as a pool keeps


def as_number(argument: str, value: Any, low: float, high: float, kind: type = int) -> Any:
    """Check a number of the constructor: within [low, high]."""
    is_number = isinstance(value, (int, np.integer, kind)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        what = "an integer" if kind is int else "a number"
        raise InvalidArgument(
            f"SsdTier: {argument} must be {what} from {low} to {high}, got {value!r}"
        )
    return kind(value)


def as_path(path: Any) -> str:
    """Check the name of a file, before it is made."""
    try:
        name = os.fspath(path)
        is_name = isinstance(name, str) and bool(name) and b"\0" not in name.encode()
    except (TypeError, UnicodeEncodeError):
        is_name = False
    if not is_name:
        raise InvalidArgument(f"SsdTier: path must be the name of a file, got {path!r:.80}")
    return name


def as_pairs(op: str, keys: Any) -> list[Key]:
    """``[n, 2]`` words as tuples."""
    if isinstance(keys, np.ndarray):
        keys = keys.tolist()
    try:
        pairs = [(operator.index(first), operator.index(second)) for first, second in keys]
    except (TypeError, ValueError):
        raise InvalidArgument(f"{op}: keys must be [n, 2] integers, got {keys!r:.100}") from None
    for pair in pairs:
        if not all(0 <= word < 1 << 64 for word in pair):
            raise InvalidArgument(f"{op}: keys must be from 0 to 2**64 - 1, got {pair}")
    return pairs


def as_arrays(
    op: str, argument: str, buffers: Sequence[Any], num_keys: int, *, writable: bool
) -> list[np.ndarray]:
    """Packed host memory as ``[bytes]`` uint8; the caller keeps the buffers alive."""
    if not isinstance(buffers, Sized):
        raise InvalidArgument(f"{op}: {argument} must be as many as keys, got {buffers!r:.80}")
    if len(buffers) != num_keys:
        raise InvalidArgument(
            f"{op}: {argument} must be as many as keys, got {len(buffers)} and {num_keys}"
        )
    return [
        _as_array(f"{op}: {argument}[{i}]", buffer, writable) for i, buffer in enumerate(buffers)
    ]


def as_positions(op: str, positions: Sequence[int] | None, num_keys: int) -> list[int]:
    """Positions of objects in their prompts; None: 0."""
    if positions is None:
        return [0] * num_keys
    try:
        places = [operator.index(position) for position in positions]
    except TypeError:
        places = []
    if len(places) != num_keys or not all(0 <= place <= MAX_POSITION for place in places):
        raise InvalidArgument(
            f"{op}: positions must be an integer from 0 to {MAX_POSITION} for each key, got "
            f"{positions!r:.80}"
        )
    return places


def _as_array(what: str, memory: Any, writable: bool) -> np.ndarray:
    buffer = as_buffer(memory, argument=what)
    if not buffer.is_host:
        raise InvalidArgument(f"{what} must be host memory, got {buffer.location}")
    if writable and not buffer.writable:
        raise InvalidArgument(f"{what} must be writable, got read-only memory")
    if not buffer.num_bytes:
        return np.empty(0, np.uint8)
    raw = (ctypes.c_uint8 * buffer.num_bytes).from_address(buffer.address)
    return np.frombuffer(memoryview(raw), np.uint8)
