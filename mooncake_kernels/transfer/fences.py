"""What a request may wait for: work of a GPU, as a torch event or stream, or CUDA's handle."""

from typing import Any

import numpy as np
import torch

from ..errors import InvalidArgument

After = torch.cuda.Event | torch.cuda.Stream | int | None
Fence = tuple[bool, int, int] | None  # whether it is a stream, its handle, its GPU (-1: any)


def as_fence(op: str, after: Any) -> Fence:
    """What the host code takes for ``after``."""
    if after is None:
        return None
    if isinstance(after, torch.cuda.Stream):
        return True, after.cuda_stream, after.device_index
    if isinstance(after, torch.cuda.Event):
        handle, device = after.cuda_event, after.device
        if not handle or device is None:
            raise InvalidArgument(f"{op}: after must be a recorded event, got one that is not")
        return False, handle, device.index
    is_integer = isinstance(after, int | np.integer) and not isinstance(after, bool)
    if is_integer and 0 < after < 1 << 64:
        return False, int(after), -1
    raise InvalidArgument(
        f"{op}: after must be a torch.cuda.Event, a torch.cuda.Stream or the handle of a CUevent, "
        f"got {after!r}"
    )
