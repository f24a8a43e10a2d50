"""Run a copy by rows: the counterpart of ``execute`` for copies that process elements."""

from collections.abc import Callable
from typing import Any

import torch

from .. import _library
from .._tensors import count_write, have_addresses
from ..bad_ids import BadIds
from ..errors import Unavailable
from ..reference import kv as reference
from .execute import Engine
from .row_plan import RowCall, RowPlan
from .sides import gpu_index
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
    """Copy, adding to ``call.sums``. Mismatches are refused, or reported to ``bad``."""
    if not torch.compiler.is_compiling():
        bad.raise_if_any()
    if _choose(engine, plan.device.type) == "reference":
        reference.transform_blocks(src, dst, plan, src_ids, dst_ids, call, bad)
    else:
        ids = (src_ids, dst_ids, plan.scales, plan.cos_sin(call))
        arguments = (*ids, call.expected, call.actual, call.sums, bad.address, int(max_sms or 0))
        if _is_eager(src, dst, src_ids, dst_ids):
            table = plan.resolved(src.registered, dst.registered, gpu_index(plan.device))
            _library.call(_library.transform_resolved, table, plan.transform, *arguments)
        else:
            plans = (plan.plan.values, plan.transform)
            _call(_library.transform_blocks, src.tensors, dst.tensors, *plans, *arguments)
    count_write(dst.versioned)


def add_checksums(
    engine: Engine,
    view: KVView,
    plan: RowPlan,
    ids: torch.Tensor,
    sums: torch.Tensor,
    bad: BadIds,
    max_sms: int | None,
) -> None:
    """Add to ``sums`` the checksums of what the plan reads of each of src's blocks."""
    if not torch.compiler.is_compiling():
        bad.raise_if_any()
    if _choose(engine, plan.device.type) == "reference":
        reference.add_checksums(view, plan, ids, sums, bad)
    else:
        arguments = (plan.checksum_transform, ids, sums, bad.address, int(max_sms or 0))
        if _is_eager(view, view, ids, ids):
            places = (view.registered, view.registered, gpu_index(plan.device))
            table = plan.checksum_plan.resolved(*places)
            _library.call(_library.checksum_resolved, table, *arguments)
        else:
            _call(_library.checksum_blocks, view.tensors, plan.checksum_plan.values, *arguments)


def _is_eager(src: KVView, dst: KVView, src_ids: torch.Tensor, dst_ids: torch.Tensor) -> bool:
    tensors = (src.tensors[0], dst.tensors[0], src_ids, dst_ids)
    return not torch.compiler.is_compiling() and have_addresses(tensors)


def _call(operator: Callable[..., Any], *arguments: Any) -> None:
    if torch.compiler.is_compiling():
        operator(*arguments)
    else:
        _library.call(operator, *arguments)


def _choose(engine: Engine, device: str) -> str:
    if torch.compiler.is_compiling() and engine == "auto":
        return "host"  # the operator dispatches by its tensors
    chosen = _library.choose_engine(device) if engine == "auto" else engine
    if chosen in MOVES_BYTES:
        raise Unavailable(
            f"engine {chosen}: it moves bytes; convert, rope and checksum need another"
        )
    if chosen != "reference":
        _library.require_engine(chosen, device)
    return chosen
