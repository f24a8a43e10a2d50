"""The arguments of rules, checked: numbers and tables, one for all requests or one per request."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .._arguments import as_integer
from ..errors import InvalidArgument, shown
from .batch import INT32_MAX
from .rule import Parameter


def as_numbers(op: str, argument: str, values: Any, *, minimum: int) -> Parameter:
    """An integer for all requests, or one per request."""
    if isinstance(values, torch.Tensor | np.ndarray):
        values = values.tolist()
    if isinstance(values, list | tuple):
        numbers = [
            as_integer(op, f"{argument}[{index}]", value, minimum, INT32_MAX)
            for index, value in enumerate(values)
        ]
        return Parameter(tuple(numbers), is_per_request=True)
    return Parameter((as_integer(op, argument, values, minimum, INT32_MAX),))


@dataclass(frozen=True)
class Tables:
    """A table for all requests, or one per request."""

    entries: tuple[Sequence[Any], ...]
    is_per_request: bool

    def named(self, argument: str) -> Iterator[tuple[str, Sequence[Any]]]:
        """Yield each table with its name in errors."""
        for request, table in enumerate(self.entries):
            name = f"{argument}[{request}]" if self.is_per_request else argument
            if not isinstance(table, list | tuple):
                raise InvalidArgument(f"{name} must be a list, got {shown(table)}")
            yield name, table


def as_tables(values: Any, *, is_one: Callable[[Sequence[Any]], bool]) -> Tables:
    """Tell a table from a list of tables."""
    plain = _as_lists(values)
    if not isinstance(plain, list | tuple) or is_one(plain):
        return Tables((plain,), is_per_request=False)
    return Tables(tuple(plain), is_per_request=True)


def as_table(name: str, values: Sequence[Any]) -> tuple[int, ...]:
    """Positions in a request."""
    op, _, argument = name.partition(": ")
    return tuple(
        as_integer(op, f"{argument}[{index}]", value, 0, INT32_MAX)
        for index, value in enumerate(values)
    )


def is_flat(table: Sequence[Any]) -> bool:
    """Whether it holds no lists."""
    return not any(map(_has_length, table))


def is_pair(value: Any) -> bool:
    """Whether it is two numbers."""
    return isinstance(value, list | tuple) and len(value) == 2 and is_flat(value)


def _has_length(value: Any) -> bool:
    return hasattr(value, "__len__") and not isinstance(value, str)


def _as_lists(values: Any) -> Any:
    if isinstance(values, torch.Tensor | np.ndarray):
        return values.tolist()
    if isinstance(values, list | tuple | range):
        return [_as_lists(value) for value in values]
    return values
