"""Running a copy: arguments checked, then handed to the chosen engine. ``kv.py`` is the face."""

from collections.abc import Sequence
from typing import Literal

import torch

from . import _library
from ._kv_view import BadIds, BlockPlan, KVView
from .errors import InvalidArgument
from .reference import kv as reference

Engine = Literal["auto", "host", "cuda", "triton", "reference"]
BlockIds = torch.Tensor | Sequence[int]


class Packed:
    """Packed blocks, as the one side of a copy that has no ids."""

    def __init__(self, tensor: torch.Tensor):
        self.tensors = [tensor]
        self.num_blocks = tensor.shape[0]
        self.device = tensor.device

    def plane(self, layer: int, kv: int) -> torch.Tensor:
        return self.tensors[0][:, layer, kv]


def execute(
    engine: Engine,
    src: KVView | Packed,
    dst: KVView | Packed,
    plan: BlockPlan,
    src_ids: torch.Tensor | None,
    dst_ids: torch.Tensor | None,
    bad: BadIds,
    max_sms: int | None,
) -> None:
    device = src.device.type
    arguments = (src.tensors, dst.tensors, plan.values, src_ids, dst_ids)
    if torch.compiler.is_compiling() and engine in ("auto", "host", "cuda"):
        if engine != "auto":
            _library.require_engine(engine, device)
        # The words cannot be looked at while tracing: on the CPU the operator itself raises.
        words = bad.words if device == "cuda" else None
        _library.copy_blocks(*arguments, words, max_sms or 0)
        return
    chosen = _library.choose_engine(device) if engine == "auto" else engine
    bad.raise_if_any(src.num_blocks, dst.num_blocks)
    if chosen in ("host", "cuda"):
        _library.require_engine(chosen, device)
        _library.call(_library.copy_blocks, *arguments, bad.words, max_sms or 0)
    elif chosen == "triton":
        from .triton import kv as triton_kv  # not at the top: importing triton takes a second

        triton_kv.copy_blocks(*arguments, bad.words)
        if device == "cpu":
            bad.raise_if_any(src.num_blocks, dst.num_blocks)
    elif chosen == "reference":
        reference.copy_blocks(src, dst, plan.selection, src_ids, dst_ids, bad)
    else:
        raise InvalidArgument(
            f"copy_blocks: engine must be auto, host, cuda, triton or reference, got {engine!r}"
        )


def as_ids(name: str, ids: BlockIds, device: torch.device) -> torch.Tensor:
    if not isinstance(ids, torch.Tensor):
        ids = torch.as_tensor(ids, dtype=torch.int64) if len(ids) == 0 else torch.as_tensor(ids)
    if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
        raise InvalidArgument(
            f"{name} must be 1-d int32 or int64, got {ids.dtype} of shape {tuple(ids.shape)}"
        )
    return ids.to(device, non_blocking=True).contiguous()


def as_packed(name: str, tensor: torch.Tensor, shape: tuple[int, ...], view: KVView) -> Packed:
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgument(f"{name} must be a torch tensor, got {type(tensor).__name__}")
    if tensor.shape != shape:
        raise InvalidArgument(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
    for what in ("dtype", "device"):
        mine, other = getattr(view, what), getattr(tensor, what)
        if mine != other:
            raise InvalidArgument(f"{name} must have the cache's {what} {mine}, got {other}")
    if not tensor.is_contiguous():
        raise InvalidArgument(f"{name} must be packed, got strides {tensor.stride()}")
    return Packed(tensor)


def check_max_sms(op: str, max_sms: int | None) -> None:
    if max_sms is not None and max_sms < 1:
        raise InvalidArgument(f"{op}: max_sms must be at least 1, got {max_sms}")
