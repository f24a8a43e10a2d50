"""What can be wrong with what the conductor is given.

The conductor knows nothing but the standard library and numpy, so that it has its own name for the
one error that it raises; like ``mooncake_kernels.InvalidArgument`` it is a ``ValueError``.
"""

import math


class InvalidArgument(ValueError):
    """An argument is wrong; the message reads ``op: argument must be <what>, got <value>``."""


def check_at_least(op: str, name: str, value: float, low: float) -> None:
    """Raise :class:`InvalidArgument` unless ``value`` is finite and at least ``low``."""
    if not (math.isfinite(value) and value >= low):
        raise InvalidArgument(f"{op}: {name} must be at least {low:g}, got {value!r}")


def check_positive(op: str, name: str, value: float) -> None:
    """Raise :class:`InvalidArgument` unless ``value`` is finite and positive."""
    if not (math.isfinite(value) and value > 0):
        raise InvalidArgument(f"{op}: {name} must be positive, got {value!r}")
