"""What callers pass to ``transfer.py``: checked, and as what the host code takes."""

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from . import config
from .errors import InvalidArgument

Integers = np.ndarray | torch.Tensor | Sequence[int]
Descriptors = np.ndarray | Iterable[tuple[int, int, int]]


def as_text(op: str, argument: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(f'{op}: {argument} must be "host:port", got {value!r}')
    return value


def as_seconds(op: str, argument: str, value: Any, *, minimum: float) -> float:
    if not isinstance(value, (int, float)) or not math.isfinite(value) or value < minimum:
        raise InvalidArgument(
            f"{op}: {argument} must be a number of seconds >= {minimum:g}, got {value!r}"
        )
    return float(value)


def as_deadline(op: str, deadline_s: float | None) -> float:
    if deadline_s is None:
        return config.current().deadline_s
    return as_seconds(op, "deadline_s", deadline_s, minimum=1e-6)


def _integers(op: str, argument: str, values: Any, shape: str) -> np.ndarray:
    """The values as uint64, of any shape; a sequence of Python ints is one conversion."""
    if isinstance(values, torch.Tensor) and values.device.type != "cpu":
        raise InvalidArgument(f"{op}: {argument} must be on the cpu, got {values.device}")
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):
        raise InvalidArgument(
            f"{op}: {argument} must be {shape} integers, got {values!r}"
        ) from None
    if array.size == 0:
        return array.astype(np.uint64)
    if array.dtype.kind not in "iu":
        raise InvalidArgument(
            f"{op}: {argument} must be {shape} integers, got {array.dtype} of shape {array.shape}"
        )
    if array.dtype.kind == "i" and array.min() < 0:
        raise InvalidArgument(f"{op}: {argument} must not be negative, got {array.min()}")
    return array.astype(np.uint64, copy=False)


def as_rows(op: str, descriptors: Descriptors) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    if not isinstance(descriptors, np.ndarray | torch.Tensor):
        descriptors = list(descriptors)
    shape = "[n, 3] (local_address, remote_address, num_bytes)"
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
