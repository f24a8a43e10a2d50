"""The arguments of a ``LayerStream``, checked."""

import numbers

import torch

from .. import _library
from ..errors import InvalidArgument, Unavailable, shown

_LONGEST_S = 1e9  # 30 years; fits in an integer number of nanoseconds


def as_count(op: str, count: int) -> int:
    if not _is_int(count) or not 1 <= count < 2**31:
        raise InvalidArgument(
            f"{op}: num_layers must be an integer from 1 to 2**31 - 1, got {shown(count)}"
        )
    return int(count)


def as_index(op: str, layer: int, num_layers: int) -> int:
    if not _is_int(layer) or not 0 <= layer < num_layers:
        raise InvalidArgument(
            f"LayerStream.{op}: layer must be in [0, {num_layers}), got {shown(layer)}"
        )
    return int(layer)


def as_step(op: str, step: int, least: int = 1) -> int:
    if not _is_int(step) or not least <= step < 2**62:
        raise InvalidArgument(
            f"LayerStream.{op}: step must be in [{least}, 2**62), got {shown(step)}"
        )
    return int(step)


def refuse_in_graph(op: str, step: int, device: torch.device) -> None:
    if device.type == "cpu" or torch.compiler.is_compiling():
        return
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            raise InvalidArgument(
                f"LayerStream.{op}: step must be None in a graph, got {shown(step)}"
            )


def as_seconds(op: str, seconds: float) -> float:
    is_number = isinstance(seconds, numbers.Real) and not isinstance(seconds, bool)
    if not is_number or not 0 < seconds <= _LONGEST_S:
        raise InvalidArgument(f"{op}: timeout_s must be a number in (0, 1e9], got {shown(seconds)}")
    return float(seconds)


def as_device(op: str, device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise InvalidArgument(f"{op}: device must be cpu or a CUDA device, got {shown(device)}")
    if found.type == "cpu":
        return torch.device("cpu")
    if not _library.has_cuda:
        raise Unavailable(f"{op}: _ops.so was built without nvcc, so it has no CUDA kernels")
    if not torch.cuda.is_available():
        raise Unavailable(f"{op}: torch finds no CUDA device")
    index = torch.cuda.current_device() if found.index is None else found.index
    return torch.device("cuda", index)


def _is_int(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
