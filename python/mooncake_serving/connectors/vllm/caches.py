"""A worker's caches of one group of layers, and host memory for some of their blocks."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import mooncake_kernels as mk
from mooncake_kernels.errors import Unavailable

AXES = {2: "block dim", 3: "block token dim", 4: "block head token dim"}


class GroupCaches:
    """The caches of a group's layers.

    A block's object is its bytes, layer by layer, in the order of their axes: it can be loaded by
    an engine with caches of the same layout.

    Args:
        layers: a tensor each, ``[num_blocks, ...]``, or several of a recurrent layer, as
            ``register_kv_caches`` has them. An attention backend with shorter blocks than the
            engine has several there for each of the engine's; layers that share a cache have the
            same tensor.
        num_blocks: of the engine.

    Attributes:
        block_bytes: of a block, all layers.
        device: of the layers.

    Raises:
        Unavailable: there are no caches, or their layout is unknown.
    """

    def __init__(self, layers: Sequence[torch.Tensor | Sequence[torch.Tensor]], num_blocks: int):
        tensors = [
            tensor
            for layer in layers
            for tensor in ([layer] if isinstance(layer, torch.Tensor) else map(state_rows, layer))
        ]
        if not tensors or any(
            layer.dim() not in AXES or layer.shape[0] == 0 or layer.shape[0] % num_blocks
            for layer in tensors
        ):
            shapes = sorted({str(tuple(layer.shape)) for layer in tensors})
            raise Unavailable(
                "StoreConnector: the engine must have caches [num_blocks, (head), (token), dim] "
                f"for its {num_blocks} blocks, got {', '.join(shapes) or 'none'}"
            )
        alike: dict[Any, list[torch.Tensor]] = {}
        for layer in {layer.data_ptr(): layer for layer in tensors}.values():
            for part in layer.view(torch.uint8).unflatten(0, (num_blocks, -1)).unbind(1):
                alike.setdefault((part.shape, part.stride()), []).append(part)
        self._parts = [*alike.values()]
        self._views = [mk.KVView(parts, AXES[parts[0].dim()]) for parts in self._parts]
        self.block_bytes = sum(view.block_bytes for view in self._views)
        self.device = tensors[0].device

    def staged(self, memory: torch.Tensor) -> "StagedBlocks":
        """Use host memory, ``[bytes]`` uint8 with room for a block at least, as staging."""
        rows = memory[: memory.numel() // self.block_bytes * self.block_bytes]
        rows = rows.view(-1, self.block_bytes)
        views, first = [], 0
        for parts in self._parts:
            shape = (len(parts), *parts[0].shape[1:])
            part = rows[:, first : first + math.prod(shape)].unflatten(1, shape)
            views.append(mk.KVView(part, AXES[parts[0].dim()].replace(" ", " layer ", 1)))
            first += math.prod(shape)
        return StagedBlocks(rows, mk.CopyPlan(self._views, views), mk.CopyPlan(views, self._views))


def state_rows(tensor: torch.Tensor) -> torch.Tensor:
    """A recurrent layer's state, whatever its axes: ``[num_blocks, numbers of a block]``."""
    flat = tensor.flatten(1)
    if flat.data_ptr() != tensor.data_ptr():
        raise Unavailable(
            "StoreConnector: a recurrent layer's state must be in one piece in each block, got "
            f"strides {tensor.stride()}"
        )
    return flat


class StagedBlocks:
    """Rows of host memory with a block each. For one thread at a time.

    Args:
        rows: ``[num_rows, bytes of a block]``.
        from_caches, to_caches: copy between them and the caches.

    Attributes:
        num_rows: blocks that there is room for.
    """

    def __init__(self, rows: torch.Tensor, from_caches: mk.CopyPlan, to_caches: mk.CopyPlan):
        self.num_rows, self._block_bytes = rows.shape
        self._rows, self._from_caches, self._to_caches = rows, from_caches, to_caches

    def places(self, num_blocks: int) -> tuple[np.ndarray, np.ndarray]:
        """Return addresses and sizes of the first rows: ``[n, 1]`` each."""
        first = np.uint64(self._rows.data_ptr())
        steps = np.arange(num_blocks, dtype=np.uint64) * np.uint64(self._block_bytes)
        return (first + steps)[:, None], np.full((num_blocks, 1), self._block_bytes, np.uint64)

    def fetch(self, ids: Sequence[int]) -> None:
        """Copy blocks of the caches into the first rows, on the current stream."""
        self._from_caches.run(ids, range(len(ids)))

    def deliver(self, ids: Sequence[int], came: Sequence[bool]) -> None:
        """Copy those of the first rows that came into blocks of the caches, likewise."""
        self._to_caches.run([row if ok else -1 for row, ok in enumerate(came)], ids)
