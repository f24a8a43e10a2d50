"""The engine of operations without a Triton kernel: host code or CUDA, by device, or the loop."""

from typing import Literal

import torch

from . import _library
from ._arguments import as_one_of
from .errors import InvalidArgument

Engine = Literal["auto", "host", "cuda", "reference"]
ENGINES = ("auto", "host", "cuda", "reference")


def choose(op: str, engine: str, device: torch.device) -> str:
    """Return the engine to run an operation on, never "auto"."""
    as_one_of(op, "engine", engine, ENGINES)
    if device.type not in ("cpu", "cuda"):
        raise InvalidArgument(f"{op}: tensors must be on cpu or cuda, got {device}")
    if engine == "reference":
        return engine
    if engine == "auto":
        engine = _library.choose_engine(device.type)
        engine = "cuda" if engine == "triton" else engine  # built without nvcc: reported below
    _library.require_engine(engine, device.type, op)
    return engine
