"""A run of bytes without what Python need not look at again: a call of an engine's every step."""

import torch

from .. import _library
from ..bad_ids import BadIds
from .calibration import default_engine
from .choose import choose
from .copy_parts import CopyPart
from .execute import Engine
from .sides import gpu_index


def run_quickly(
    part: CopyPart | None,
    src_ids: object,
    dst_ids: object,
    bad: BadIds,
    engine: Engine,
    *,
    by_slot: bool,
) -> bool:
    """Copy all layers, by the host's or CUDA's kernel; or do nothing and return False.

    The operator itself checks the ids, before a byte moves. Where it refuses them, or anything is
    unusual, the long way is to be gone, which says what is wrong.

    Args:
        part: what is copied; None if that takes the long way.
        src_ids: as they were given.
        dst_ids: likewise.
        bad: where a kernel reports a bad one.
        engine: as it was given.
        by_slot: whether ids name slots.
    """
    if part is None or torch.compiler.is_compiling():
        return False
    if type(src_ids) is not torch.Tensor or type(dst_ids) is not torch.Tensor:
        return False
    device = part.device
    if src_ids.device != device or dst_ids.device != device:
        return False
    plan = part.plan("CopyPlan", None, by_slot)
    if device.type == "cuda":
        engine = choose(engine, part.src, part.dst, (plan,), (src_ids, dst_ids))
    chosen = default_engine(device.type) if engine == "auto" else engine
    if chosen != ("host" if device.type == "cpu" else "cuda"):
        return False
    bad.raise_if_any()
    table = plan.resolved(part.src.tensors, part.dst.tensors, gpu_index(device))
    try:
        _library.copy_resolved(table, 0, 0, src_ids, dst_ids, bad.address, 0)
    except (ValueError, RuntimeError):
        return False
    torch.autograd.graph.increment_version(part.dst.versioned)
    return True
