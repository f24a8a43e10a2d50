"""Properties of paged_attention on the CPU that hold for any numbers: bits, parts, layouts."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mooncake_kernels as mk
from mooncake_kernels import _library

from ..conftest import Backend
from .steps import LAYOUTS, Step, check, make_step

HOST = Backend("host", "cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@st.composite
def masks(draw):
    """Rows of any two intervals and tail bits, for a batch of any lengths."""
    q_lens, kv_lens = [], []
    for _ in range(draw(st.integers(0, 4))):
        q_lens.append(draw(st.integers(0, 12)))
        kv_lens.append(q_lens[-1] + draw(st.integers(0, 300)))
    batch = mk.ChunkBatch(q_lens, kv_lens)
    intervals, tails, tail_bases = [], [], []
    for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
        num_drafts = draw(st.integers(0, min(64, kv_len)))
        tail_bases.append(kv_len - num_drafts)
        for _ in range(q_len):
            ends = sorted(draw(st.lists(st.integers(0, tail_bases[-1]), min_size=4, max_size=4)))
            if ends[1] == ends[2]:
                ends = [ends[0], ends[3], 0, 0]
            if ends[0] == ends[1]:
                ends = [*ends[2:], 0, 0]
            if ends[2] == ends[3]:
                ends[2:] = [0, 0]
            intervals.append(ends if ends[0] < ends[1] else [0, 0, 0, 0])
            bits = draw(st.integers(0, (1 << num_drafts) - 1))
            tails.append(bits - (1 << 64) if bits >> 63 else bits)
    return mk.MaskRows(
        batch, torch.tensor(intervals, dtype=torch.int32).reshape(-1, 4),
        torch.tensor(tails, dtype=torch.int64), torch.tensor(tail_bases, dtype=torch.int32),
    )  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(masks(), st.data())
def test_any_mask_shape_and_layout(rows, data):
    group, kv_heads = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    step = make_step(
        rows,
        heads=(group * kv_heads, kv_heads),
        dims=(data.draw(st.integers(1, 80)), data.draw(st.integers(1, 80))),
        block_size=data.draw(st.integers(1, 70)),
        dtype=data.draw(st.sampled_from(DTYPES)),
        axes=data.draw(st.sampled_from([" ".join(axes) + " dim" for axes in
                                        itertools.permutations(LAYOUTS[0].split()[:3])])),
    )  # fmt: skip
    if rows.batch.num_requests == 0:
        step.block_table = step.block_table[:, :1]
        out, lse = step.run()
        assert out.numel() == 0 and lse.numel() == 0
    else:
        check(step, HOST)


def only(step: Step, request: int, queries: slice, kv_len: int) -> Step:
    """Return a step of some queries of one request, which sees keys up to a length."""
    rows, first = step.rows, int(step.rows.batch.cu_q[request])
    wanted = torch.arange(step.rows.batch.num_q)[first:][queries]
    batch = mk.ChunkBatch([len(wanted)], [kv_len])
    part = mk.MaskRows(
        batch, rows.intervals[wanted], rows.tail_bits[wanted], rows.tail_base[request : request + 1]
    )
    table = step.block_table[request : request + 1]
    return Step(step.q[wanted], step.k_cache, step.v_cache, table, part, step.axes, step.options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_batch_the_chunks_or_the_threads(dtype):
    """Also where a chunk of a few queries is split over its keys, and the whole prompt is not."""
    batch = mk.ChunkBatch([1, 150, 90], [1500, 1300, 100])
    rule = (mk.mask.causal() & mk.mask.sliding_window(1100)) | mk.mask.sink(5)
    step = make_step(mk.mask.rows(rule, batch), heads=(2, 1), dims=(32, 32), dtype=dtype)
    out, lse = step.run()
    torch.set_num_threads(1)
    again, _ = step.run()
    torch.set_num_threads(2)
    assert torch.equal(out, again)
    starts = batch.cu_q.tolist()
    for request, (q_len, kv_len) in enumerate(zip([1, 150, 90], [1500, 1300, 100], strict=True)):
        for begin in range(0, q_len, 37):
            end = min(begin + 37, q_len)
            chunk = only(step, request, slice(begin, end), kv_len - q_len + end)
            ours, ours_lse = chunk.run()
            rows = slice(starts[request] + begin, starts[request] + end)
            assert torch.equal(ours, out[rows]) and torch.equal(ours_lse, lse[rows])


def test_bits_do_not_depend_on_the_layout():
    rows = mk.mask.rows(mk.mask.causal(), mk.ChunkBatch([3, 70], [80, 200]))
    step = make_step(rows, block_size=16)
    out, lse = step.run()
    heads_first = Step(
        step.q, *(cache.transpose(1, 2).contiguous() for cache in (step.k_cache, step.v_cache)),
        step.block_table, rows, LAYOUTS[1], {},
    )  # fmt: skip
    assert torch.equal(heads_first.run()[0], out)
    small = Step(
        step.q, *(cache.reshape(-1, 4, *cache.shape[2:]) for cache in (step.k_cache, step.v_cache)),
        (step.block_table[:, :, None] * 4 + torch.arange(4, dtype=torch.int32)).flatten(1),
        rows, LAYOUTS[0], {},
    )  # fmt: skip
    assert torch.equal(small.run()[0], out) and torch.equal(small.run()[1], lse)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 300), max_size=4), st.sampled_from(DTYPES))
def test_merged_parts_equal_attention_over_all_keys(cuts, dtype):
    """Attention over ranges of the keys, some of them empty, merged."""
    batch = mk.ChunkBatch([2, 40], [300, 60])
    step = make_step(mk.mask.rows(mk.mask.causal(), batch), dtype=dtype, dims=(32, 32))
    parts = []
    for begin, end in itertools.pairwise([0, *sorted(cuts), 300]):
        part = step.rows.intervals.clamp(begin, max(begin, end))
        part[part[:, 0] == part[:, 1]] = 0
        part[:, 2:] = 0
        rows = mk.MaskRows(batch, part, step.rows.tail_bits, step.rows.tail_base)
        step_of_part = Step(
            step.q, step.k_cache, step.v_cache, step.block_table, rows, step.axes, {}
        )
        parts.append(step_of_part.run())
    outs, lses = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
    out, lse = mk.merge_attention(outs, lses)
    expected, expected_lse = step.expected()
    atol = {torch.float32: 2e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


def test_opcheck_and_compile():
    step = make_step(mk.mask.rows(mk.mask.causal(), mk.ChunkBatch([1, 3], [40, 20])))
    rows = step.rows
    operator = torch.ops.mooncake_kernels.paged_attention.default
    arguments = (
        *(step.q, step.k_cache, step.v_cache, step.block_table, rows.intervals, rows.tail_bits),
        *(rows.tail_base, rows.batch.cu_q, rows.batch.kv_lens, 0.125, None, None),
    )
    # Compared, the poison of unused blocks would not equal itself.
    clean = [t.nan_to_num() if isinstance(t, torch.Tensor) else t for t in arguments]
    torch.library.opcheck(operator, tuple(clean))

    def attend(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return mk.paged_attention(q * 2, step.k_cache, step.v_cache, step.block_table, rows)

    _library._logged.clear()  # a choice that was not logged yet must not break the graph
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for ours, other in zip(compiled(step.q), attend(step.q), strict=True):
        assert torch.equal(ours, other)
