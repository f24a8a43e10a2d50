"""The specification of attention: loops in plain torch, in float64."""

import math

import torch

from ..errors import InvalidArgument
from ..transforms import FP8

TAIL_BITS = 64


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
    """Return out and lse, float64; the arguments are the operator's."""
    num_q, num_heads, _ = q.shape
    out = q.new_zeros(num_q, num_heads, v_cache.shape[3], dtype=torch.float64)
    lse = q.new_full((num_q, num_heads), -math.inf, dtype=torch.float64)
    starts = cu_q.tolist()
    for b, kv_len in enumerate(kv_lens.tolist()):
        if kv_len > block_table.shape[1] * k_cache.shape[1]:
            raise InvalidArgument(
                f"paged_attention: block_table must have blocks for {kv_len} keys of request {b}, "
                f"got {block_table.shape[1]} blocks of {k_cache.shape[1]}"
            )
        for row in range(starts[b], starts[b + 1]):
            keys = _seen(intervals[row].tolist(), int(tail_bits[row]), int(tail_base[b]), kv_len)
            if keys.numel() == 0:
                continue
            k = _read(k_cache, k_scale, block_table, b, keys, num_heads)
            v = _read(v_cache, v_scale, block_table, b, keys, num_heads)
            scores = scale * torch.einsum("hd,nhd->hn", q[row].double(), k)
            lse[row] = torch.logsumexp(scores, dim=1)
            weights = (scores - lse[row][:, None]).exp()
            weights[lse[row] == -math.inf] = 0
            out[row] = torch.einsum("hn,nhd->hd", weights, v)
    return out, lse


def _seen(intervals: list[int], tail_bits: int, tail_base: int, kv_len: int) -> torch.Tensor:
    lo0, hi0, lo1, hi1 = intervals
    in_tail = {tail_base + j for j in range(TAIL_BITS) if tail_bits >> j & 1}
    seen = {*range(lo0, hi0), *range(lo1, hi1), *in_tail}
    return torch.tensor(sorted(seen & set(range(kv_len))), dtype=torch.int64, device="cpu")


def _read(
    cache: torch.Tensor,
    scale: torch.Tensor | None,
    block_table: torch.Tensor,
    request: int,
    keys: torch.Tensor,
    num_heads: int,
) -> torch.Tensor:
    """Return the rows of the keys, float64 ``[key, head, dim]``, one row per query head."""
    num_blocks, block_size, num_kv_heads, _ = cache.shape
    keys = keys.to(cache.device)
    blocks = block_table[request].long()[keys // block_size]
    for key, block in zip(keys.tolist(), blocks.tolist(), strict=True):
        if not 0 <= block < num_blocks:
            raise InvalidArgument(
                f"paged_attention: block_table[{request}, {key // block_size}] must be in "
                f"[0, {num_blocks}), for its keys are seen, got {block}"
            )
    rows = cache[blocks, keys % block_size].double()
    if scale is not None:
        rows = rows * scale.double()[:, None]
    return rows.repeat_interleave(num_heads // num_kv_heads, dim=1)


def merge_attention(
    outs: torch.Tensor, lses: torch.Tensor, log2: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the merged out and lse, float64."""
    base = math.log(2) if log2 else 1.0
    merged = torch.logsumexp(lses.double() * base, dim=0)
    weights = (lses.double() * base - merged).exp()
    weights = torch.where(lses == -math.inf, 0.0, weights)
    terms = torch.where(weights[..., None] == 0, 0.0, outs.double() * weights[..., None])
    return terms.sum(0), merged / base


def append_kv(
    k: torch.Tensor,
    v: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    slots: torch.Tensor,
    cos_sin: torch.Tensor | None,
    rope_first: int,
    rope_interleaved: bool,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """Write rows to their slots; the arguments are the operator's."""
    num_slots = k_cache.shape[0] * k_cache.shape[1]
    for i, slot in enumerate(slots.tolist()):
        if not -1 <= slot < num_slots:
            raise InvalidArgument(
                f"append_kv: slots[{i}] must be -1 or in [0, {num_slots}), got {slot}"
            )
    with torch.inference_mode():  # caches made in inference mode may be written only in it
        for i, slot in enumerate(slots.tolist()):
            if slot == -1:
                continue
            key = k[i]
            if cos_sin is not None:
                key = _turned(k[i].float(), cos_sin[i], rope_first, rope_interleaved)
            _write(k_cache, slot, key, k_scale)
            if v is not None and v_cache is not None:
                _write(v_cache, slot, v[i], v_scale)


def _turned(
    rows: torch.Tensor, cos_sin: torch.Tensor, first: int, interleaved: bool
) -> torch.Tensor:
    num_pairs = cos_sin.shape[1]
    step = 2 if interleaved else 1
    x = torch.arange(num_pairs, device=rows.device) * step + first
    y = x + (1 if interleaved else num_pairs)
    turned = rows.clone()
    turned[:, x] = rows[:, x] * cos_sin[0] - rows[:, y] * cos_sin[1]
    turned[:, y] = rows[:, y] * cos_sin[0] + rows[:, x] * cos_sin[1]
    return turned


def _write(cache: torch.Tensor, slot: int, rows: torch.Tensor, scale: torch.Tensor | None) -> None:
    if scale is not None:
        rows = rows.float() / scale[:, None]
    if cache.dtype in FP8:
        largest = torch.finfo(cache.dtype).max
        rows = rows.float().clamp(-largest, largest)
    cache[slot // cache.shape[1], slot % cache.shape[1]] = rows.to(cache.dtype)
