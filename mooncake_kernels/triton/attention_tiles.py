"""The device functions of paged attention in Triton: the tiles, and bad entries."""

# ruff: noqa: N803 - constants in capitals are Triton's custom

import triton
import triton.language as tl

NONE = tl.constexpr((1 << 31) - 1)  # later than any key


@triton.jit
def request_of(cu_q, num_requests, tile, TILE_QUERIES: tl.constexpr):
    """Return a tile's request: the tiles of request b begin at cu_q[b] // TILE_QUERIES + b."""
    low, high = 0, num_requests
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_q + middle) // TILE_QUERIES + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def tiles_of(begin, end, is_row, first_key, last_key, TILE: tl.constexpr):
    """Return some rows' interval as tiles: seen by any row [0, 3), by all rows [1, 2)."""
    is_used = is_row & (end > begin)
    any_begin = tl.min(tl.where(is_used, begin, NONE), 0)
    any_end = tl.max(tl.where(is_used, end, 0), 0)
    all_begin = tl.max(tl.where(is_row, begin, 0), 0)
    all_end = tl.min(tl.where(is_row, end, NONE), 0)
    t0 = tl.minimum(tl.maximum(any_begin // TILE * TILE, first_key), last_key)
    t3 = tl.maximum(tl.minimum(tl.cdiv(any_end, TILE) * TILE, last_key), t0)
    t1 = tl.minimum(tl.maximum(tl.cdiv(all_begin, TILE) * TILE, t0), t3)
    t2 = tl.minimum(tl.maximum(all_end // TILE * TILE, t1), t3)
    return t0, t1, t2, t3


@triton.jit
def report_bad(bad, place, value):
    """Write one program's report; those of others do not mix with it."""
    one = tl.full([], 1, dtype=tl.int64)
    if tl.atomic_cas(bad, one - 1, -one) == 0:
        tl.store(bad + 1, place)
        tl.store(bad + 2, value)
        tl.debug_barrier()  # the words may be other threads' stores
        tl.atomic_xchg(bad, one, sem="release", scope="sys")  # last: the host polls it


@triton.jit
def attend_tile(
    sums,
    largest,
    total,
    bad,
    q_main,
    q_rest,
    row_mask,  # lo0, hi0, lo1, hi1, tail bits of each row
    tail_base,
    kv_len,
    first_key,
    k_cache,  # at the head
    v_cache,
    table,  # of the request
    num_blocks,
    max_blocks,
    k_strides,  # block, token
    v_strides,
    scale,  # of scores, times log2 e
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    K_DIM: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PADDED: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    IS_FULL: tl.constexpr,
):
    """Attend to the keys [first_key, first_key + TILE); in a full tile every row sees every key."""
    keys = first_key + tl.arange(0, TILE)
    if IS_FULL:
        needed = keys < kv_len
    else:
        lo0, hi0, lo1, hi1, tail = row_mask
        key = keys[None, :]
        seen = (key >= lo0[:, None]) & (key < hi0[:, None])
        seen |= (key >= lo1[:, None]) & (key < hi1[:, None])
        bit = key - tail_base
        in_tail = (bit >= 0) & (bit < 64)
        shift = tl.where(in_tail, bit, 0).to(tl.int64)
        seen |= in_tail & (((tail[:, None] >> shift) & 1) != 0)
        seen &= key < kv_len
        needed = tl.max(seen.to(tl.int32), 0) != 0
    entries = keys // BLOCK_SIZE
    blocks = tl.load(table + entries, mask=needed & (entries < max_blocks), other=-1)
    is_there = (blocks >= 0) & (blocks < num_blocks)
    bad = tl.minimum(bad, tl.where(needed & ~is_there, entries, NONE))
    needed &= is_there

    tokens = (keys % BLOCK_SIZE).to(tl.int64)
    k_rows = k_cache + blocks.to(tl.int64) * k_strides[0] + tokens * k_strides[1]
    v_rows = v_cache + blocks.to(tl.int64) * v_strides[0] + tokens * v_strides[1]
    dims = tl.arange(0, MAIN)
    k_mask = needed[None, :] & (dims < K_DIM)[:, None]
    k = tl.load(k_rows[None, :] + dims[:, None], mask=k_mask, other=0.0).to(DOT_TYPE)
    scores = tl.dot(q_main, k, input_precision="ieee")
    if REST > 0:
        dims = MAIN + tl.arange(0, REST)
        k_mask = needed[None, :] & (dims < K_DIM)[:, None]
        k = tl.load(k_rows[None, :] + dims[:, None], mask=k_mask, other=0.0).to(DOT_TYPE)
        scores += tl.dot(q_rest, k, input_precision="ieee")
    scores *= scale
    if IS_FULL:
        scores = tl.where(needed[None, :], scores, float("-inf"))
    else:
        scores = tl.where(seen & needed[None, :], scores, float("-inf"))

    now = tl.maximum(largest, tl.max(scores, 1))
    base = tl.where(now == float("-inf"), 0.0, now)
    weights = tl.exp2(scores - base[:, None])
    keep = tl.exp2(largest - base)
    total = total * keep + tl.sum(weights, 1)
    v_dims = tl.arange(0, V_PADDED)
    v_mask = needed[:, None] & (v_dims < V_DIM)[None, :]
    v = tl.load(v_rows[:, None] + v_dims[None, :], mask=v_mask, other=0.0).to(DOT_TYPE)
    products = tl.dot(weights.to(DOT_TYPE), v, input_precision="ieee")
    sums = sums * keep[:, None] + products
    return sums, now, total, bad
