"""The caches of a worker: whole blocks are saved to the store, and loaded from it."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import mooncake_kernels as mk
from mooncake_kernels.errors import Unavailable
from mooncake_serving.store import Store

from .tracking import Blocks

AXES = {2: "block dim", 3: "block token dim", 4: "block head token dim"}
STAGING_BYTES = 64 << 20


def use(store: Store, keys: Sequence[int]) -> None:
    """Count a use of blocks that will be loaded soon, so that LRU evicts others until then."""
    for key in reversed(keys):  # so that the tail is the least recently used
        if pinned := store.pin_key(store.keyspace.key(key)):
            pinned.close()


class Caches:
    """All layers' caches, and host memory for some blocks between them and the store.

    A block's object is its bytes, layer by layer, in the order of their axes: it can be loaded by
    an engine with caches of the same layout.

    Args:
        layers: a tensor each, ``[num_blocks, ...]``, as ``register_kv_caches`` has them. An
            attention backend with shorter blocks than the engine has several there for each of the
            engine's; layers that share a cache have the same tensor.
        num_blocks: of the engine.

    Attributes:
        block_bytes: of a block, all layers.

    Raises:
        Unavailable: there are no caches, or their layout is unknown.
    """

    def __init__(self, layers: Sequence[torch.Tensor], num_blocks: int):
        if not layers or any(
            layer.dim() not in AXES or layer.shape[0] == 0 or layer.shape[0] % num_blocks
            for layer in layers
        ):
            shapes = sorted({tuple(layer.shape) for layer in layers})
            raise Unavailable(
                "StoreConnector: the engine must have caches [num_blocks, (head), (token), dim] "
                f"for its {num_blocks} blocks, got {shapes}"
            )
        groups: dict[Any, list[torch.Tensor]] = {}
        for layer in {layer.data_ptr(): layer for layer in layers}.values():
            for part in layer.view(torch.uint8).unflatten(0, (num_blocks, -1)).unbind(1):
                groups.setdefault((part.shape, part.stride()), []).append(part)
        views = [mk.KVView(group, AXES[group[0].dim()]) for group in groups.values()]
        self.block_bytes = sum(view.block_bytes for view in views)
        self._device = layers[0].device
        num_slots = max(STAGING_BYTES // self.block_bytes, 1)
        self._staging = torch.empty(
            (num_slots, self.block_bytes),
            dtype=torch.uint8,
            pin_memory=self._device.type == "cuda",
        )
        staged = list(_cut(self._staging, list(groups.values())))
        self._to_staging = mk.CopyPlan(views, staged)
        self._from_staging = mk.CopyPlan(staged, views)

    def save(self, store: Store, blocks: Blocks) -> None:
        """Put those blocks that the store does not have.

        Raises:
            Unavailable: its pool is smaller than a block.
        """
        if (capacity := store.pool.capacity_bytes) < self.block_bytes:
            raise Unavailable(
                f"StoreConnector: the pool must hold a block's {self.block_bytes} bytes, got "
                f"{capacity}"
            )
        known = store.match_prefix(blocks.keys)
        for first in range(known, len(blocks.keys), len(self._staging)):
            part = slice(first, first + len(self._staging))
            keys, ids = blocks.keys[part], blocks.ids[part]
            self._to_staging.run(ids, range(len(ids)))
            self._wait()
            rows = list(self._staging[: len(ids)])
            store.put_each(keys, rows, position=blocks.position + first)
        store.order_prompt(blocks.keys)

    def load(self, store: Store, blocks: Blocks) -> set[int]:
        """Get the blocks; returns the ids of those that the store did not have, or only in part."""
        missing: set[int] = set()
        for first in range(0, len(blocks.keys), len(self._staging)):
            part = slice(first, first + len(self._staging))
            keys, ids = blocks.keys[part], blocks.ids[part]
            rows = list(self._staging[: len(ids)])
            came = (store.get_into_each(keys, rows) == self.block_bytes).tolist()
            self._from_staging.run([i if ok else -1 for i, ok in enumerate(came)], ids)
            self._wait()
            missing |= {block for block, ok in zip(ids, came, strict=True) if not ok}
        store.order_prompt(blocks.keys)
        return missing

    def _wait(self) -> None:
        """Wait for GPU copies: the staging memory is about to be read, or reused."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _cut(staging: torch.Tensor, groups: Sequence[Sequence[torch.Tensor]]) -> Iterator[mk.KVView]:
    """Return each group's part of the staging memory: ``[slot, layer, ...]``."""
    first = 0
    for group in groups:
        shape = (len(group), *group[0].shape[1:])
        part = staging[:, first : first + math.prod(shape)]
        yield mk.KVView(part.unflatten(1, shape), AXES[group[0].dim()].replace(" ", " layer ", 1))
        first += math.prod(shape)
