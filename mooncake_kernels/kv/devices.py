"""The two sides of a copy: on one device, or one on a GPU and the other in pinned host memory."""

from collections.abc import Sequence

import torch

from .. import _library
from ..bad_ids import BadIds
from ..errors import InvalidArgument
from .view import KVView


def device_of(src: torch.device, dst: torch.device) -> torch.device:
    """Return where a copy runs: on the GPU, if one side is there."""
    return src if src == dst or src.type == "cuda" else dst


def device_of_copy(src: KVView, dst: KVView) -> torch.device:
    """Return where a plan's copies run.

    Raises:
        InvalidArgument: the two devices do not match, or host memory is not pinned.
    """
    if src.device == dst.device:
        return src.device
    if not _go_together(src.device, dst.device):
        raise InvalidArgument(
            f"CopyPlan: dst must have src's device {src.device} (or one side be on a GPU and the "
            f"other in pinned host memory), got {dst.device}"
        )
    device = device_of(src.device, dst.device)
    name, host = ("src", src) if src.device.type == "cpu" else ("dst", dst)
    check_pinned(f"CopyPlan: {name}", host.tensors, device)
    return device


def check_pinned(name: str, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
    """Refuse host memory that the GPU cannot access. Fake tensors have no memory."""
    if torch.compiler.is_compiling():
        return
    for index, tensor in enumerate(tensors):
        if type(tensor) in (torch.Tensor, torch.nn.Parameter):
            gpu_address(name, tensor, device, index)


def gpu_address(name: str, tensor: torch.Tensor, device: torch.device, index: int = 0) -> int:
    """Return a host tensor's address for the GPU."""
    address = _library.call(_library.gpu_address, tensor)
    if address == 0 and tensor.numel() > 0:
        raise InvalidArgument(
            f"{name} must be on {device} or in pinned host memory (pin_memory()), got tensor "
            f"{index} in pageable memory"
        )
    return address


def check_packed_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Refuse packed blocks on a device that does not go with the copy's."""
    if not _go_together(tensor.device, device):
        raise InvalidArgument(
            f"{name} must have the cache's device {device} (or be in pinned host memory for a "
            f"cache on a GPU), got {tensor.device}"
        )


def bad_ids_on(view: KVView, device: torch.device) -> BadIds:
    """Return where a GPU's kernels report bad ids of a view in pinned memory."""
    if view.gpu_bad_ids is None or view.gpu_bad_ids[0] != device:
        check_pinned("gather_blocks, scatter_blocks: view", view.tensors, device)
        view.gpu_bad_ids = (device, view.bad_ids.on(device))
    return view.gpu_bad_ids[1]


def _go_together(one: torch.device, other: torch.device) -> bool:
    return {one.type, other.type} == {"cpu", "cuda"}
