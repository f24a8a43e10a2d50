"""The kernel of paged attention in Triton. Its launcher is in attention.py.

A program handles the rows of TILE_QUERIES queries, for HEADS of the heads that share a KV head (all
of them, if there is room), and the keys of one split. (FlashAttention-2, section 3.1;
Flash-Decoding.) The number of programs depends only on shapes, so a CUDA graph can capture them;
programs without work exit at once.
"""

# ruff: noqa: N803 - constants in capitals are Triton's custom

import triton
import triton.language as tl

from .attention_tiles import NONE, attend_tile, report_bad, request_of, tiles_of


# The numbers of a batch: they are not worth another compilation where one is 1, or divisible by 16.
@triton.jit(do_not_specialize=["num_q", "num_requests", "num_blocks", "max_blocks", "split_keys"])
def paged_attention_kernel(
    q,  # [num_q, heads, K_DIM]
    k_cache,  # [block, token, kv_head, dim]
    v_cache,
    out,  # [num_splits, num_q, heads, V_DIM]: of q's type, or float32 if there are splits
    lse,  # *f32 [num_splits, num_q, heads]
    block_table,  # *i32 [num_requests, max_blocks]
    intervals,  # *i32 [num_q, 4]
    tail_bits,  # *i64 [num_q]
    tail_base,  # *i32 [num_requests]
    cu_q,  # *i32 [num_requests + 1]
    kv_lens,  # *i32 [num_requests]
    k_scales,  # *f32 [kv_heads]; unused without HAS_K_SCALES
    v_scales,
    bad,  # *i64 [3]: 1 if there is one (-1: being written), request << 32 | entry, block
    scale,
    num_q,
    num_requests,
    num_blocks,
    max_blocks,
    split_keys,  # a multiple of TILE
    q_row_stride,  # elements, as all strides
    q_head_stride,
    k_block_stride,
    k_token_stride,
    k_head_stride,
    v_block_stride,
    v_token_stride,
    v_head_stride,
    HAS_K_SCALES: tl.constexpr,
    HAS_V_SCALES: tl.constexpr,
    GROUP: tl.constexpr,  # query heads that share a KV head
    HEADS: tl.constexpr,  # of a group that a program handles, at most ROWS
    ROWS: tl.constexpr,  # of a program, a power of 2
    TILE: tl.constexpr,  # keys
    BLOCK_SIZE: tl.constexpr,
    K_DIM: tl.constexpr,
    MAIN: tl.constexpr,  # powers of 2 into which K_DIM is split
    REST: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PADDED: tl.constexpr,
    DOT_TYPE: tl.constexpr,  # of the operands of products; holds q, keys and values
):
    """Program (tile, part of a group, split): see the module."""
    TILE_QUERIES: tl.constexpr = ROWS // HEADS  # noqa: N806
    PARTS: tl.constexpr = (GROUP + HEADS - 1) // HEADS  # noqa: N806
    tile, split = tl.program_id(0), tl.program_id(2)
    kv_head, part = tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    request = request_of(cu_q, num_requests, tile, TILE_QUERIES)
    first_row, end_row = tl.load(cu_q + request), tl.load(cu_q + request + 1)
    first_row += (tile - first_row // TILE_QUERIES - request) * TILE_QUERIES
    if first_row >= end_row:
        return
    kv_len = tl.load(kv_lens + request)
    first_key = split * split_keys
    last_key = tl.cdiv(kv_len, TILE) * TILE
    if split < tl.num_programs(2) - 1:  # the last goes on to keys past the table
        last_key = tl.minimum(last_key, first_key + split_keys)
    last_key = tl.maximum(last_key, first_key)

    row = tl.arange(0, ROWS)
    query = first_row + row // HEADS
    head = part * HEADS + row % HEADS  # of the group; the last part may have fewer
    is_row = (row < TILE_QUERIES * HEADS) & (query < end_row) & (head < GROUP)
    head += kv_head * GROUP
    ends = intervals + query.to(tl.int64) * 4
    lo0 = tl.load(ends, mask=is_row, other=0)
    hi0 = tl.load(ends + 1, mask=is_row, other=0)
    lo1 = tl.load(ends + 2, mask=is_row, other=0)
    hi1 = tl.load(ends + 3, mask=is_row, other=0)
    tail = tl.load(tail_bits + query, mask=is_row, other=0)
    base = tl.load(tail_base + request)
    row_mask = (lo0, hi0, lo1, hi1, tail)
    a0, a1, a2, a3 = tiles_of(lo0, hi0, is_row, first_key, last_key, TILE)
    b0, b1, b2, b3 = tiles_of(lo1, hi1, is_row, tl.maximum(first_key, a3), last_key, TILE)
    has_tail = tl.max((tail != 0).to(tl.int32), 0) != 0
    tail_end = tl.where(has_tail, tl.minimum(base + 64, last_key), 0)

    q_rows = q + query.to(tl.int64) * q_row_stride + head.to(tl.int64) * q_head_stride
    dims = tl.arange(0, MAIN)
    q_main = tl.load(q_rows[:, None] + dims[None, :],
                     mask=is_row[:, None] & (dims < K_DIM)[None, :], other=0)  # fmt: skip
    q_rest = q_main
    if REST > 0:
        dims = MAIN + tl.arange(0, REST)
        q_rest = tl.load(q_rows[:, None] + dims[None, :],
                         mask=is_row[:, None] & (dims < K_DIM)[None, :], other=0)  # fmt: skip
    q_main, q_rest = q_main.to(DOT_TYPE), q_rest.to(DOT_TYPE)
    k_head = k_cache + kv_head.to(tl.int64) * k_head_stride
    v_head = v_cache + kv_head.to(tl.int64) * v_head_stride
    k_strides, v_strides = (k_block_stride, k_token_stride), (v_block_stride, v_token_stride)
    table = block_table + request.to(tl.int64) * max_blocks
    log2_scale = scale * 1.4426950408889634
    if HAS_K_SCALES:
        log2_scale *= tl.load(k_scales + kv_head)

    sums = tl.zeros([ROWS, V_PADDED], dtype=tl.float32)
    largest = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    bad_entry = tl.full([TILE], NONE, dtype=tl.int32)
    # For each interval: tiles that some rows see, that all see, and again some; then the tail's.
    for step in range(5 + 64 // TILE):
        at = base // TILE * TILE + (step - 4) * TILE
        is_new = ((at < a0) | (at >= a3)) & ((at < b0) | (at >= b3)) & (at >= first_key)
        begin = tl.where(step == 0, a0, tl.where(step == 1, a2, tl.where(step == 2, b0, b2)))
        end = tl.where(step == 0, a1, tl.where(step == 1, a3, tl.where(step == 2, b1, b3)))
        begin = tl.where(step < 4, begin, at)
        end = tl.where(step < 4, end, tl.where(is_new & (at < tail_end), at + TILE, at))
        for key in range(begin, end, TILE):
            sums, largest, total, bad_entry = attend_tile(
                sums, largest, total, bad_entry, q_main, q_rest, row_mask, base, kv_len, key,
                k_head, v_head, table, num_blocks, max_blocks, k_strides, v_strides, log2_scale,
                BLOCK_SIZE, TILE, K_DIM, MAIN, REST, V_DIM, V_PADDED, DOT_TYPE, IS_FULL=False,
            )  # fmt: skip
        begin = tl.where(step == 0, a1, b1)
        end = tl.where(step == 0, a2, tl.where(step == 2, b2, b1))
        for key in range(begin, end, TILE):
            sums, largest, total, bad_entry = attend_tile(
                sums, largest, total, bad_entry, q_main, q_rest, row_mask, base, kv_len, key,
                k_head, v_head, table, num_blocks, max_blocks, k_strides, v_strides, log2_scale,
                BLOCK_SIZE, TILE, K_DIM, MAIN, REST, V_DIM, V_PADDED, DOT_TYPE, IS_FULL=True,
            )  # fmt: skip

    is_empty = total == 0.0  # if all scores are NaN, the largest is -inf as well
    total = tl.where(is_empty, 1.0, total)
    factor = 1.0 / total
    if HAS_V_SCALES:
        factor *= tl.load(v_scales + kv_head)
    num_heads = tl.num_programs(1) // PARTS * GROUP
    index = (split.to(tl.int64) * num_q + query) * num_heads + head
    v_dims = tl.arange(0, V_PADDED)
    values = sums * factor[:, None]  # 0 for an empty row
    tl.store(out + index[:, None] * V_DIM + v_dims[None, :], values.to(out.dtype.element_ty),
             mask=is_row[:, None] & (v_dims < V_DIM)[None, :])  # fmt: skip
    natural = tl.where(is_empty, float("-inf"), (largest + tl.log2(total)) * 0.6931471805599453)
    tl.store(lse + index, natural, mask=is_row)
    worst = tl.min(bad_entry, 0)
    if worst < NONE:
        block = tl.load(table + worst, mask=worst < max_blocks, other=-1)
        report_bad(bad, (request.to(tl.int64) << 32) + worst, block.to(tl.int64))
