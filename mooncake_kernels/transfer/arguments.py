"""Callers' arguments, checked and converted to what the host code takes."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from .. import config
from .._arguments import as_bool, as_integer, as_integers, as_seconds
from ..errors import InvalidArgument

Integers = np.ndarray | torch.Tensor | Sequence[int]
Descriptors = np.ndarray | Iterable[tuple[int, int, int]]

READ_AS_THEY_ARE = frozenset(map(np.dtype, (np.int32, np.int64, np.uint64)))  # without a copy


def as_address(op: str, argument: str, value: Any) -> str:
    # The host code checks the rest; anything but plain text would reach it changed.
    if not isinstance(value, str) or not value.isascii() or not value.isprintable():
        raise InvalidArgument(f'{op}: {argument} must be "host:port", got {value!r}')
    return value


def as_deadline(op: str, deadline_s: float | None) -> float:
    if deadline_s is None:
        return config.current().deadline_s
    return as_seconds(op, "deadline_s", deadline_s, minimum=1e-6)


def as_checksum(op: str, checksum: bool | None, *, default: bool) -> bool:
    return default if checksum is None else as_bool(op, "checksum", checksum)


def as_columns(
    op: str, local_addresses: Integers, remote_addresses: Integers, sizes: Integers | int
) -> tuple[np.ndarray, np.ndarray, np.ndarray | int]:
    local = as_column(op, "local_addresses", local_addresses)
    remote = as_column(op, "remote_addresses", remote_addresses)
    if isinstance(sizes, int | np.integer):
        lengths: np.ndarray | int = as_integer(op, "sizes", sizes, 0, (1 << 64) - 1)
        num_sizes = len(local)
    else:
        lengths = as_column(op, "sizes", sizes)
        num_sizes = len(lengths)
    if not len(local) == len(remote) == num_sizes:
        raise InvalidArgument(
            f"{op}: local_addresses, remote_addresses and sizes must be equally long, got "
            f"{len(local)}, {len(remote)} and {num_sizes}"
        )
    return local, remote, lengths


def as_column(op: str, argument: str, values: Integers) -> np.ndarray:
    """``[n]`` packed integers of a type that the host code reads; it checks their values."""
    array = values if type(values) is np.ndarray else _as_array(values)
    if array is None or array.dtype not in READ_AS_THEY_ARE:
        array = as_integers(op, argument, values, "[n]")
    if array.ndim != 1:
        raise InvalidArgument(f"{op}: {argument} must be [n] integers, got shape {array.shape}")
    return array if array.flags.c_contiguous and array.flags.aligned else array.copy()


def _as_array(values: Any) -> np.ndarray | None:
    try:
        return np.asarray(values)
    except (ValueError, TypeError, OverflowError, RuntimeError):
        return None
