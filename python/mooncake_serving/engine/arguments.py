"""Checks of arguments: lists, devices, texts, and how to sample."""

from collections.abc import Iterable
from typing import Any

import torch

from ..arguments import as_integer, refuse
from .sampling import SamplingParams


def as_integers(op: str, name: str, values: Any) -> list[int]:
    """Return several integers as a list."""
    try:
        listed = list(values)
    except TypeError:
        refuse(op, name, "integers", values)
    return [as_integer(op, f"{name}[{index}]", value) for index, value in enumerate(listed)]


def as_positive(op: str, name: str, value: Any) -> int:
    """Return an integer of at least 1."""
    number = as_integer(op, name, value)
    if number < 1:
        refuse(op, name, "positive", value)
    return number


def as_device(op: str, device: Any) -> torch.device:
    """Return a device, also from its name; whether this machine has it, its use tells."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        refuse(op, "device", "a device of torch", device)


def check_text(op: str, name: str, value: Any) -> None:
    """Check that it is a string."""
    if not isinstance(value, str):
        refuse(op, name, "a string", value)


def as_prompts(op: str, prompts: Any) -> list[Any]:
    """Return prompts as a list: what they contain is checked where each is added."""
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Iterable):
        refuse(op, "prompts", "lists of token ids", prompts)
    return list(prompts)


def check_params(op: str, params: Any) -> None:
    """Check that these are parameters, which have checked themselves."""
    if not isinstance(params, SamplingParams):
        refuse(op, "params", "SamplingParams", params)
