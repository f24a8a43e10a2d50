"""Argument checks shared by several modules: a wrong value is refused by name."""

import math
from collections.abc import Sequence, Sized
from numbers import Real
from typing import Any, get_args

import numpy as np

from mooncake_kernels.errors import ChecksumError, InvalidArgument, shown
from mooncake_kernels.pool import ObjectPool, PinnedObject, Retention

from .keyspace import StoreKeys, check_keys

MAX_NUMBER = 2**64 - 1
RETENTIONS: tuple[Retention, ...] = get_args(Retention)  # by their number in ``PoolObjects``


def check_share(op: str, argument: str, value: Any) -> None:
    """Refuse a value that is not a number from 0 to 1."""
    if not isinstance(value, Real) or not 0 <= value <= 1:  # type: ignore[operator]
        raise InvalidArgument(f"{op}: {argument} must be from 0 to 1, got {shown(value, 80)}")


def check_bool(op: str, argument: str, value: Any) -> None:
    """Refuse a value that is neither True nor False."""
    if not isinstance(value, bool):
        raise InvalidArgument(f"{op}: {argument} must be True or False, got {shown(value, 80)}")


def check_pool(op: str, pool: Any) -> None:
    """Refuse a value that is not a pool, or a closed one."""
    if not isinstance(pool, ObjectPool):
        raise InvalidArgument(f"{op}: pool must be an ObjectPool, got {shown(pool, 80)}")
    if pool.closed:
        raise InvalidArgument(f"{op}: pool must be open, got the closed {shown(pool.path, 80)}")


def check_number(op: str, argument: str, value: Any) -> None:
    """Refuse what a pool would not accept as a number, in the pool's words."""
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_integer or not 0 <= value <= MAX_NUMBER:
        raise InvalidArgument(
            f"{op}: {argument} must be an integer in 0 to {MAX_NUMBER}, got {shown(value, 80)}"
        )


def check_retention(op: str, value: Any) -> None:
    """Refuse what a pool would not accept as a retention, in the pool's words."""
    if not isinstance(value, str) or value not in RETENTIONS:
        raise InvalidArgument(
            f"{op}: retention must be one of {RETENTIONS}, got {shown(value, 80)}"
        )


def check_callable(op: str, argument: str, value: Any) -> None:
    """Refuse a value that is not callable."""
    if not callable(value):
        raise InvalidArgument(f"{op}: {argument} must be a function, got {shown(value, 80)}")


def check_integer(op: str, argument: str, value: Any, least: int, most: int | None = None) -> None:
    """Refuse a value that is not an integer, too small or, if ``most`` is given, too large."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or value < least or (most is not None and value > most):
        bounds = f"from {least} on" if most is None else f"from {least} to {most}"
        raise InvalidArgument(
            f"{op}: {argument} must be an integer {bounds}, got {shown(value, 80)}"
        )


def check_positive(op: str, argument: str, value: Any, *, may_be_infinite: bool = False) -> None:
    """Refuse a value that is not a number above 0."""
    if not isinstance(value, Real) or not float(value) > 0:
        raise InvalidArgument(f"{op}: {argument} must be above 0, got {shown(value, 80)}")
    if not may_be_infinite and float(value) == math.inf:
        raise InvalidArgument(f"{op}: {argument} must be finite, got {shown(value, 80)}")


def check_not_negative(op: str, argument: str, value: Any) -> None:
    """Refuse a value that is not a finite number from 0 on."""
    if not isinstance(value, Real) or not 0 <= float(value) < math.inf:
        raise InvalidArgument(
            f"{op}: {argument} must be a number from 0 on, got {shown(value, 80)}"
        )


def check_pairs(op: str, argument: str, keys: StoreKeys, others: Sequence[Any]) -> None:
    """Refuse keys and their values if their numbers differ."""
    check_keys(op, keys)
    if not isinstance(others, Sized):
        raise InvalidArgument(f"{op}: {argument} must be as many as keys, got {others!r:.80}")
    if len(keys) != len(others):
        raise InvalidArgument(
            f"{op}: {argument} must be as many as keys, got {len(others)} and {len(keys)}"
        )


def is_whole(pinned: PinnedObject) -> bool:
    """Whether a pinned object is what its checksum says."""
    try:
        pinned.verify()
    except ChecksumError:
        return False
    return True
