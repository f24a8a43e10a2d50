"""A run of bytes without redundant Python checks: the call an engine makes at every step."""

import torch
from torch import Tensor

from .. import _library
from ..bad_ids import BadIds
from .calibration import default_engine
from .choose import choose
from .copy_parts import CopyPart
from .execute import Engine
from .sides import gpu_index
from .view import BlockPlan


class QuickRun:
    """Copies all layers, by the host's or CUDA's kernel; or does nothing and returns False.

    The operator itself checks the ids before a byte moves. If it refuses them, or anything is
    unusual, the caller must take the slow path, which reports what is wrong.

    Args:
        part: the view to copy; its tensors must have addresses.
        bad: where a kernel reports a bad id.
        by_slot: whether ids name slots.
    """

    def __init__(self, part: CopyPart, bad: BadIds, *, by_slot: bool):
        self._part, self._bad, self._by_slot = part, bad, by_slot
        self._device, self._gpu = part.device, gpu_index(part.device)
        self._type = part.device.type  # reading it takes a third of a microsecond
        self._on_cpu = self._type == "cpu"
        self._kernel = "host" if self._on_cpu else "cuda"
        self._plan: BlockPlan | None = None  # made by the first run

    def __call__(self, src_ids: object, dst_ids: object, engine: Engine) -> bool:
        if torch.compiler.is_compiling():
            return False
        if type(src_ids) is not Tensor or type(dst_ids) is not Tensor:
            return False
        part, plan = self._part, self._plan
        if self._on_cpu:
            if not (src_ids.is_cpu and dst_ids.is_cpu):  # half the time of comparing devices
                return False
        elif src_ids.device != self._device or dst_ids.device != self._device:
            return False
        if plan is None:
            plan = self._plan = part.plan("CopyPlan", None, self._by_slot)
        if not self._on_cpu:
            engine = choose(engine, part.src, part.dst, (plan,), (src_ids, dst_ids))
        chosen = default_engine(self._type) if engine == "auto" else engine
        if chosen != self._kernel:
            return False
        self._bad.raise_if_any()
        table = plan.resolved(part.src.tensors, part.dst.tensors, self._gpu)
        try:
            _library.copy_resolved(table, 0, 0, src_ids, dst_ids, self._bad.address, 0)
        except (ValueError, RuntimeError):
            return False
        torch.autograd.graph.increment_version(part.dst.versioned)
        return True
