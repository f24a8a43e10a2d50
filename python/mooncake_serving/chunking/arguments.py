"""Checks of arguments: whether a value is a number of the required kind."""

import numbers
from typing import Any

from mooncake_kernels import errors


def is_integer(value: Any, least: int) -> bool:
    """Whether it is an integer that is large enough; a bool is refused, as a likely mistake."""
    return (
        isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= least
    )


def is_number(value: Any) -> bool:
    """Whether it is a real number, possibly infinite, but not NaN."""
    return isinstance(value, numbers.Real) and value == value


def shown(value: Any) -> str:
    """Show a value in the text of an error, with the name of a request."""
    return errors.shown(value, 80)
