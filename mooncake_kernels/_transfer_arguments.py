"""What callers pass to ``transfer.py``: checked, and as what the host code takes."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from . import config
from ._arguments import as_integer, as_integers, as_seconds, as_triples
from .errors import InvalidArgument

Integers = np.ndarray | torch.Tensor | Sequence[int]
Descriptors = np.ndarray | Iterable[tuple[int, int, int]]


def as_address(op: str, argument: str, value: Any) -> str:
    # The host code checks the rest; what is not plain text would not arrive there as it is.
    if not isinstance(value, str) or not value.isascii() or not value.isprintable():
        raise InvalidArgument(f'{op}: {argument} must be "host:port", got {value!r}')
    return value


def as_deadline(op: str, deadline_s: float | None) -> float:
    if deadline_s is None:
        return config.current().deadline_s
    return as_seconds(op, "deadline_s", deadline_s, minimum=1e-6)


def as_rows(op: str, descriptors: Descriptors) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return as_triples(op, "descriptors", descriptors, "(local_address, remote_address, num_bytes)")


def as_columns(
    op: str, local_addresses: Integers, remote_addresses: Integers, sizes: Integers | int
) -> tuple[np.ndarray, np.ndarray, np.ndarray | int]:
    local = _column(op, "local_addresses", local_addresses)
    remote = _column(op, "remote_addresses", remote_addresses)
    if isinstance(sizes, int | np.integer):
        lengths: np.ndarray | int = as_integer(op, "sizes", sizes, 0, (1 << 64) - 1)
        num_sizes = len(local)
    else:
        lengths = _column(op, "sizes", sizes)
        num_sizes = len(lengths)
    if not len(local) == len(remote) == num_sizes:
        raise InvalidArgument(
            f"{op}: local_addresses, remote_addresses and sizes must be equally long, got "
            f"{len(local)}, {len(remote)} and {num_sizes}"
        )
    return local, remote, lengths


def _column(op: str, argument: str, values: Integers) -> np.ndarray:
    if type(values) is np.ndarray and values.dtype == np.uint64 and values.flags.c_contiguous:
        array = values
    else:
        array = as_integers(op, argument, values, "[n]")
    if array.ndim != 1:
        raise InvalidArgument(f"{op}: {argument} must be [n] integers, got shape {array.shape}")
    return np.ascontiguousarray(array)
