"""Checked arguments: an error names the argument, what it must be, and what it was."""

import math
import numbers
import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from .errors import InvalidArgument, shown

MOST_FLOAT32 = float(np.finfo(np.float32).max)
LEAST_FLOAT32 = float(np.finfo(np.float32).smallest_subnormal)


def as_integer(op: str, argument: str, value: Any, low: int, high: int) -> int:
    """A Python or numpy integer in [low, high]; not a bool, which would be a mistake."""
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_integer or not low <= value <= high:
        raise InvalidArgument(
            f"{op}: {argument} must be an integer in {low} to {high}, got {shown(value)}"
        )
    return int(value)


def as_int32(op: str, argument: str, value: Any) -> int:
    """An integer that compiled code takes, which checks its range."""
    return as_integer(op, argument, value, -(1 << 31), (1 << 31) - 1)


def as_bool(op: str, argument: str, value: Any) -> bool:
    """True or False; not a value that is merely truthy or falsy."""
    if not isinstance(value, bool):
        raise InvalidArgument(f"{op}: {argument} must be True or False, got {shown(value)}")
    return value


def as_utf8(op: str, argument: str, text: str) -> bytes:
    """Text as bytes; a lone surrogate is an error."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(
            f"{op}: {argument} must be text that UTF-8 can hold, got {shown(text)}"
        ) from None


def is_number(value: Any) -> bool:
    """Tell whether it is a real number of Python or numpy; not a bool, which is a mistake."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def as_float32(op: str, argument: str, value: Any, *, positive: bool = False) -> float:
    """A finite number that float32 holds; a positive one is not rounded to 0."""
    try:
        number = float(value) if is_number(value) else math.nan
    except OverflowError:
        number = math.inf
    least = LEAST_FLOAT32 if positive else -MOST_FLOAT32
    if not least <= number <= MOST_FLOAT32:
        what = "a positive" if positive else "a finite"
        raise InvalidArgument(
            f"{op}: {argument} must be {what} number that float32 holds, got {shown(value)}"
        )
    return number


def as_one_of(op: str, argument: str, value: Any, choices: tuple[str, ...]) -> str:
    """One of several words."""
    if not isinstance(value, str) or value not in choices:
        raise InvalidArgument(f"{op}: {argument} must be one of {choices}, got {shown(value)}")
    return value


def as_instance(op: str, argument: str, value: Any, kind: Any, what: str) -> Any:
    """An object of a class."""
    if not isinstance(value, kind):
        raise InvalidArgument(f"{op}: {argument} must be {what}, got {shown(value)}")
    return value


def as_seconds(op: str, argument: str, value: Any, *, minimum: float) -> float:
    if type(value) is float and minimum <= value < math.inf:
        return value
    try:
        seconds = float(value) if is_number(value) else math.nan
    except OverflowError:
        seconds = math.inf
    if not minimum <= seconds < math.inf:
        raise InvalidArgument(
            f"{op}: {argument} must be a finite number of seconds >= {minimum:g}, "
            f"got {shown(value)}"
        )
    return seconds


def as_integers(op: str, argument: str, values: Any, shape: str) -> np.ndarray:
    """The values as uint64, of any shape; a sequence of Python ints is one conversion."""
    expected = f"{op}: {argument} must be {shape} integers from 0 to 2**64 - 1"
    if isinstance(values, torch.Tensor) and values.device.type != "cpu":
        raise InvalidArgument(f"{op}: {argument} must be on the cpu, got {values.device}")
    try:
        array = np.asarray(values)
        if array.dtype.kind in "fO" and not isinstance(values, torch.Tensor | np.ndarray):
            # Integers without a common numpy type: np.uint64 among Python's, or some above 2**63.
            array = _exact_integers(values)
    except (ValueError, TypeError, OverflowError, RuntimeError):
        raise InvalidArgument(f"{expected}, got {shown(values)}") from None
    if array.size == 0:
        return array.astype(np.uint64)
    if array.dtype.kind not in "iu":
        raise InvalidArgument(f"{expected}, got {array.dtype} of shape {array.shape}")
    if array.dtype.kind == "i" and array.min() < 0:
        raise InvalidArgument(f"{expected}, got {array.min()}")
    return array.astype(np.uint64, copy=False)


def as_triples(
    op: str, argument: str, rows: Any, what: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The columns of a table of integers, [n, 3], or of rows of three; ``what`` describes them."""
    shape = f"[n, 3] {what}"
    if not isinstance(rows, np.ndarray | torch.Tensor):
        if not isinstance(rows, Iterable):
            raise InvalidArgument(f"{op}: {argument} must be {shape} integers, got {shown(rows)}")
        rows = list(rows)
    table = as_integers(op, argument, rows, shape)
    if table.size == 0:
        table = table.reshape(0, 3)
    if table.ndim != 2 or table.shape[1] != 3:
        raise InvalidArgument(f"{op}: {argument} must be {shape} integers, got shape {table.shape}")
    first, second, third = map(np.ascontiguousarray, table.T)
    return first, second, third


def _exact_integers(values: Any) -> np.ndarray:
    array = np.asarray(values, dtype=object)
    integers = [operator.index(value) for value in array.flat]  # TypeError unless one
    return np.array(integers, dtype=np.uint64).reshape(array.shape)  # OverflowError if out of range
