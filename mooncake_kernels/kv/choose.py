"""Choose engine "auto" for a copy: the fastest that supports it, by the calibration table.

Without a table it is "host" on the CPU and "cuda" on a GPU (Triton if there are no kernels).
"""

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch

from .. import _library
from . import calibration
from .devices import device_of
from .execute import Engine
from .layout import HEADER, SIDE_FIELDS
from .two_hop import takes
from .view import BlockPlan

RUN_BYTES = 1 + 2 * SIDE_FIELDS  # its place in a plan
LEGACY_STREAMS = (0, 1)
BULK_BYTES = 16  # granularity of bulk copies: csrc/kv/bulk_ring.h


class Sided(Protocol):
    """A cache, as far as the choice depends on it."""

    device: torch.device


def choose(
    engine: Engine, src: Sided, dst: Sided, plans: Sequence[Any], ids: Sequence[Any]
) -> Engine:
    """Return the engine of a call: a named one as it is; "auto" as the table says, or unchanged.

    Args:
        engine: as given by the caller.
        src: the cache that is read.
        dst: the cache that is written.
        plans: of the call's copies; the first one stands for all. There is a choice only for
            ``BlockPlan``.
        ids: of the call, as given, not yet checked.
    """
    if engine != "auto" or torch.compiler.is_compiling():
        return engine
    table = calibration.current()
    if table is None:
        return engine
    device = device_of(src.device, dst.device)
    if device.type != "cuda" or not _library.has_cuda:
        return engine
    if not all(isinstance(plan, BlockPlan) for plan in plans):
        return engine
    count = max((len(given) for given in ids if hasattr(given, "__len__")), default=0)
    if count == 0 or not calibration.is_of_gpu(table, device.index):
        return engine
    direction = f"{_letter(src)}2{_letter(dst)}"
    can = (_are_on_host(ids), _takes_lists(device))
    first = [_tensors(side)[0].data_ptr() % BULK_BYTES for side in (src, dst)]
    key = (id(table), direction, count.bit_length(), *can, *first)
    choices = plans[0].choices
    if key not in choices:
        names = _candidates(src, dst, plans, *can)
        run_bytes, runs = _runs_of_an_id(plans[0])
        choices[key] = table.best(direction, run_bytes, runs * count, names)
        if choices[key]:
            _library.log_choice(f"{direction} copies by the calibration", choices[key])
    return cast(Engine, choices[key] or engine)


def _candidates(
    src: Sided, dst: Sided, plans: Sequence[BlockPlan], on_host: bool, takes_lists: bool
) -> tuple[str, ...]:
    names = ["cuda"]
    if all(_fits_bulk_copies(plan, src, dst) for plan in plans):
        names.append("tma")
    if on_host and takes_lists:
        names.append("copy_engine")
        to_host = dst.device.type == "cpu"
        if src.device != dst.device and all(takes(plan, to_host) for plan in plans):
            names.append("two_hop")
    return tuple(names)


def _fits_bulk_copies(plan: BlockPlan, src: Sided, dst: Sided) -> bool:
    """Tell whether every size, stride and address is a multiple of the bulk copies' granularity."""
    values = plan.values.tolist()
    sides = [values[1:RUN_BYTES][i] for i in range(1, 2 * SIDE_FIELDS, 2)]
    axes = [value for i, value in enumerate(values[RUN_BYTES + 1 : HEADER]) if i % 3]
    addresses = [tensor.data_ptr() for side in (src, dst) for tensor in _tensors(side)]
    bits = values[RUN_BYTES]
    for number in [*sides, *axes, *values[HEADER + 1 :: 2], *addresses]:
        bits |= number
    return bits % BULK_BYTES == 0


def _tensors(side: Any) -> Sequence[torch.Tensor]:
    return [side] if isinstance(side, torch.Tensor) else side.tensors


def _letter(side: Sided) -> str:
    return "h" if side.device.type == "cpu" else "d"


def _are_on_host(ids: Sequence[Any]) -> bool:
    return not any(isinstance(given, torch.Tensor) and given.is_cuda for given in ids)


def _takes_lists(device: torch.device) -> bool:
    """Tell whether the current stream accepts a batch for the copy engines."""
    stream = torch.cuda.current_stream(device).cuda_stream
    return stream not in LEGACY_STREAMS and not torch.cuda.is_current_stream_capturing()


def _runs_of_an_id(plan: BlockPlan) -> tuple[int, int]:
    """Return the bytes of a run, and the runs per id on the side with the longer blocks."""
    values = plan.values.tolist()
    pieces = max(values[3], values[3 + SIDE_FIELDS])
    extents = values[RUN_BYTES + 1 : HEADER : 3]
    runs = pieces * plan.num_planes
    for extent in extents:
        runs *= extent
    return values[RUN_BYTES], runs
