"""Checks of what the conductor is given.

The conductor depends only on the standard library and numpy, so it has its own class for the one
error that it raises; like ``mooncake_kernels.InvalidArgument`` it is a ``ValueError``.
"""

import math
import numbers
import reprlib
from collections.abc import Iterable, Sequence, Sized
from typing import Any

import numpy as np

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 80


class InvalidArgument(ValueError):
    """An argument is wrong; the message reads ``op: argument must be <what>, got <value>``."""


def shown(value: Any) -> str:
    """Show a value in the text of an error: at most one line of it."""
    try:
        return _REPR.repr(value)
    except ValueError:  # Python does not print integers of more than 4300 digits
        return f"a huge {type(value).__name__}"


def check_at_least(op: str, name: str, value: float, low: float) -> None:
    """Raise :class:`InvalidArgument` unless ``value`` is finite and at least ``low``."""
    if not (_is_finite(value) and value >= low):
        raise InvalidArgument(f"{op}: {name} must be at least {low:g}, got {shown(value)}")


def check_positive(op: str, name: str, value: float) -> None:
    """Raise :class:`InvalidArgument` unless ``value`` is finite and positive."""
    if not (_is_finite(value) and value > 0):
        raise InvalidArgument(f"{op}: {name} must be positive, got {shown(value)}")


def check_count(op: str, name: str, value: int, low: int) -> None:
    """Raise :class:`InvalidArgument` unless ``value`` is an integer of at least ``low``."""
    if type(value) is int and value >= low:
        return  # nearly always, and in a tenth of the time
    check_integer(op, name, value)
    check_at_least(op, name, value, low)


def check_integer(op: str, name: str, value: int) -> None:
    """Raise :class:`InvalidArgument` unless ``value`` is an integer."""
    if not _is_integer(value):
        raise InvalidArgument(f"{op}: {name} must be an integer, got {shown(value)}")


def check_finite(op: str, name: str, value: float) -> None:
    """Raise :class:`InvalidArgument` unless ``value`` is a number, and finite."""
    if not _is_finite(value):
        raise InvalidArgument(f"{op}: {name} must be a finite number, got {shown(value)}")


def check_index(op: str, name: str, value: int, count: int) -> None:
    """Raise :class:`InvalidArgument` unless ``value`` is an integer from 0 to ``count`` - 1."""
    if not (_is_integer(value) and 0 <= value < count):
        raise InvalidArgument(f"{op}: {name} must be in [0, {count}), got {shown(value)}")


def check_flag(op: str, name: str, value: bool) -> None:
    """Raise :class:`InvalidArgument` unless ``value`` is True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidArgument(f"{op}: {name} must be True or False, got {shown(value)}")


def check_sized(op: str, name: str, value: Any, what: str) -> None:
    """Raise :class:`InvalidArgument` unless ``value`` has a length."""
    if not isinstance(value, Sized):
        raise InvalidArgument(f"{op}: {name} must be {what}, got {shown(value)}")


def check_instance(op: str, name: str, value: Any, kind: type) -> None:
    """Raise :class:`InvalidArgument` unless ``value`` is of a class."""
    if not isinstance(value, kind):
        raise InvalidArgument(f"{op}: {name} must be a {kind.__name__}, got {shown(value)}")


def check_has(op: str, name: str, value: Any, method: str, what: str) -> None:
    """Raise :class:`InvalidArgument` unless ``value`` has what its protocol asks for."""
    if isinstance(value, type) or not hasattr(value, method):
        raise InvalidArgument(f"{op}: {name} must be {what}, got {shown(value)}")


def check_keys(op: str, name: str, keys: Any) -> None:
    """Raise :class:`InvalidArgument` unless ``keys`` is a sequence of integers.

    It checks every key, but in C: 2 us for 256 of them.
    """
    what = f"{op}: {name} must be a tuple of integers"
    if not isinstance(keys, (tuple, list, Sequence, np.ndarray)) or isinstance(keys, (str, bytes)):
        raise InvalidArgument(f"{what}, got {shown(keys)}")
    kinds = set(map(type, keys))
    if kinds <= {int}:
        return
    if bad := [kind for kind in kinds if kind is bool or not issubclass(kind, numbers.Integral)]:
        first = next(key for key in keys if type(key) in bad)
        raise InvalidArgument(f"{what}, got {shown(first)} among them")


def listed(op: str, keys: Iterable[int]) -> Sequence[int]:
    """Return ``keys`` as a sequence of integers, or raise :class:`InvalidArgument`."""
    if not isinstance(keys, Sequence) and isinstance(keys, Iterable):
        keys = list(keys)
    check_keys(op, "keys", keys)
    return keys


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_number and -math.inf < value < math.inf
