"""Running a copy by rows: as ``_kv_execute`` for what looks at the elements."""

from collections.abc import Callable
from typing import Any

import torch

from .. import _library
from ..errors import InvalidArgument, Unavailable
from ..reference import kv as reference
from .bad_ids import BadIds
from .execute import ENGINES, Engine
from .row_plan import RowCall, RowPlan
from .view import KVView

MOVES_BYTES = ("triton", "tma", "copy_engine", "two_hop")


def transform(
    engine: Engine,
    src: KVView,
    dst: KVView,
    plan: RowPlan,
    src_ids: torch.Tensor,
    dst_ids: torch.Tensor,
    call: RowCall,
    bad: BadIds,
    max_sms: int | None,
) -> None:
    """Copy; add to ``call.sums``. What is not as expected is refused, or reported to ``bad``."""
    if not torch.compiler.is_compiling():
        bad.raise_if_any()
    if _choose(engine, plan.device.type) == "reference":
        reference.transform_blocks(src, dst, plan, src_ids, dst_ids, call, bad)
    else:
        ids = (src_ids, dst_ids, plan.scales, plan.cos_sin(call))
        sums = (call.expected, call.actual, call.sums)
        numbers = (bad.address, int(max_sms or 0))
        plans = (plan.values, plan.transform)
        _call(_library.transform_blocks, src.tensors, dst.tensors, *plans, *ids, *sums, *numbers)
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(dst.tensors)


def add_checksums(
    engine: Engine,
    view: KVView,
    plan: RowPlan,
    ids: torch.Tensor,
    sums: torch.Tensor,
    bad: BadIds,
    max_sms: int | None,
) -> None:
    """Add to ``sums`` what the plan reads of each of src's blocks."""
    if not torch.compiler.is_compiling():
        bad.raise_if_any()
    if _choose(engine, plan.device.type) == "reference":
        reference.add_checksums(view, plan, ids, sums, bad)
    else:
        plans = (plan.checksum_values, plan.checksum_transform)
        numbers = (bad.address, int(max_sms or 0))
        _call(_library.checksum_blocks, view.tensors, *plans, ids, sums, *numbers)


def _choose(engine: Engine, device: str) -> str:
    if torch.compiler.is_compiling() and engine == "auto":
        return "host"  # the operator itself goes by its tensors
    chosen = _library.choose_engine(device) if engine == "auto" else engine
    if chosen in MOVES_BYTES:
        raise Unavailable(
            f"engine {chosen}: it moves bytes; convert, rope and checksum need another"
        )
    if chosen not in ("host", "cuda", "reference"):
        raise InvalidArgument(f"engine must be {ENGINES}, got {engine!r}")
    if chosen != "reference":
        _library.require_engine(chosen, device)
    return chosen


def _call(operator: Callable[..., Any], *arguments: Any) -> None:
    if torch.compiler.is_compiling():
        operator(*arguments)
    else:
        _library.call(operator, *arguments)
