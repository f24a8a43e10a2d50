"""Tensors that are more than their bytes, for operators that read and write memory as it is."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad

from .errors import InvalidArgument

P = ParamSpec("P")
R = TypeVar("R")
PLAIN = (torch.Tensor, torch.nn.Parameter)


def refuse_gradients(op: str, **tensors: torch.Tensor | None) -> None:
    """Refuse tensors that are differentiated by: without a derivative they count as constant."""
    records = torch.is_grad_enabled()
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if records and tensor.requires_grad:
            raise InvalidArgument(
                f"{op}: {name} must not require grad, for there is no backward: call detach(), or "
                "use torch.no_grad()"
            )
        if _has_tangent(tensor):
            raise InvalidArgument(
                f"{op}: {name} must not have a tangent, for there is no forward derivative: call "
                "detach()"
            )


def check_plain(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that is more than its bytes: copying is wrong, or wrong for autograd."""
    check_stored(name, tensor)
    if tensor.requires_grad:
        raise InvalidArgument(f"{name} must not require grad: pass what its detach() returns")
    if forward_ad._current_level >= 0 and _has_tangent(tensor):
        raise InvalidArgument(f"{name} must not have a tangent: pass what its detach() returns")


def check_stored(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose elements are not those in its memory."""
    if tensor.layout != torch.strided:
        raise InvalidArgument(f"{name} must be strided, got {tensor.layout}")
    if torch.compiler.is_compiling():  # cannot trace the rest
        return
    if tensor.is_nested:
        what, cure = "be nested", "to_padded_tensor()"
    elif tensor.is_quantized:
        what, cure = "be quantized", "int_repr()"
    elif tensor.is_conj():
        what, cure = "be conjugated lazily", "resolve_conj()"
    elif tensor.is_neg():
        what, cure = "be negated lazily", "resolve_neg()"
    else:
        return
    raise InvalidArgument(f"{name} must not {what}: pass what its {cure} returns")


def check_device(op: str, name: str, tensor: torch.Tensor) -> None:
    """Refuse a device that no engine is for."""
    if tensor.device.type not in ("cpu", "cuda"):
        raise InvalidArgument(f"{op}: {name} must be on cpu or cuda, got {tensor.device}")


def have_addresses(tensors: Sequence[torch.Tensor | None]) -> bool:
    """Tell whether they are plain tensors: a fake one has no memory."""
    for tensor in tensors:  # noqa: SIM110 - a generator takes a microsecond
        if tensor is not None and type(tensor) not in PLAIN:
            return False
    return True


def shared_step(
    strides: Sequence[int], sizes: Sequence[int], axes: Sequence[str], row: int
) -> str | None:
    """Tell where elements share memory: each axis must step over all of those inside it.

    Args:
        strides: of the axes outside the rows, in any order.
        sizes: of the same.
        axes: their names.
        row: elements of one row, which is packed.

    Returns:
        The first step that is too short, for the text of an error; None if there is none.
    """
    extent, inner = row, "dim"
    steps = zip(strides, sizes, axes, strict=True)
    for stride, size, axis in sorted(step for step in steps if step[1] > 1):
        if stride < extent:
            return f"stride {stride} along {axis!r}, over {extent} elements along {inner!r}"
        extent, inner = extent + (size - 1) * stride, axis
    return None


def rows_meet(
    sizes: Sequence[int], steps: Sequence[int], row_bytes: tuple[int, int], distance: int
) -> bool:
    """Tell whether two arrays of the same sizes and steps share a byte; they may alternate.

    Of each axis, only the two steps around the rest of the distance can lead from a row of one to a
    row of the other, because none is too short (``shared_step``).

    Args:
        sizes: of the axes outside the rows, in any order.
        steps: of the same, in bytes.
        row_bytes: of a row of the first array, and of the second one.
        distance: of their beginnings, in bytes.
    """
    distances = {distance}
    for step, size in sorted(zip(steps, sizes, strict=True), reverse=True):
        if size > 1:
            distances = {
                distance - count * step
                for distance in distances
                for count in (distance // step, distance // step + 1)
                if -size < count < size
            }
    first, second = row_bytes
    return any(-second < distance < first for distance in distances)


def is_captured() -> bool:
    """Tell whether work on the current stream goes into a CUDA graph."""
    if torch.compiler.is_compiling() or not torch.cuda.is_initialized():
        return False
    return torch.cuda.is_current_stream_capturing()


def not_traced(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that compiled code must call as it is, between two graphs."""

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        if torch.compiler.is_compiling():  # not before: disable() imports the compiler
            return torch.compiler.disable(function)(*args, **options)
        return function(*args, **options)

    return call


def staged(what: str, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a host tensor where it can be copied to a device with ``non_blocking``: pinned.

    For a copy from pageable memory torch waits until the stream has come to its end. The pinned
    memory is torch's, which does not reuse it before the copy; but a graph would read it at each
    replay, so none may be captured.
    """
    if device.type == "cpu" or torch.compiler.is_compiling() or not have_addresses((tensor,)):
        return tensor
    if is_captured():
        raise InvalidArgument(f"{what} must be on {device} before a CUDA graph is captured")
    return tensor.pin_memory()


def upload(what: str, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a host tensor on a device, in the order of its current stream, without waiting."""
    return staged(what, tensor, device).to(device, non_blocking=True)


def versioned(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return those whose writes autograd counts; compiled code handles that itself."""
    if torch.compiler.is_compiling():  # cannot trace the question
        return tensors
    return [tensor for tensor in tensors if not tensor.is_inference()]


def count_write(tensors: list[torch.Tensor]) -> None:
    """Tell autograd, from what ``versioned`` returned, that what it saved of them is stale."""
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(tensors)


def _has_tangent(tensor: torch.Tensor) -> bool:
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:  # asking takes 1 us
        return False
    return forward_ad.unpack_dual(tensor).tangent is not None
