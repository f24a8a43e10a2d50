"""NaN stays NaN, wherever it lies: it must not look like a row that sees nothing."""

import math

import pytest
import torch

import mooncake_kernels as mk

NUM_KEYS = 2048  # two splits


@pytest.fixture
def step(engine):
    """q, k, v, their table, and the rows."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    table = torch.arange(NUM_KEYS // 16, dtype=torch.int32)[None]
    k, v = normal(NUM_KEYS // 16, 16, 1, 64), normal(NUM_KEYS // 16, 16, 1, 64)
    rows = mk.mask.rows(mk.mask.causal(), mk.ChunkBatch([1], [NUM_KEYS], device=engine.device))
    return *(tensor.to(engine.device) for tensor in (normal(1, 2, 64), k, v, table)), rows


def is_nan(out, lse):
    return bool(out.isnan().all() and lse.isnan().all())


def test_nan_in_a_query_reaches_its_output(engine, step):
    q, k, v, table, rows = step
    q[0, 0] = math.nan
    out, lse = mk.paged_attention(q, k, v, table, rows, engine=engine.engine)
    assert is_nan(out[0, 0], lse[0, 0])
    assert out[0, 1].isfinite().all() and lse[0, 1].isfinite()


@pytest.mark.parametrize(
    "keys", [slice(0, 1), slice(0, 4), slice(0, 64), slice(64, 128), slice(None)]
)
def test_nan_in_keys_reaches_the_output(engine, step, keys):
    """One block, a tile, each of the splits, all."""
    q, k, v, table, rows = step
    k[keys] = math.nan
    assert is_nan(*mk.paged_attention(q, k, v, table, rows, engine=engine.engine))


def test_overflowed_query_gives_nan(engine, step):
    q, k, v, table, rows = step
    q = q.to(torch.float16)
    q[0] = math.inf
    k, v = k.to(torch.float16), v.to(torch.float16)
    assert is_nan(*mk.paged_attention(q, k, v, table, rows, engine=engine.engine))


def test_row_that_sees_no_keys_gives_zero_despite_nan(engine, step):
    q, k, v, table, rows = step
    rows.intervals.zero_()
    out, lse = mk.paged_attention(q * math.nan, k, v, table, rows, engine=engine.engine)
    assert not out.any() and (lse == -math.inf).all()


def test_row_with_only_minus_infinity_scores_gives_zero(engine, step):
    """As in torch's SDPA."""
    q, k, v, table, rows = step
    k[:] = -math.inf
    out, lse = mk.paged_attention(q.abs() + 1, k, v, table, rows, engine=engine.engine)
    assert not out.any() and (lse == -math.inf).all()


def test_shrunk_builder_batch_masks_its_spare_rows(engine):
    on = {"device": engine.device}
    builder = mk.mask.MaskBuilder(mk.mask.causal(), mk.ChunkBatch([1, 3], [5, 9], **on))
    builder.set_lengths([1, 1], [5, 7])
    rows = builder.build()
    generator = torch.Generator().manual_seed(1)
    cache = torch.randn(6, 4, 2, 8, generator=generator).to(**on)
    q = torch.randn(2, 4, 8, generator=generator).to(**on)
    table = torch.tensor([[0, 1, 5], [2, 3, 4]], dtype=torch.int32).to(**on)
    found = mk.paged_attention(q, cache, cache, table, rows, engine=engine.engine)
    fixed = mk.mask.rows(mk.mask.causal(), mk.ChunkBatch([1, 1], [5, 7], **on))
    wanted = mk.paged_attention(q, cache, cache, table, fixed, engine=engine.engine)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
