"""Run a copy: check the arguments and call the chosen engine."""

import numbers
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch

from .. import _library
from .._arguments import as_one_of
from .._tensors import check_plain, count_write, have_addresses, is_captured
from ..bad_ids import BadIds, check_ids
from ..errors import InvalidArgument, Unavailable, shown
from ..reference import kv as reference
from .calibration import default_engine
from .devices import check_packed_device, device_of, gpu_index, packed_address
from .execute_listed import COPY_ENGINE, copy_by_kernel, copy_listed
from .row_plan import RowCall, RowPlan
from .two_hop import copy_in_two_hops
from .view import BlockPlan, KVView

if TYPE_CHECKING:
    from .row_plan import RowPlan


Engine = Literal["auto", "host", "cuda", "tma", "copy_engine", "two_hop", "triton", "reference"]
ENGINES: tuple[str, ...] = get_args(Engine)
LISTED = ("copy_engine", "two_hop")  # the host lists their runs, from ids on the CPU
BlockIds = torch.Tensor | np.ndarray | Sequence[int]
ID_DTYPES = (torch.int32, torch.int64)


class Packed:
    """Packed blocks: the side of a copy that has no ids.

    Args:
        tensor: the blocks.
        address: their address for the copying GPU, if they are in host memory.
    """

    def __init__(self, tensor: torch.Tensor, address: int | None = None):
        self.tensors = self.versioned = [tensor]
        self.registered: list[torch.Tensor] = []  # the tensor differs at each call
        self.num_blocks = tensor.shape[0]
        self.device = tensor.device
        self._address = address

    @property
    def base(self) -> int:
        return self.tensors[0].data_ptr() if self._address is None else self._address

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
    place = src.device if src.device == dst.device else device_of(src.device, dst.device)
    device = place.type
    arguments = (src.tensors, dst.tensors, plan.values, src_ids, dst_ids)
    if torch.compiler.is_compiling() and engine in ("auto", "host", "cuda"):
        if engine != "auto":
            _library.require_engine(engine, device)
        _library.copy_blocks(*arguments, bad.address, int(max_sms or 0))
        return
    if engine == "tma" and torch.compiler.is_compiling():
        raise _not_compiled(engine)
    chosen = default_engine(device) if engine == "auto" else engine
    bad.raise_if_any()
    if chosen in ("host", "cuda", "tma"):
        if engine != "auto":
            _library.require_engine(chosen, device)
        if have_addresses((src.tensors[0], dst.tensors[0], src_ids, dst_ids)):
            numbers = (bad.address, int(max_sms or 0), gpu_index(place))
            copy_by_kernel(plan, src, dst, src_ids, dst_ids, *numbers, bulk=chosen == "tma")
        elif chosen == "tma":
            raise _not_compiled(chosen)
        else:
            _library.call(_library.copy_blocks, *arguments, bad.address, int(max_sms or 0))
    elif chosen in LISTED:
        _execute_listed(chosen, src, dst, plan, src_ids, dst_ids, bad, max_sms)
    elif chosen == "triton":
        triton_kv = _library.triton_module("copy_blocks", "kv", src.device)
        if device != "cpu" and max_sms is not None:
            raise InvalidArgument(f"engine triton: max_sms must be None, got {max_sms}")
        if src.device != dst.device:
            raise InvalidArgument(
                f"engine triton must be given both sides on one device, got {src.device} and "
                f"{dst.device}"
            )
        triton_kv.copy_blocks(src.tensors, dst.tensors, plan, src_ids, dst_ids, bad.words)
        if device == "cpu":
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
    bad: BadIds,
    max_sms: int | None,
) -> None:
    place = device_of(src.device, dst.device)
    _library.require_engine(engine, place.type)
    if torch.compiler.is_compiling() or not have_addresses((src.tensors[0], dst.tensors[0])):
        raise _not_compiled(engine)
    if is_captured():
        raise InvalidArgument(f"engine {engine} must not be named while a CUDA graph is captured")
    gpu = gpu_index(place)
    if engine == "copy_engine":
        copy_listed(plan, src, dst, src_ids, dst_ids, COPY_ENGINE, gpu)
        return
    if src.device == dst.device:
        raise InvalidArgument(
            f"engine two_hop must be given one side in pinned host memory, got both on {place}"
        )
    numbers = (bad.address, int(max_sms or 0), gpu)
    to_host = dst.device.type == "cpu"
    copy_in_two_hops(plan, src, dst, src_ids, dst_ids, *numbers, to_host=to_host)


def _not_compiled(engine: str) -> InvalidArgument:
    return InvalidArgument(f"engine {engine} must not be named in compiled code, got tracing")


def check_memory(src: KVView, dst: KVView, plan: "BlockPlan | RowPlan") -> None:
    """Refuse caches whose memory was freed; for several, before the first one is written to."""
    if not torch.compiler.is_compiling() and have_addresses((src.tensors[0], dst.tensors[0])):
        gpu = gpu_index(device_of(src.device, dst.device))
        plan.resolved(src.registered, dst.registered, gpu)


def as_ids(
    name: str,
    ids: BlockIds,
    device: torch.device,
    engine: Engine = "auto",
    *,
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
        device = torch.device("cpu")
    if isinstance(ids, torch.Tensor) and ids.device == device and _are_ids(ids):
        return ids
    if isinstance(ids, torch.Tensor):
        tensor = ids
    else:
        _refuse_bools(name, ids)
        try:
            tensor = torch.as_tensor(ids, dtype=None if len(ids) else torch.int64, device="cpu")
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise InvalidArgument(
                f"{name} must be 1-d int32 or int64, got {type(ids).__name__}: {error}"
            ) from None
    if not _are_ids(tensor, packed=False):
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


def _refuse_bools(name: str, ids: BlockIds) -> None:
    """Refuse a bool among integers, of which torch would make an id."""
    if (
        isinstance(ids, list | tuple)
        and not torch.compiler.is_compiling()
        and bool in map(type, ids)
    ):
        raise InvalidArgument(f"{name} must be 1-d int32 or int64, got a bool in the list")


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


def _are_ids(tensor: torch.Tensor, *, packed: bool = True) -> bool:
    is_list = tensor.dtype in ID_DTYPES and tensor.layout is torch.strided and tensor.dim() == 1
    return is_list and not tensor.is_meta and (not packed or tensor.is_contiguous())


def as_packed(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    view: KVView,
    device: torch.device,
) -> Packed:
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgument(f"{name} must be a torch tensor, got {type(tensor).__name__}")
    check_plain(name, tensor)
    if tensor.shape != shape:
        raise InvalidArgument(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
    if tensor.dtype != view.dtype:
        raise InvalidArgument(
            f"{name} must have the cache's dtype {view.dtype}, got {tensor.dtype}"
        )
    is_beside = tensor.device == device  # not across the bus
    if not is_beside:
        check_packed_device(name, tensor, device)
    if not tensor.is_contiguous():
        raise InvalidArgument(f"{name} must be packed, got strides {tensor.stride()}")
    has_address = not torch.compiler.is_compiling() and have_addresses([tensor])
    if has_address and tensor.numel() > 0 and tensor.data_ptr() == 0:
        raise InvalidArgument(f"{name} must have memory, got a tensor whose storage was freed")
    return Packed(tensor, None if is_beside else packed_address(name, tensor, device))


def check_view(op: str, view: KVView) -> None:
    if not isinstance(view, KVView):
        raise InvalidArgument(f"{op}: view must be a KVView, got {type(view).__name__}")


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


def check_writable(name: str, view: KVView) -> None:
    shared = view.shared_step or view.shared_tensors()
    if shared is not None:
        raise InvalidArgument(f"{name} must have memory for each of its elements, got {shared}")


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
