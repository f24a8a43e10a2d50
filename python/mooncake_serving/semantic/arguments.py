"""Checks of numbers, and how an error shows a tensor."""

import numbers
from typing import Any

import torch

from ..arguments import as_count, refuse


def as_bits(op: str, bits: Any) -> int:
    """Return the bits of a signature: a positive multiple of 8."""
    number = as_count(op, "bits", bits, 8)
    if number % 8:
        refuse(op, "bits", "a multiple of 8", bits)
    return number


def as_number(op: str, name: str, value: Any, least: float, most: float) -> float:
    """Return a finite number in ``[least, most]``; a bool and NaN are refused."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        refuse(op, name, "a number", value)
    number = float(value)
    if not (least <= number <= most and abs(number) < float("inf")):
        refuse(op, name, f"in [{least:g}, {most:g}]", value)
    return number


def got(value: Any) -> Any:
    """Describe a tensor by its dtype and shape, for an error; return anything else as it is."""
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else value
