"""Checks of callers' arguments, the same for every kind of directory."""

import math
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from mooncake_kernels import pool
from mooncake_kernels.errors import InvalidArgument

from .base import MAX_KEYS, Member

MAX_NAME_BYTES = 255
MAX_TTL_S = 1e9
MAX_COUNT = 1 << 16  # that keys_of returns at once
KEY_BYTES = 16


def as_keys(op: str, keys: Any) -> np.ndarray:
    """Check keys: ``[n, 2]`` little-endian uint64, packed."""
    if not isinstance(keys, np.ndarray | Sequence) or isinstance(keys, str | bytes):
        raise InvalidArgument(f"{op}: keys must be [n, 2] integers, got {keys!r}")
    array = pool.as_keys(op, keys).astype("<u8", copy=False)
    if len(array) > MAX_KEYS:
        raise InvalidArgument(f"{op}: keys must be at most {MAX_KEYS}, got {len(array)}")
    return array


def as_name(op: str, argument: str, value: Any) -> str:
    """Check a string that is not empty, and no longer than names are."""
    if not is_word(value) or value == "":
        raise InvalidArgument(
            f"{op}: {argument} must be a str of 1 to {MAX_NAME_BYTES} bytes, got {value!r}"
        )
    return value


def as_ttl_s(op: str, value: Any) -> float:
    seconds = float(value) if isinstance(value, numbers.Real) else math.nan
    if not 0 < seconds <= MAX_TTL_S:
        raise InvalidArgument(
            f"{op}: ttl_s must be a number of seconds above 0, up to {MAX_TTL_S:g}, got {value!r}"
        )
    return seconds


def as_member(op: str, value: Any) -> Member:
    if not isinstance(value, Member):
        raise InvalidArgument(f"{op}: member must be a Member, got {value!r}")
    as_name(op, "member.name", value.name)
    for field in ("host", "pool"):
        if not is_word(getattr(value, field)):
            raise InvalidArgument(
                f"{op}: member.{field} must be a str of at most {MAX_NAME_BYTES} bytes, "
                f"got {getattr(value, field)!r}"
            )
    for field in ("capacity_bytes", "free_bytes", "life"):
        if not is_size(getattr(value, field)):
            raise InvalidArgument(
                f"{op}: member.{field} must be an integer from 0 to 2**63 - 1, "
                f"got {getattr(value, field)!r}"
            )
    for field in ("is_draining", "publishes"):
        if not isinstance(getattr(value, field), bool):
            raise InvalidArgument(
                f"{op}: member.{field} must be a bool, got {getattr(value, field)!r}"
            )
    return value


def as_range(op: str, cursor: Any, count: Any) -> tuple[int, int]:
    """Check where to continue, and about how many to return."""
    if not is_size(cursor, 64):
        raise InvalidArgument(
            f"{op}: cursor must be 0 or what was returned last, an integer, got {cursor!r}"
        )
    if not is_size(count) or not 1 <= count <= MAX_COUNT:
        raise InvalidArgument(
            f"{op}: count must be an integer from 1 to {MAX_COUNT}, got {count!r}"
        )
    return int(cursor), int(count)


def is_word(value: Any) -> bool:
    """Whether it is a string that UTF-8 can encode, and not too long."""
    try:
        return isinstance(value, str) and len(value.encode()) <= MAX_NAME_BYTES
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def is_size(value: Any, num_bits: int = 63) -> bool:
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return is_integer and 0 <= value < 1 << num_bits
