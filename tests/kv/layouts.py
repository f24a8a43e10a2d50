"""Paged layouts by name: the axes of one tensor, and the levels of lists around it."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

import mooncake_kernels as mk

PACKED_AXES = "layer kv head token dim"  # of a packed block, in the order of docs and checksums


@dataclass(frozen=True)
class Sizes:
    """The extents of a cache."""

    layer: int = 3
    kv: int = 2
    block: int = 7
    head: int = 2
    token: int = 4
    dim: int = 8


# name: (axes of one tensor, how many levels of lists are around it)
LAYOUTS = {
    # a tensor a layer: vLLM's and FlashInfer's NHD and HND, LMCache's NL_X_*
    "nhd_per_layer": ("kv block token head dim", 1),
    "hnd_per_layer": ("kv block head token dim", 1),
    "block_first_nhd_per_layer": ("block kv token head dim", 1),
    "block_first_hnd_per_layer": ("block kv head token dim", 1),
    # vLLM's canonical [L, B, H, N, C] orders, where C is k and v in one row
    "lbhnc": ("layer block head token kv dim", 0),
    "lbnhc": ("layer block token head kv dim", 0),
    "lhbnc": ("layer head block token kv dim", 0),
    "blhnc": ("block layer head token kv dim", 0),
    "blnhc": ("block layer token head kv dim", 0),
    "bhlnc": ("block head layer token kv dim", 0),
    # SGLang's: k and v apart, and its host pools
    "kv_apart": ("block token head dim", 2),
    "layer_first": ("kv layer block token head dim", 0),
    "page_first": ("kv block token layer head dim", 0),
    "page_first_direct": ("kv block layer token head dim", 0),
    "page_head": ("kv block head token layer dim", 0),
    # TensorRT-LLM's pool, LMCache's NB_NL_TWO_BS_NH_HS, Dynamo's universal block
    "block_first_hnd": ("block layer kv head token dim", 0),
    "block_first_nhd": ("block layer kv token head dim", 0),
    "universal": ("block head layer kv token dim", 0),
}
# Of one latent a token: no kv, and no head or one of them.
MLA_LAYOUTS = {
    "mla_per_layer": ("block token dim", 1),  # vLLM's, LMCache's NL_X_NB_BS_HS
    "mla_one_head_per_layer": ("block token head dim", 1),  # SGLang's pool of tokens
    "mla_layer_first": ("layer block token dim", 0),
    "mla_page_first": ("block token layer head dim", 0),
    "mla_page_first_direct": ("block layer token dim", 0),
    "mla_page_head": ("block head token layer dim", 0),
}


def addressed(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> torch.Tensor:
    """Bytes hashed from their own position: data fetched from the wrong place differs."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    position = torch.arange(num_bytes, device=device) + seed * 7919
    return (position * 2654435761 >> 13).to(torch.uint8).view(dtype).reshape(shape)


def sparse_blocks(path: Path, num_blocks: int, block_bytes: int) -> torch.Tensor:
    """Blocks of 4 rows in a sparse file: only touched pages take memory."""
    num_bytes = num_blocks * block_bytes
    path.touch()
    os.truncate(path, num_bytes)
    flat = torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
    return flat.view(num_blocks, 4, block_bytes // 4)


def make_view(
    name: str,
    sizes: Sizes,
    *,
    dtype: torch.dtype = torch.float16,
    device: str = "cpu",
    seed: int = 1,
    padding: int = 0,
    pinned: bool = False,
) -> mk.KVView:
    """Make a cache of position-hashed bytes in the layout; padding makes its rows strided."""
    axes, lists = (LAYOUTS | MLA_LAYOUTS)[name]
    shape = tuple(getattr(sizes, axis) for axis in axes.split())
    padded = (*shape[:-2], shape[-2] + padding, shape[-1])

    def tensor(index: int) -> torch.Tensor:
        whole = addressed(padded, dtype, device, seed + index)
        return (whole.pin_memory() if pinned else whole)[..., : shape[-2], :]

    if lists == 0:
        return mk.KVView(tensor(0), axes)
    if lists == 1:
        return mk.KVView([tensor(i) for i in range(sizes.layer)], axes)
    kv = [[tensor(k * sizes.layer + i) for i in range(sizes.layer)] for k in range(sizes.kv)]
    return mk.KVView(kv, axes)


def snapshot(view: mk.KVView) -> torch.Tensor:
    """The whole memory of a view as bytes, padding included, for a bitwise comparison."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in view.tensors}
    empty = torch.empty(0, dtype=torch.uint8, device=view.device)
    return torch.cat([empty.new_empty(0).set_(s) for s in storages.values()]).cpu().clone()
