"""paged_attention against float64, in every engine: masks, layouts, dtypes, shapes."""

import math

import pytest
import torch

import mooncake_kernels as mk

from .steps import LAYOUTS, check, make_step

RULES = {
    "causal": mk.mask.causal(),
    "full": mk.mask.full(),
    "window and sinks": (mk.mask.causal() & mk.mask.sliding_window(9)) | mk.mask.sink(3),
    "chunked local": mk.mask.causal() & mk.mask.chunked_local(24),
    "prefix-LM": mk.mask.prefix_lm(40),
    "documents": mk.mask.causal() & mk.mask.documents([0, 30, 71]),
    "spans": mk.mask.causal() | mk.mask.spans([(10, 25), (80, 92)]),
    "items": mk.mask.items(20, [35, 50]),
}
# A decode, an extend, an idle request, a prefill chunk.
MIXED = mk.ChunkBatch([1, 5, 0, 24], [100, 75, 10, 90])


@pytest.mark.parametrize("rule", RULES)
def test_every_mask_rule(engine, rule):
    check(make_step(mk.mask.rows(RULES[rule], MIXED)), engine)


def test_draft_tree_in_tail_bits(engine):
    batch = mk.ChunkBatch([7, 7], [7 + 60, 7 + 5])
    rows = mk.mask.rows(mk.mask.tree([-1, 0, 0, 1, 1, 2, 5]), batch)
    assert rows.tail_bits.any()
    check(make_step(rows), engine)


def test_selected_query_positions(engine):
    positions = [3, 17, 64, 65, 99, 0, 50]
    batch = mk.ChunkBatch([5, 2], [100, 51], positions)
    check(make_step(mk.mask.rows(mk.mask.causal(), batch)), engine)


def test_rows_that_see_no_keys(engine):
    rows = mk.mask.rows(mk.mask.causal(), MIXED)
    rows.intervals[::3] = 0
    rows.intervals[-24:] = 0
    check(make_step(rows), engine)


@pytest.mark.parametrize("axes, block_size", [*zip(LAYOUTS, (1, 3, 64), strict=True)])
def test_layouts_and_block_sizes(engine, axes, block_size):
    rows = mk.mask.rows(RULES["window and sinks"], MIXED)
    check(make_step(rows, axes=axes, block_size=block_size, dims=(32, 32)), engine)


@pytest.mark.parametrize(
    "dtype, dims",
    [
        (torch.bfloat16, (64, 64)),
        (torch.float32, (96, 96)),
        (torch.float16, (128, 128)),
        (torch.bfloat16, (256, 256)),
        (torch.float32, (72, 40)),
        (torch.bfloat16, (72, 40)),
        (torch.float32, (8, 8)),
        (torch.bfloat16, (8, 8)),
    ],
)
def test_dtypes_and_dims(engine, dtype, dims):
    batch = mk.ChunkBatch([1, 6], [70, 70])
    check(make_step(mk.mask.rows(mk.mask.causal(), batch), dtype=dtype, dims=dims), engine)


@pytest.mark.parametrize("heads", [(1, 1), (6, 6), (6, 1), (16, 2)])
def test_grouped_query_heads(engine, heads):
    batch = mk.ChunkBatch([3, 1], [70, 30])
    check(make_step(mk.mask.rows(mk.mask.causal(), batch), heads=heads, dims=(32, 32)), engine)


@pytest.mark.parametrize(
    "heads, dims, dtype",
    [
        ((130, 1), (32, 32), torch.float32),
        ((300, 2), (32, 32), torch.float16),
        ((70, 1), (192, 160), torch.float32),
        ((128, 1), (576, 512), torch.float16),
        ((50, 1), (576, 512), torch.float32),
    ],
)
def test_more_heads_per_group_than_program_rows(engine, heads, dims, dtype):
    """Split into equal parts, of which the last may have fewer heads."""
    batch = mk.ChunkBatch([2, 1], [40, 33])
    rows = mk.mask.rows(RULES["window and sinks"], batch)
    check(make_step(rows, heads=heads, dims=dims, dtype=dtype), engine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mla_reads_values_from_the_key_cache(engine, dtype):
    batch = mk.ChunkBatch([1, 3], [70, 20])
    rows = mk.mask.rows(mk.mask.causal(), batch)
    step = make_step(rows, heads=(16, 1), dims=(576, 512), dtype=dtype, scale=192**-0.5)
    step.v_cache = step.k_cache[..., :512]
    check(step, engine)
    with_heads = step.to(engine.device).run(engine.engine)
    step.k_cache, step.v_cache = step.k_cache[:, :, 0], step.v_cache[:, :, 0]
    step.axes = "block token dim"
    for ours, other in zip(step.to(engine.device).run(engine.engine), with_heads, strict=True):
        assert torch.equal(ours, other)


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_cache_with_scales(engine, dtype, cache_dtype):
    batch = mk.ChunkBatch([1, 6], [70, 70])
    step = make_step(
        mk.mask.rows(mk.mask.causal(), batch), dtype=dtype, cache_dtype=cache_dtype,
        k_scale=0.75, v_scale=torch.tensor([0.5, 2.0]),
    )  # fmt: skip
    check(step, engine, loose=2.0)


def test_cache_dtype_may_differ_from_the_query_dtype(engine):
    rows = mk.mask.rows(mk.mask.causal(), mk.ChunkBatch([1, 6], [70, 70]))
    check(make_step(rows, dtype=torch.float32, cache_dtype=torch.bfloat16), engine)
    check(make_step(rows, dtype=torch.bfloat16, cache_dtype=torch.float32), engine)


def test_cache_is_not_rounded_to_the_query_dtype(engine):
    """Neither to its range nor to its precision; keys that cancel make up for large values."""
    batch = mk.ChunkBatch([1], [2], device=engine.device)
    rows = mk.mask.rows(mk.mask.causal(), batch)
    table = torch.zeros(1, 1, dtype=torch.int32, device=engine.device)
    q = torch.full((1, 1, 16), 1e-3).half().to(engine.device)
    k = torch.zeros(1, 2, 1, 16).bfloat16().to(engine.device)
    k[0, 0], k[0, 1, :, ::2], k[0, 1, :, 1::2] = 0, 1e5, -1e5
    v = torch.ones(1, 2, 1, 16).bfloat16().to(engine.device)
    v[0, 1, 0, 0] = 65536.0  # out of float16's range
    out, lse = mk.paged_attention(q, k, v, table, rows, engine=engine.engine)
    assert out[0, 0].tolist() == [32768.0] + [1.0] * 15
    assert lse.item() == pytest.approx(math.log(2), rel=1e-5)
    fine = torch.full((1, 2, 1, 16), 1 + 2**-20, device=engine.device)
    _, lse = mk.paged_attention(
        torch.ones_like(q).bfloat16(), fine, fine, table, rows, scale=2.0**16, engine=engine.engine
    )
    assert lse.item() == pytest.approx(2**20 + 1, abs=1)


def test_strided_queries(engine):
    step = make_step(mk.mask.rows(mk.mask.causal(), MIXED))
    qkv = torch.randn(MIXED.num_q, 8, 64)
    step.q = qkv[:, 2:6]
    check(step, engine)


def test_split_over_keys(engine):
    """Longer than a split, for a few queries, and with a window that skips some."""
    batch = mk.ChunkBatch([1, 2], [2300, 1025])
    for rule in ("causal", "window and sinks"):
        rows = mk.mask.rows(RULES[rule], batch)
        check(make_step(rows, heads=(4, 1), dims=(16, 16)), engine)
    rows.intervals[0] = 0
    check(make_step(rows, heads=(4, 1), dims=(16, 16)), engine)


def test_split_over_keys_of_a_partitioned_group(engine):
    batch = mk.ChunkBatch([1, 2], [2300, 1025])
    rows = mk.mask.rows(mk.mask.causal(), batch)
    check(make_step(rows, heads=(150, 1), dims=(16, 16)), engine)


def test_batch_without_queries(engine):
    step = make_step(mk.mask.rows(mk.mask.causal(), mk.ChunkBatch([0, 0], [10, 3])))
    out, lse = step.to(engine.device).run(engine.engine)
    assert out.shape == (0, 4, 64) and lse.shape == (0, 4)


def test_visible_nan_reaches_the_output(engine):
    step = make_step(mk.mask.rows(mk.mask.causal(), mk.ChunkBatch([1, 1], [70, 70])))
    step.k_cache[step.block_table[1, 2].item(), 3] = torch.nan
    out, lse = step.to(engine.device).run(engine.engine)
    assert out[0].isfinite().all() and lse[0].isfinite().all()
    assert out[1].isnan().all() and lse[1].isnan().all()
