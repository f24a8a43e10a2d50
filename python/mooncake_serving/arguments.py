"""Checks of numbers, for several packages: a bool is refused, as a likely mistake."""

import numbers
import operator
from typing import Any, NoReturn

from mooncake_kernels.errors import InvalidArgument, shown


def as_integer(op: str, name: str, value: Any) -> int:
    """Return an integer of Python, numpy or torch."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        refuse(op, name, "an integer", value)


def as_count(op: str, name: str, value: Any, least: int) -> int:
    """Return an integer of at least ``least``."""
    number = as_integer(op, name, value)
    if number < least:
        refuse(op, name, f"at least {least}", value)
    return number


def as_seconds(op: str, name: str, value: Any) -> float:
    """Return a duration that is positive and finite."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0 < value < float("inf"):
        refuse(op, name, "positive and finite", value)
    return float(value)


def refuse(op: str, name: str, wanted: str, value: Any) -> NoReturn:
    """Raise the error that says what an argument must be."""
    raise InvalidArgument(f"{op}: {name} must be {wanted}, got {shown(value)}")
