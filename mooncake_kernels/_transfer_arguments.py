"""What callers pass to ``transfer.py``: checked, and as what the host code takes."""

import math
import numbers
import operator
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from . import config
from .errors import InvalidArgument

Integers = np.ndarray | torch.Tensor | Sequence[int]
Descriptors = np.ndarray | Iterable[tuple[int, int, int]]


def shown(value: Any) -> str:
    """The value for the text of an error: at most a line of it."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python prints no integer of more than 4300 digits
        return f"a huge {type(value).__name__}"


def as_name(op: str, value: Any) -> str:
    # The host code checks the rest; what is not plain text would not arrive there as it is.
    if not isinstance(value, str) or not value.isascii() or not value.isprintable():
        raise InvalidArgument(f'{op}: name must be "host:port", got {value!r}')
    return value


def as_seconds(op: str, argument: str, value: Any, *, minimum: float) -> float:
    try:
        seconds = float(value) if isinstance(value, numbers.Real) else math.nan
    except OverflowError:
        seconds = math.inf
    if not minimum <= seconds < math.inf:
        raise InvalidArgument(
            f"{op}: {argument} must be a number of seconds >= {minimum:g}, got {shown(value)}"
        )
    return seconds


def as_deadline(op: str, deadline_s: float | None) -> float:
    if deadline_s is None:
        return config.current().deadline_s
    return as_seconds(op, "deadline_s", deadline_s, minimum=1e-6)


def _integers(op: str, argument: str, values: Any, shape: str) -> np.ndarray:
    """The values as uint64, of any shape; a sequence of Python ints is one conversion."""
    expected = f"{op}: {argument} must be {shape} integers from 0 to 2**64 - 1"
    if isinstance(values, torch.Tensor) and values.device.type != "cpu":
        raise InvalidArgument(f"{op}: {argument} must be on the cpu, got {values.device}")
    try:
        array = np.asarray(values)
        if array.dtype.kind in "fO" and not isinstance(values, torch.Tensor | np.ndarray):
            # Integers with no common type in numpy: np.uint64 among Python's, or some above 2**63.
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


def _exact_integers(values: Any) -> np.ndarray:
    array = np.asarray(values, dtype=object)
    integers = [operator.index(value) for value in array.flat]  # TypeError unless one
    return np.array(integers, dtype=np.uint64).reshape(array.shape)  # OverflowError out of range


def as_rows(op: str, descriptors: Descriptors) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    shape = "[n, 3] (local_address, remote_address, num_bytes)"
    if not isinstance(descriptors, np.ndarray | torch.Tensor):
        if not isinstance(descriptors, Iterable):
            raise InvalidArgument(
                f"{op}: descriptors must be {shape} integers, got {shown(descriptors)}"
            )
        descriptors = list(descriptors)
    table = _integers(op, "descriptors", descriptors, shape)
    if table.size == 0:
        table = table.reshape(0, 3)
    if table.ndim != 2 or table.shape[1] != 3:
        raise InvalidArgument(f"{op}: descriptors must be {shape} integers, got {table.shape}")
    local, remote, sizes = (np.ascontiguousarray(column) for column in table.T)
    return local, remote, sizes


def as_columns(
    op: str, local_addresses: Integers, remote_addresses: Integers, sizes: Integers | int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    local = _column(op, "local_addresses", local_addresses)
    remote = _column(op, "remote_addresses", remote_addresses)
    if isinstance(sizes, int | np.integer):
        sizes = np.full(len(local), operator.index(sizes))
    lengths = _column(op, "sizes", sizes)
    if not len(local) == len(remote) == len(lengths):
        raise InvalidArgument(
            f"{op}: local_addresses, remote_addresses and sizes must be equally long, got "
            f"{len(local)}, {len(remote)} and {len(lengths)}"
        )
    return local, remote, lengths


def _column(op: str, argument: str, values: Integers) -> np.ndarray:
    array = _integers(op, argument, values, "[n]")
    if array.ndim != 1:
        raise InvalidArgument(f"{op}: {argument} must be [n] integers, got shape {array.shape}")
    return np.ascontiguousarray(array)
