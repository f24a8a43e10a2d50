"""The paged KV cache: blocks of tokens in any layout of its axes."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from mooncake_kernels.errors import InvalidArgument

from ..arguments import refuse
from .arguments import as_device, as_positive, check_text
from .config import ModelConfig

if TYPE_CHECKING:
    from mooncake_kernels import KVView

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
AXES = ("layer", "kv", "block", "token", "head", "dim")


class PagedKVCache:
    """Hold keys and values of all layers in fixed-size blocks, zero at first.

    The layout is a list of axis names, outermost first; ``dim`` is last. With a ``layer`` axis the
    cache is one tensor, without it one tensor per layer::

        "kv block token head dim"          vLLM's and SGLang's order, a tensor a layer
        "layer kv block token head dim"    the same in one tensor
        "block layer kv head token dim"    all layers of a block side by side: one send a block

    Args:
        config: gives layers, KV heads and head size.
        num_blocks: how many blocks each layer has.
        block_size: tokens in a block.
        axes: the layout.
        dtype: of the elements: float32, bfloat16 or float16, as a model's.
        device: where the tensors go.
        buffer: 1-d uint8 on ``device``, at least ``num_bytes``; the cache is built inside it, for
            memory that is shared, pinned or registered already. None: the cache allocates.

    Raises:
        InvalidArgument: an argument is not as above; the message names it.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        *,
        block_size: int = 16,
        axes: str = "kv block token head dim",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        buffer: torch.Tensor | None = None,
    ) -> None:
        if not isinstance(config, ModelConfig):
            refuse("PagedKVCache", "config", "a ModelConfig", config)
        num_blocks = as_positive("PagedKVCache", "num_blocks", num_blocks)
        block_size = as_positive("PagedKVCache", "block_size", block_size)
        if dtype not in DTYPES:
            refuse("PagedKVCache", "dtype", "float32, bfloat16 or float16", dtype)
        device = as_device("PagedKVCache", device)
        names = _parse_axes(axes)
        sizes = (config.num_layers, 2, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        size_of = dict(zip(AXES, sizes, strict=True))
        storage = _storage(math.prod(sizes), dtype, device, buffer)
        per_layer = "layer" not in names
        whole_names = ("layer", *names) if per_layer else names
        whole = storage.view([size_of[name] for name in whole_names])

        self.axes, self.num_blocks, self.block_size = " ".join(names), num_blocks, block_size
        self.tensors: torch.Tensor | list[torch.Tensor] = list(whole) if per_layer else whole
        self.num_layers, self.dtype, self.device = config.num_layers, whole.dtype, whole.device
        self.num_bytes = whole.nbytes
        canonical = whole.permute([whole_names.index(name) for name in AXES])
        self._layers = [(layer[0], layer[1]) for layer in canonical]

    def layer(self, layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one layer's keys and values, strided ``[block, token, head, dim]`` views."""
        return self._layers[layer_index]

    def num_blocks_for(self, num_tokens: int) -> int:
        """Count the blocks that ``num_tokens`` tokens of one request fill or begin."""
        return -(-num_tokens // self.block_size)

    def view(self, layers: range | None = None) -> "KVView":
        """Describe this memory to ``mooncake_kernels``, which copies between layouts.

        Args:
            layers: those to describe, without gaps; None: all.
        """
        import mooncake_kernels as mk

        tensors = self.tensors
        if layers is None:
            pass
        elif isinstance(tensors, list):
            tensors = tensors[layers.start : layers.stop]
        else:
            tensors = tensors.narrow(self.axes.split().index("layer"), layers.start, len(layers))
        return mk.KVView(tensors, axes=self.axes)


def _parse_axes(axes: str) -> Sequence[str]:
    check_text("PagedKVCache", "axes", axes)
    names = axes.split()
    if sorted({*names, "layer"}) != sorted(AXES) or len(set(names)) < len(names):
        raise InvalidArgument(
            "PagedKVCache: axes must name kv, block, token, head and dim once each, "
            f"and layer at most once, got {axes!r}"
        )
    if names[-1] != "dim":
        raise InvalidArgument(f"PagedKVCache: axes must end with dim, got {axes!r}")
    return tuple(names)


def _storage(
    num_elements: int,
    dtype: torch.dtype,
    device: torch.device,
    buffer: torch.Tensor | None,
) -> torch.Tensor:
    if not isinstance(buffer, torch.Tensor | None):
        refuse("PagedKVCache", "buffer", "a 1-d uint8 tensor or None", buffer)
    if buffer is None:
        return torch.zeros(num_elements, dtype=dtype, device=device)
    num_bytes = num_elements * dtype.itemsize
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or buffer.device.type != device.type:
        raise InvalidArgument(
            f"PagedKVCache: buffer must be 1-d uint8 on {device}, "
            f"got {buffer.dim()}-d {buffer.dtype} on {buffer.device}"
        )
    if buffer.numel() < num_bytes:
        raise InvalidArgument(
            f"PagedKVCache: buffer must have at least {num_bytes} bytes, got {buffer.numel()}"
        )
    if buffer.data_ptr() % dtype.itemsize or buffer.storage_offset() % dtype.itemsize:
        raise InvalidArgument(
            f"PagedKVCache: buffer must start at a multiple of {dtype.itemsize} bytes, "
            f"got {buffer.data_ptr():#x}"
        )
    return buffer[:num_bytes].view(dtype).zero_()
