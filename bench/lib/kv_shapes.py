"""The caches that engines move, and the jobs that are measured on them."""

import math
from dataclasses import dataclass

import torch

SPARE = 2  # a pool has this many times the blocks that are copied
ROW = 16  # consecutive ids, in the pattern of that name


@dataclass(frozen=True)
class Shape:
    """A cache with one tensor a layer: ``[kv, block, *inner]``, or ``[block, *inner]``.

    Attributes:
        name: short, for a row.
        source: the model and the engine that use it.
        num_layers: of the model.
        num_kv: 2 for keys and values apart, 1 for one latent or both packed.
        inner: sizes of a block's axes, by name and in order.
        dtype: of an element.
        by_slot: ids name tokens, not blocks.
    """

    name: str
    source: str
    num_layers: int
    num_kv: int
    inner: dict[str, int]
    dtype: torch.dtype = torch.bfloat16
    by_slot: bool = False

    @property
    def axes(self) -> str:
        return " ".join(["kv"] * (self.num_kv == 2) + ["block", *self.inner])

    @property
    def block_size(self) -> int:
        return self.inner.get("token", 1)

    @property
    def ids_per_block(self) -> int:
        return self.block_size if self.by_slot else 1

    @property
    def run_bytes(self) -> int:
        """Bytes of one layer's keys or values under one id: what is contiguous."""
        return math.prod(self.inner.values()) * self.dtype.itemsize // self.ids_per_block


def nhd(heads: int) -> dict[str, int]:
    return {"token": 16, "head": heads, "dim": 128}


SHAPES = [
    Shape("llama-8b", "Llama 3.1 8B, vLLM's NHD", 32, 2, nhd(8)),
    Shape("llama-70b-tp4", "Llama 3.1 70B on 4 GPUs, vLLM's NHD", 80, 2, nhd(2)),
    Shape("llama-70b-tp8", "Llama 3.1 70B on 8 GPUs, vLLM's NHD", 80, 2, nhd(1)),
    Shape("packed-kv", "Llama 3.1 8B, vLLM since 0.26: keys next to values", 32, 1,
          {"head": 8, "token": 16, "dim": 256}),
    Shape("mla-bf16", "DeepSeek V3, vLLM's FlashMLA", 61, 1, {"token": 64, "dim": 576}),
    Shape("mla-bf16-rows", "DeepSeek V3, SGLang's pool of tokens", 61, 1,
          {"token": 64, "dim": 576}, by_slot=True),
    Shape("mla-fp8", "DeepSeek V3.2, vLLM's FlashMLA: 512 + 16 + 128 bytes", 61, 1,
          {"token": 64, "dim": 656}, torch.uint8),
    Shape("mla-fp8-rows", "DeepSeek V3.2, SGLang's pool of tokens", 61, 1,
          {"token": 64, "dim": 656}, torch.uint8, by_slot=True),
    Shape("hybrid-page", "attention next to Mamba, vLLM's pages of 1 MiB", 12, 1,
          {"dim": 1 << 20}, torch.uint8),
]  # fmt: skip
NUM_RUNS = [16, 256, 4096, 16_384, 100_000]
PATTERNS = ["random", "rows of 16"]


@dataclass(frozen=True)
class Job:
    """About ``num_runs`` runs of a shape in one call: of few layers if there are few runs.

    Ids are in random order on either side; in the pattern "rows of 16", rows of neighbours are.
    """

    shape: Shape
    wanted_runs: int
    pattern: str = "random"

    @property
    def num_layers(self) -> int:
        layers = self.wanted_runs // (ROW * self.shape.num_kv)
        return min(max(layers, 1), self.shape.num_layers)

    @property
    def num_ids(self) -> int:
        return max(self.wanted_runs // (self.num_layers * self.shape.num_kv), 1)

    @property
    def num_runs(self) -> int:
        return self.num_layers * self.shape.num_kv * self.num_ids

    @property
    def num_bytes(self) -> int:
        return self.num_runs * self.shape.run_bytes

    @property
    def pool_ids(self) -> int:
        step = math.lcm(self.shape.ids_per_block, ROW)
        return -(-SPARE * self.num_ids // step) * step

    @property
    def pool_bytes(self) -> int:
        return self.pool_ids * self.shape.run_bytes * self.num_layers * self.shape.num_kv

    @property
    def name(self) -> str:
        size = self.shape.run_bytes
        unit = f"{size >> 10} KiB" if size % 1024 == 0 else f"{size} bytes"
        return f"{self.shape.name}: {self.num_runs} x {unit}, {self.pattern}"

    def ids(self) -> torch.Tensor:
        """Draw the ids of one side."""
        if self.pattern == "random":
            return torch.randperm(self.pool_ids)[: self.num_ids]
        rows = torch.randperm(self.pool_ids // ROW)[:, None] * ROW + torch.arange(ROW)
        return rows.flatten()[: self.num_ids].clone()

    def tensors(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Cut the pool's tensors, one a layer, out of bytes."""
        shape = self.shape
        sizes = (self.pool_ids // shape.ids_per_block, *shape.inner.values())
        sizes = (self.num_layers, *[2] * (shape.num_kv == 2), *sizes)
        return list(memory[: self.pool_bytes].view(shape.dtype).view(sizes))

    def planes(self, tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        """Return the keys and the values of each layer as ``[id, element]``."""
        apart = [tensor.unbind() if self.shape.num_kv == 2 else [tensor] for tensor in tensors]
        return [pool.view(self.pool_ids, -1).view(dtype) for pools in apart for pool in pools]
