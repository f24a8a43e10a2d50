"""append_kv in Triton."""

# ruff: noqa: N803 - constants in capitals are Triton's custom

import torch
import triton
import triton.language as tl

from ..bad_ids import BadIds
from ..errors import InvalidArgument
from ..transforms import FP8
from . import check_grid
from .attention_tiles import report_bad

_bad_slots: dict[torch.device, BadIds] = {}


@triton.jit
def append_rows_kernel(
    rows,  # [token, head, DIM]
    cache,  # [block, token, head, DIM]
    slots,  # *i64 [token]
    cos_sin,  # *f32 [token, 2, num_pairs]; unused without HAS_ROPE
    scales,  # *f32 [head]; unused without HAS_SCALES
    bad,  # *i64 [3]: 1 if there is one (-1: being written), its index, the slot
    num_slots,
    row_token_stride,  # elements, as all strides
    row_head_stride,
    block_stride,
    token_stride,
    head_stride,
    first,  # rotated element
    num_pairs,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,  # a power of 2, at least DIM
    HAS_ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    LARGEST: tl.constexpr,  # fp8 value that the cache holds; otherwise 0
):
    """Program (i, head) writes one row of token i."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + token)
    if (slot < -1) | (slot >= num_slots):
        report_bad(bad, token, slot)
    is_wanted = (slot >= 0) & (slot < num_slots)
    dims = tl.arange(0, PADDED)
    mask = dims < tl.where(is_wanted, DIM, 0)
    row = rows + token * row_token_stride + head * row_head_stride
    values = tl.load(row + dims, mask=mask, other=0.0)
    if HAS_ROPE:
        place = dims - first
        is_turned = mask & (place >= 0) & (place < 2 * num_pairs)
        if INTERLEAVED:
            pair, is_y, other = place // 2, place % 2 == 1, tl.where(place % 2 == 1, -1, 1)
        else:
            is_y = place >= num_pairs
            pair, other = (
                tl.where(is_y, place - num_pairs, place),
                tl.where(is_y, -num_pairs, num_pairs),
            )
        table = cos_sin + token * 2 * num_pairs + pair
        cos = tl.load(table, mask=is_turned, other=1.0)
        sin = tl.load(table + num_pairs, mask=is_turned, other=0.0)
        values = values.to(tl.float32)
        partner = tl.load(row + dims + other, mask=is_turned, other=0.0).to(tl.float32)
        values = values * cos + tl.where(is_y, partner * sin, -partner * sin)
    if HAS_SCALES:
        values = tl.div_rn(values.to(tl.float32), tl.load(scales + head))
    if LARGEST > 0:
        wide = values.to(tl.float32)
        clamped = tl.minimum(tl.maximum(wide, -LARGEST), LARGEST)
        values = tl.where(wide == wide, clamped, wide)
    at = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * token_stride
    tl.store(cache + at + head * head_stride + dims, values.to(cache.dtype.element_ty), mask=mask)


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
    """Run the kernel; arguments as for ``torch.ops.mooncake_kernels.append_kv``.

    Raises:
        InvalidArgument: an earlier call on the device met a slot that is not in its cache.
    """
    if k.device.type == "cpu":
        _check_slots(slots, k_cache.shape[0] * k_cache.shape[1])
    if k.device not in _bad_slots:
        _bad_slots[k.device] = BadIds(k.device, ("", ""), (0, 0))
    bad = _bad_slots[k.device]
    _raise_if_any(bad)
    check_grid("append_kv: k", "tokens and heads", k.shape[:2])
    rope = (rope_first, rope_interleaved)
    _append(k, k_cache, slots, cos_sin, rope, k_scale, bad)
    if v is not None and v_cache is not None:
        _append(v, v_cache, slots, None, rope, v_scale, bad)


def _append(
    rows: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    cos_sin: torch.Tensor | None,
    rope: tuple[int, bool],
    scales: torch.Tensor | None,
    bad: BadIds,
) -> None:
    num_tokens, num_heads, dim = rows.shape
    if num_tokens == 0:
        return
    largest = torch.finfo(cache.dtype).max if cache.dtype in FP8 else 0.0
    with torch.cuda.device_of(rows):
        append_rows_kernel[(num_tokens, num_heads)](
            *(rows, cache, slots),
            slots if cos_sin is None else cos_sin,
            slots if scales is None else scales,
            *(bad.words, cache.shape[0] * cache.shape[1]),
            *(*rows.stride()[:2], *cache.stride()[:3]),
            *(rope[0], 0 if cos_sin is None else cos_sin.shape[2]),
            BLOCK_SIZE=cache.shape[1],
            DIM=dim,
            PADDED=triton.next_power_of_2(dim),
            HAS_ROPE=cos_sin is not None,
            INTERLEAVED=rope[1],
            HAS_SCALES=scales is not None,
            LARGEST=largest,
        )


def _check_slots(slots: torch.Tensor, num_slots: int) -> None:
    for i in ((slots < -1) | (slots >= num_slots)).nonzero().flatten().tolist():
        raise InvalidArgument(
            f"append_kv: slots[{i}] must be -1 or in [0, {num_slots}), got {int(slots[i])}"
        )


def _raise_if_any(bad: BadIds) -> None:
    is_bad, index, slot = bad.words[:3].tolist()
    if is_bad > 0:
        bad.words[0] = 0  # the others mean nothing without it
        raise InvalidArgument(
            f"append_kv: slots[{index}] of a call before this one must be -1 or a slot of its "
            f"cache, got {slot}"
        )
