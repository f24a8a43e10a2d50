"""Run a copy: check the arguments and call the chosen engine."""

import numbers
from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling

from .. import _library
from .._arguments import as_one_of
from .._tensors import PLAIN, check_plain, count_write, have_addresses, is_captured
from ..bad_ids import BadIds, check_ids
from ..errors import InvalidArgument, Unavailable, shown
from ..reference import kv as reference
from .calibration import default_engine, defaults
from .devices import check_packed_device, gpu_address
from .execute_listed import COPY_ENGINE, copy_by_kernel, copy_listed
from .layout import PACKED_AXES
from .row_plan import RowCall, RowPlan
from .two_hop import copy_in_two_hops
from .view import BlockPlan, KVView, PackedBlocks

Engine = Literal["auto", "host", "cuda", "tma", "copy_engine", "two_hop", "triton", "reference"]
ENGINES: tuple[str, ...] = get_args(Engine)
LISTED = ("copy_engine", "two_hop")  # the host lists their runs, from ids on the CPU
MOVES_BYTES = ("triton", "tma", *LISTED)
BlockIds = torch.Tensor | np.ndarray | Sequence[int]
ID_DTYPES = (torch.int32, torch.int64)
PLAIN_IDS = (*PLAIN, NoneType)
CPU = torch.device("cpu")


class Packed:
    """Packed blocks: the side of a copy that has no ids.

    Args:
        tensor: the blocks.
        base: their address for the kernel that copies; None if they have none.
        axes: of a block.
    """

    def __init__(self, tensor: torch.Tensor, base: int | None, axes: Sequence[str] = PACKED_AXES):
        self.tensors = self.versioned = [tensor]
        self._axes = axes
        self.registered: list[torch.Tensor] = []  # the tensor differs at each call
        self.num_blocks = tensor.shape[0]
        self.device = tensor.device
        self.has_addresses, self.base = base is not None, base or 0

    def plane(self, layer: int, kv: int) -> torch.Tensor:
        places = [1 + self._axes.index(axis) for axis in PACKED_AXES]
        return self.tensors[0].permute(0, *places)[:, layer, kv]


def execute(
    engine: Engine,
    src: KVView | Packed,
    dst: KVView | Packed,
    plan: BlockPlan,
    src_ids: torch.Tensor | None,
    dst_ids: torch.Tensor | None,
    bad: BadIds,
    max_sms: int | None,
    gpu: int,
) -> None:
    """Copy bytes: on the GPU of that index, or on the CPU if it is -1."""
    device = "cpu" if gpu < 0 else "cuda"
    bad_address, limit = bad.address, 0 if max_sms is None else int(max_sms)
    if is_compiling():
        if engine in ("auto", "host", "cuda"):
            if engine != "auto":
                _library.require_engine(engine, device)
            tensors = (src.tensors, dst.tensors, plan.values, src_ids, dst_ids)
            _library.copy_blocks(*tensors, bad_address, limit)
            return
        if engine == "tma":
            raise _not_compiled(engine)
    chosen: str = engine
    if engine == "auto":
        chosen = defaults.get(device) or default_engine(device)
    if bad.seen is not None:
        bad.raise_if_any()
    if chosen in ("host", "cuda", "tma"):
        if engine != "auto":
            _library.require_engine(chosen, device)
        are_plain = type(src_ids) in PLAIN_IDS and type(dst_ids) in PLAIN_IDS
        if are_plain and src.has_addresses and dst.has_addresses:
            numbers = (bad_address, limit, gpu, chosen == "tma")
            copy_by_kernel(plan, src, dst, src_ids, dst_ids, *numbers)
            increment_version(dst.versioned)
            return
        if chosen == "tma":
            raise _not_compiled(chosen)
        tensors = (src.tensors, dst.tensors, plan.values, src_ids, dst_ids)
        _library.call(_library.copy_blocks, *tensors, bad_address, limit)
    elif chosen in LISTED:
        _execute_listed(chosen, src, dst, plan, src_ids, dst_ids, bad_address, limit, gpu)
    elif chosen == "triton":
        triton_kv = _library.triton_module("copy_blocks", "kv", src.device)
        if gpu >= 0 and max_sms is not None:
            raise InvalidArgument(f"engine triton: max_sms must be None, got {max_sms}")
        if src.device != dst.device:
            raise InvalidArgument(
                f"engine triton must be given both sides on one device, got {src.device} and "
                f"{dst.device}"
            )
        triton_kv.copy_blocks(src.tensors, dst.tensors, plan, src_ids, dst_ids, bad.words)
        if gpu < 0:
            bad.raise_if_any()
    else:
        reference.copy_blocks(src, dst, plan.selection, src_ids, dst_ids, bad)
    count_write(dst.versioned)


def _execute_listed(
    engine: str,
    src: KVView | Packed,
    dst: KVView | Packed,
    plan: BlockPlan,
    src_ids: torch.Tensor | None,
    dst_ids: torch.Tensor | None,
    bad_address: int,
    limit: int,
    gpu: int,
) -> None:
    _library.require_engine(engine, "cpu" if gpu < 0 else "cuda")
    if torch.compiler.is_compiling() or not (src.has_addresses and dst.has_addresses):
        raise _not_compiled(engine)
    if is_captured():
        raise InvalidArgument(f"engine {engine} must not be named while a CUDA graph is captured")
    if engine == "copy_engine":
        copy_listed(plan, src, dst, src_ids, dst_ids, COPY_ENGINE, gpu)
        return
    if src.device == dst.device:
        raise InvalidArgument(
            f"engine two_hop must be given one side in pinned host memory, got both on {src.device}"
        )
    to_host = dst.device.type == "cpu"
    sides = (plan, src, dst, src_ids, dst_ids)
    copy_in_two_hops(*sides, bad_address, limit, gpu, to_host=to_host)


def _not_compiled(engine: str) -> InvalidArgument:
    return InvalidArgument(f"engine {engine} must not be named in compiled code, got tracing")


def as_ids(
    name: str,
    ids: BlockIds,
    device: torch.device,
    engine: Engine = "auto",
    num_ids: int | None = None,
) -> torch.Tensor:
    """Return ids where the engine reads them: on the copy's device, or on the CPU.

    Of those that are moved to a device, which would report them late, each must be below
    ``num_ids``, if that is given.
    """
    if engine in LISTED:
        if isinstance(ids, torch.Tensor) and ids.device.type != "cpu":
            raise InvalidArgument(
                f"{name} must be on the CPU for engine {engine} (cpu() waits for the device), "
                f"got {ids.device}"
            )
        device = CPU
    if isinstance(ids, Tensor):
        tensor = ids
    else:
        is_listed = isinstance(ids, list | tuple) and not torch.compiler.is_compiling()
        if is_listed and bool in map(type, ids):  # torch would make an id of it
            raise InvalidArgument(f"{name} must be 1-d int32 or int64, got a bool in the list")
        try:
            tensor = torch.as_tensor(ids, dtype=None if len(ids) else torch.int64, device=CPU)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise InvalidArgument(
                f"{name} must be 1-d int32 or int64, got {type(ids).__name__}: {error}"
            ) from None
    is_list = tensor.dtype in ID_DTYPES and tensor.layout is torch.strided and tensor.dim() == 1
    if is_list and tensor.device == device:
        return tensor.contiguous()
    if not is_list or tensor.is_meta:
        raise InvalidArgument(
            f"{name} must be 1-d int32 or int64, got {tensor.dtype} of shape "
            f"{tuple(tensor.shape)}, {tensor.layout} on {tensor.device}"
        )
    if num_ids is not None and tensor.device.type == "cpu" and device.type != "cpu":
        _check_before_upload(name, tensor, num_ids)
    # Work queued later waits for a copy to the device; nothing waits for one to the host.
    return to_device(name, tensor, device)


def _check_before_upload(name: str, ids: torch.Tensor, num_ids: int) -> None:
    """Refuse bad ids on the host; a graph that is captured reads others than these."""
    if not torch.compiler.is_compiling() and have_addresses((ids,)) and not is_captured():
        check_ids(name, ids, num_ids)


def to_device(name: str, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a call's small tensor on the device of the copy, packed.

    A graph does not keep the contents of a host tensor, but reads its memory at each replay: the
    tensor must then be the caller's own and pinned.
    """
    is_read_again = device.type == "cuda" and not tensor.is_cuda and is_captured()
    if is_read_again and not (tensor.is_pinned() and tensor.is_contiguous()):
        raise InvalidArgument(
            f"{name} must be on {device} (or a packed tensor in pinned memory that stays) while a "
            f"CUDA graph is captured, got it on {tensor.device}"
        )
    return tensor.to(device, non_blocking=device.type == "cuda").contiguous()


def as_packed(
    name: str,
    tensor: torch.Tensor,
    num_blocks: int,
    view: KVView,
    blocks: PackedBlocks,
    device: torch.device,
) -> Packed:
    """Return packed blocks, as many as ids, as a side of a copy on that device."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgument(f"{name} must be a torch tensor, got {type(tensor).__name__}")
    check_plain(name, tensor)
    shape = (num_blocks, *blocks.sizes)
    if tensor.shape != shape:
        raise InvalidArgument(
            f"{name} must have shape {shape} (block {' '.join(blocks.axes)}), "
            f"got {tuple(tensor.shape)}"
        )
    if tensor.dtype != view.dtype:
        raise InvalidArgument(
            f"{name} must have the cache's dtype {view.dtype}, got {tensor.dtype}"
        )
    is_beside = tensor.device == device  # not across the bus
    if not is_beside:
        check_packed_device(name, tensor, device)
    if not tensor.is_contiguous():
        raise InvalidArgument(f"{name} must be packed, got strides {tensor.stride()}")
    if torch.compiler.is_compiling() or type(tensor) not in PLAIN:
        return Packed(tensor, None, blocks.axes)
    base = tensor.data_ptr()
    if base == 0 and tensor.numel() > 0:
        raise InvalidArgument(f"{name} must have memory, got a tensor whose storage was freed")
    address = base if is_beside else gpu_address(name, tensor, device)
    return Packed(tensor, address, blocks.axes)


def check_call(op: str, max_sms: int | None, engine: Engine) -> None:
    as_one_of(op, "engine", engine, ENGINES)
    check_max_sms(op, max_sms)


def check_engine(op: str, engine: Engine, device: torch.device) -> None:
    """Raise unless a named engine copies on that device."""
    if engine in ("host", "cuda", "tma", *LISTED):
        _library.require_engine(engine, device.type, op)
    elif engine == "triton" and not torch.compiler.is_compiling():
        _library.triton_module(op, "kv", device)


def check_max_sms(op: str, max_sms: int | None) -> None:
    is_int = isinstance(max_sms, numbers.Integral) and not isinstance(max_sms, bool)
    if max_sms is not None and not (is_int and 1 <= max_sms < 2**31):
        raise InvalidArgument(
            f"{op}: max_sms must be None or an integer from 1 to 2**31 - 1, got {shown(max_sms)}"
        )


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
    if bad.seen is not None and not is_compiling():
        bad.raise_if_any()
    if _choose(engine, plan.gpu) == "reference":
        reference.transform_blocks(src, dst, plan, src_ids, dst_ids, call, bad)
    else:
        ids = (src_ids, dst_ids, plan.scales, plan.cos_sin(call))
        arguments = (*ids, call.expected, call.actual, call.sums, bad.address, int(max_sms or 0))
        if _is_eager(src, dst, src_ids, dst_ids):
            table = plan.resolved(src.registered, dst.registered, plan.gpu)
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
    if bad.seen is not None and not is_compiling():
        bad.raise_if_any()
    if _choose(engine, plan.gpu) == "reference":
        reference.add_checksums(view, plan, ids, sums, bad)
    else:
        arguments = (plan.checksum_transform, ids, sums, bad.address, int(max_sms or 0))
        if _is_eager(view, view, ids):
            table = plan.checksum_plan.resolved(view.registered, view.registered, plan.gpu)
            _library.call(_library.checksum_resolved, table, *arguments)
        else:
            _call(_library.checksum_blocks, view.tensors, plan.checksum_plan.values, *arguments)


def _is_eager(src: KVView, dst: KVView, *ids: torch.Tensor) -> bool:
    are_plain = src.has_addresses and dst.has_addresses and have_addresses(ids)
    return are_plain and not torch.compiler.is_compiling()


def _call(operator: Callable[..., Any], *arguments: Any) -> None:
    if torch.compiler.is_compiling():
        operator(*arguments)
    else:
        _library.call(operator, *arguments)


def _choose(engine: Engine, gpu: int) -> str:
    device = "cpu" if gpu < 0 else "cuda"
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
