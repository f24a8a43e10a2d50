"""Checks of arguments: whether a value is a number of the required kind."""

import numbers
import reprlib
from typing import Any

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80  # of a request, which has a name


def is_integer(value: Any, least: int) -> bool:
    """Whether it is an integer that is large enough; a bool is refused, as a likely mistake."""
    return (
        isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= least
    )


def is_number(value: Any) -> bool:
    """Whether it is a real number, possibly infinite, but not NaN."""
    return isinstance(value, numbers.Real) and value == value


def shown(value: Any) -> str:
    """Show a value in the text of an error: at most one line of it."""
    try:
        return _REPR.repr(value)
    except ValueError:  # Python does not print integers of more than 4300 digits
        return f"a huge {type(value).__name__}"
