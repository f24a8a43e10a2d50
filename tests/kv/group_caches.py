"""Caches of several groups, shaped as those of models and engines."""

from functools import partial

import torch

import mooncake_kernels as mk

from .layouts import addressed

BLOCKS = 6


def view(axes: str, num_layers: int, seed: int, dtype=torch.int16, **sizes: int) -> mk.KVView:
    shape = [{"kv": 2, "block": BLOCKS, **sizes}[axis] for axis in axes.split()]
    tensors = [addressed(tuple(shape), dtype, "cpu", seed + i) for i in range(num_layers)]
    return mk.KVView(tensors, axes)


def kimi_linear(heads: int, seed: int, tokens: int = 4) -> mk.CacheGroups:
    """MLA layers, whose latent every rank has; KDA layers: a convolution and a state a head."""
    mla = view("block token dim", 2, seed, token=tokens, dim=36)
    conv = view("block head dim", 3, seed + 10, head=heads, dim=6)
    state = view("block head dim", 3, seed + 20, torch.float32, head=heads, dim=16)
    return mk.CacheGroups(
        mk.CacheGroup("mla", mla),
        mk.CacheGroup("kda", [conv, state], "state", tokens_per_block=8),
    )


def qwen(heads: int, seed: int, tokens: int = 4) -> mk.CacheGroups:
    """Gated attention in NHD, gated DeltaNet states: Qwen3.5's."""
    full = view("kv block token head dim", 1, seed, token=tokens, head=heads, dim=8)
    state = view("block head dim", 3, seed + 20, torch.float32, head=heads, dim=16)
    return mk.CacheGroups(
        mk.CacheGroup("full", full),
        mk.CacheGroup("delta", state, "state", tokens_per_block=16),
    )


def gpt_oss(heads: int, seed: int, tokens: int = 4, order: str = "head token") -> mk.CacheGroups:
    """Layers of full attention and of a window, in HND unless told otherwise."""
    sizes = {"token": tokens, "head": heads, "dim": 8}
    full, window = (view(f"kv block {order} dim", 2, seed + i, **sizes) for i in (0, 20))
    return mk.CacheGroups(
        mk.CacheGroup("full", full), mk.CacheGroup("window", window, "window", window=9)
    )


def deepseek(heads: int, seed: int, tokens: int = 4) -> mk.CacheGroups:
    """MLA and the fp8 keys of DeepSeek-V3.2's indexer with their scales: all ranks have all."""
    mla = view("block token dim", 2, seed, token=tokens, dim=36)
    keys = view("block token dim", 2, seed + 10, torch.uint8, token=tokens, dim=132)
    return mk.CacheGroups(mk.CacheGroup("mla", [mla, keys]))


def whisper(heads: int, seed: int, tokens: int = 4) -> mk.CacheGroups:
    """A decoder's own keys and values, those of an encoder's output, and that output."""
    sizes = {"token": tokens, "head": heads, "dim": 8}
    return mk.CacheGroups(
        mk.CacheGroup("self", view("kv block token head dim", 2, seed, **sizes)),
        mk.CacheGroup("cross", view("kv block token head dim", 2, seed + 20, **sizes), "encoder"),
        mk.CacheGroup("output", view("block token dim", 1, seed + 40, token=2, dim=24), "encoder"),
    )


def nvfp4(heads: int, seed: int, dtype=torch.uint8) -> mk.CacheGroups:
    """Two 4-bit numbers a byte, and an fp8 scale for each 16 of them: tensors apart, in NHD."""

    def keys_and_values(dim: int, dtype: torch.dtype, seed: int) -> mk.KVView:
        shape = (BLOCKS, 4, heads, dim)
        tensors = [
            [addressed(shape, dtype, "cpu", seed + 7 * k + i) for i in range(2)] for k in range(2)
        ]
        return mk.KVView(tensors, "block token head dim")

    data, scales = (
        keys_and_values(64 // 2, dtype, seed),
        keys_and_values(64 // 16, torch.float8_e4m3fn, seed + 30),
    )
    return mk.CacheGroups(mk.CacheGroup("full", [data, scales]))


def nvfp4_pages(heads: int, seed: int) -> mk.CacheGroups:
    """The same in HND, in one page a block: packed keys, their scales, packed values, theirs."""
    tokens, sizes = 4, (64 // 2, 64 // 16)
    page_bytes = 2 * heads * tokens * sum(sizes)
    pages = [addressed((BLOCKS, page_bytes), torch.uint8, "cpu", seed + i) for i in range(2)]

    def part(page: torch.Tensor, kv: int, which: int) -> torch.Tensor:
        first = heads * tokens * (kv * sum(sizes) + which * sizes[0])
        last = first + heads * tokens * sizes[which]
        return page[:, first:last].unflatten(1, (heads, tokens, sizes[which]))

    data = [[part(page, kv, 0) for page in pages] for kv in range(2)]
    scales = [[part(page, kv, 1).view(torch.float8_e4m3fn) for page in pages] for kv in range(2)]
    views = [mk.KVView(tensors, "block head token dim") for tensors in (data, scales)]
    return mk.CacheGroups(mk.CacheGroup("full", views))


# name: (the sender's cache, the receiver's)
MODELS = {
    "kimi": (kimi_linear, kimi_linear),
    "qwen": (qwen, qwen),
    "gpt_oss": (gpt_oss, gpt_oss),
    "gpt_oss, NHD to HND": (partial(gpt_oss, order="token head"), gpt_oss),
    "deepseek": (deepseek, deepseek),
    "whisper": (whisper, whisper),
    "nvfp4, NHD to pages in HND": (nvfp4, nvfp4_pages),
    "nvfp4, pages in HND to NHD": (nvfp4_pages, nvfp4),
    "nvfp4, torch's dtype": (partial(nvfp4, dtype=torch.float4_e2m1fn_x2),) * 2,
}


def rank_of(whole: mk.CacheGroups, part: mk.CacheGroups, first_head: int) -> mk.CacheGroups:
    """Fill a rank's part of a cache that holds all heads, and return it."""
    for name, group in part.items():
        for mine, all_heads in zip(group.views, whole[name].views, strict=True):
            heads = slice(first_head, first_head + mine.num_heads) if mine.has_heads else None
            mk.CopyPlan(all_heads, mine, src_heads=heads).run(range(BLOCKS), range(BLOCKS))
    return part


def packed(groups, ids, **options):
    packer = mk.GroupsPacker(groups)
    counts = {name: len(of_group) for name, of_group in ids.items()}
    staging = torch.zeros(packer.header(counts).num_bytes, dtype=torch.uint8)
    return packer.pack(ids, staging, **options), staging
