"""paged_attention in Triton: splitting a call into programs, without reading its data."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ..attention.paged import MOST_KEYS
from ..bad_ids import BadIds
from ..errors import InvalidArgument
from ..transforms import FP8
from . import INTERPRETED, check_grid
from .attention_kernel import paged_attention_kernel
from .attention_merge import merge_attention

# The interpreter cannot multiply bfloat16.
DOT_TYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.float32 if INTERPRETED else tl.bfloat16,
}
MIN_SPLIT_KEYS = 512
SHARED_BYTES = 227 << 10  # available to a program on sm_90 and sm_100
BARRIER_BYTES = 2048  # and other small things
_bad_entries: dict[torch.device, BadIds] = {}


@dataclass(frozen=True)
class Shape:
    """The split of a call into programs.

    Attributes:
        constants: of the kernel.
        num_warps, num_stages: Triton's.
    """

    constants: dict[str, Any]
    num_warps: int
    num_stages: int

    @classmethod
    def of(
        cls, num_queries: float, group: int, dims: tuple[int, int], block_size: int,
        types: tuple[torch.dtype, torch.dtype, torch.dtype],
    ) -> "Shape":  # fmt: skip
        """Choose for requests of about ``num_queries`` queries. Not yet measured on a GPU.

        A group of more heads than a program has rows is split into equal parts.

        Args:
            num_queries: per request.
            group: query heads that share a KV head.
            dims: of keys, and of values.
            block_size: of the cache.
            types: of queries, keys and values.

        Raises:
            InvalidArgument: not even the smallest program fits.
        """
        k_dim, v_dim = dims
        widest = max(dims)
        main = max(16, 1 << (k_dim.bit_length() - 1))
        rest = max(16, triton.next_power_of_2(k_dim - main)) if k_dim > main else 0
        v_padded = max(16, triton.next_power_of_2(v_dim))
        # The sums of 64 rows and 512 dims, or 128 and 128, fill sm_100's tensor memory.
        most = 128 if widest <= 128 else 64 if v_padded <= 512 else 32
        wanted = triton.next_power_of_2(int(max(1.0, num_queries) * group))
        rows, tile = _fitting(
            min(most, max(16, wanted)), 64 if widest <= 128 else 32, (main + rest, v_padded), types
        )
        heads = triton.cdiv(group, triton.cdiv(group, rows))
        constants = {
            "GROUP": group, "HEADS": heads, "ROWS": rows, "TILE": tile, "BLOCK_SIZE": block_size,
            "K_DIM": k_dim, "MAIN": main, "REST": rest, "V_DIM": v_dim, "V_PADDED": v_padded,
        }  # fmt: skip
        return cls(constants, 8 if rows >= 128 or widest > 256 else 4, 2)

    @property
    def num_parts(self) -> int:
        """Return the number of programs that share a group."""
        return triton.cdiv(self.constants["GROUP"], self.constants["HEADS"])

    @property
    def num_queries(self) -> int:
        """Return the number of queries of a program."""
        return self.constants["ROWS"] // self.constants["HEADS"]


def _fitting(
    rows: int, tile: int, padded: tuple[int, int], types: tuple[torch.dtype, ...]
) -> tuple[int, int]:
    """Return the rows and keys that fit into shared memory."""
    while _shared_bytes(rows, tile, padded, types) > SHARED_BYTES:
        if (rows, tile) == (16, 16):
            raise InvalidArgument(
                "paged_attention: k_cache and v_cache must have dims of which 16 keys fit into a "
                f"GPU's shared memory, for engine triton, got {padded[0]} and {padded[1]} (padded)"
            )
        if rows > 32 or tile == 16:
            rows //= 2
        else:
            tile //= 2
    return rows, tile


def _shared_bytes(
    rows: int, tile: int, padded: tuple[int, int], types: tuple[torch.dtype, ...]
) -> int:
    """Return an upper bound of Triton's (3.9) use: queries, weights, keys and values.

    Keys and values are stored twice for tensor cores that read shared memory (64 rows, 16 bits),
    for the next tile; and once more where they are converted.
    """
    dot = dot_type(types)
    num_copies = 2 if rows >= 64 and dot.itemsize == 2 else 1
    used = rows * (padded[0] + tile) * dot.itemsize + BARRIER_BYTES
    for dim, cache in zip(padded, types[1:], strict=True):
        used += tile * dim * (num_copies * cache.itemsize + (cache != dot) * dot.itemsize)
    return used


def dot_type(types: tuple[torch.dtype, ...]) -> torch.dtype:
    """Return the type in which queries, keys and values are multiplied: one that holds them all.

    Neither of float16 and bfloat16 holds the other; either holds fp8.
    """
    floats = {each for each in types if each not in FP8}
    return floats.pop() if len(floats) == 1 else torch.float32


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    intervals: torch.Tensor,
    tail_bits: torch.Tensor,
    tail_base: torch.Tensor,
    cu_q: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel; arguments as for ``torch.ops.mooncake_kernels.paged_attention``.

    Raises:
        InvalidArgument: an earlier call on the device met a block that is not in its cache.
    """
    num_q, num_heads, k_dim = q.shape
    num_blocks, block_size, num_kv_heads, v_dim = v_cache.shape
    num_requests, max_blocks = block_table.shape
    out = q.new_empty(num_q, num_heads, v_dim)
    lse = q.new_empty(num_q, num_heads, dtype=torch.float32)
    if num_q == 0:
        return out, lse
    bad = _take_bad(q.device)
    group = num_heads // num_kv_heads
    types = (q.dtype, k_cache.dtype, v_cache.dtype)
    shape = Shape.of(num_q / num_requests, group, (k_dim, v_dim), block_size, types)
    tile = shape.constants["TILE"]
    num_tiles = num_q // shape.num_queries + num_requests
    num_groups = num_kv_heads * shape.num_parts
    max_keys = min(max_blocks * block_size, MOST_KEYS)  # a table may be wider than any request
    num_splits = _num_splits(num_tiles * num_groups, max_keys, q.device)
    split_keys = triton.cdiv(triton.cdiv(max_keys, num_splits), tile) * tile
    grid = (num_tiles, num_groups, num_splits)
    check_grid("paged_attention: q", "queries and heads", grid)
    outs, lses = out[None], lse[None]
    if num_splits > 1:
        outs = q.new_empty(num_splits, *out.shape, dtype=torch.float32)
        lses = lse.new_empty(num_splits, *lse.shape)
    with torch.cuda.device_of(q):  # Triton launches on the current device
        paged_attention_kernel[grid](
            *(q, k_cache, v_cache, outs, lses, block_table),
            *(intervals, tail_bits, tail_base, cu_q, kv_lens),
            *(lse if scales is None else scales for scales in (k_scale, v_scale)),
            *(bad.words, scale, num_q, num_requests, num_blocks, max_blocks, split_keys),
            *(*q.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3]),
            HAS_K_SCALES=k_scale is not None,
            HAS_V_SCALES=v_scale is not None,
            DOT_TYPE=DOT_TYPES[dot_type(types)],
            **shape.constants,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )
    if num_splits > 1:
        merged, lse = merge_attention(outs, lses, False)
        out.copy_(merged)
    if q.device.type == "cpu":
        _raise_if_any(bad, is_earlier=False)
    return out, lse


def _num_splits(num_programs: int, max_keys: int, device: torch.device) -> int:
    """As many as fill the GPU twice, but none of them short."""
    num_sms = 8
    if device.type == "cuda":
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = triton.cdiv(2 * num_sms, num_programs)
    return max(1, min(wanted, max_keys // MIN_SPLIT_KEYS))


def _take_bad(device: torch.device) -> BadIds:
    """Return where a kernel reports a bad block, after checking for earlier reports."""
    if device not in _bad_entries:
        _bad_entries[device] = BadIds(device, ("", ""), (0, 0))
    bad = _bad_entries[device]
    _raise_if_any(bad, is_earlier=True)
    return bad


def _raise_if_any(bad: BadIds, *, is_earlier: bool) -> None:
    is_bad, place, block = bad.words[:3].tolist()
    if is_bad <= 0:
        return
    bad.words[0] = 0  # the others mean nothing without it
    whose = " of a call before this one" if is_earlier else ""
    raise InvalidArgument(
        f"paged_attention: block_table[{place >> 32}, {place & 0xFFFFFFFF}]{whose} must be a block "
        f"of the cache, for its keys are seen, got {block}"
    )
