"""Arguments of one kind: what is none, or out of range, is refused by name."""

import math
from numbers import Real
from typing import Any

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import ObjectPool


def check_share(op: str, argument: str, value: Any) -> None:
    """Refuse what is no number from 0 to 1."""
    if not isinstance(value, Real) or not 0 <= value <= 1:  # type: ignore[operator]
        raise InvalidArgument(f"{op}: {argument} must be from 0 to 1, got {value!r}")


def check_bool(op: str, argument: str, value: Any) -> None:
    """Refuse what is neither True nor False."""
    if not isinstance(value, bool):
        raise InvalidArgument(f"{op}: {argument} must be True or False, got {value!r:.80}")


def check_pool(op: str, pool: Any) -> None:
    """Refuse what is no pool."""
    if not isinstance(pool, ObjectPool):
        raise InvalidArgument(f"{op}: pool must be an ObjectPool, got {pool!r:.80}")


def check_integer(op: str, argument: str, value: Any, least: int) -> None:
    """Refuse what is no integer, or too small."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidArgument(f"{op}: {argument} must be an integer from {least} on, got {value!r}")


def check_positive(op: str, argument: str, value: Any, *, may_be_infinite: bool = False) -> None:
    """Refuse what is no number above 0."""
    if not isinstance(value, Real) or not float(value) > 0:
        raise InvalidArgument(f"{op}: {argument} must be above 0, got {value!r}")
    if not may_be_infinite and float(value) == math.inf:
        raise InvalidArgument(f"{op}: {argument} must be finite, got {value!r}")


def check_not_negative(op: str, argument: str, value: Any) -> None:
    """Refuse what is no finite number from 0 on."""
    if not isinstance(value, Real) or not 0 <= float(value) < math.inf:
        raise InvalidArgument(f"{op}: {argument} must be a number from 0 on, got {value!r}")
