"""What paged_attention refuses, and its error messages."""

import pytest
import torch

import mooncake_kernels as mk
from mooncake_kernels import _library

from .steps import check, make_step

QUANTIZED = torch.quantize_per_tensor(torch.ones(8, 16, 2, 64), 0.1, 0, torch.quint8)


def arguments(**changes):
    step = make_step(mk.mask.rows(mk.mask.causal(), mk.ChunkBatch([2, 1], [40, 33])))
    named = {
        "q": step.q, "k_cache": step.k_cache, "v_cache": step.v_cache,
        "block_table": step.block_table, "rows": step.rows,
    }  # fmt: skip
    return {**named, **changes}


@pytest.mark.parametrize("block", [-1, 8, 1 << 30])
def test_bad_block_is_reported_only_if_visible(engine, block):
    if engine.device == "cuda":
        pytest.skip("on CUDA a later call raises")
    call = arguments()
    call["block_table"][1, 2] = block
    with pytest.raises(mk.InvalidArgument, match=rf"block_table\[1, 2\] must be .*, got {block}"):
        mk.paged_attention(**call, engine=engine.engine)
    window = mk.mask.causal() & mk.mask.sliding_window(1)
    call["rows"] = mk.mask.rows(window, call["rows"].batch)
    call["block_table"][1, :2] = block
    call["block_table"][1, 2] = 0
    mk.paged_attention(**call, engine=engine.engine)


def test_one_of_several_bad_blocks_is_reported_consistently(engine):
    if engine.engine != "triton" or engine.device == "cuda":
        pytest.skip("of programs that run one after the other, the first reports")
    attention = _library.triton_module("paged_attention", "attention", torch.device("cpu"))
    call = arguments()
    call["block_table"][0, 1], call["block_table"][1, 2] = 77, 88
    with pytest.raises(mk.InvalidArgument, match=r"block_table\[0, 1\] must be .*, got 77"):
        mk.paged_attention(**call, engine="triton")
    words = attention._bad_entries[torch.device("cpu")].words
    words.copy_(torch.tensor([-1, 5, 6]))  # another program is writing
    try:
        mk.paged_attention(**call, engine="triton")
        assert words.tolist() == [-1, 5, 6]
    finally:
        words.zero_()


def test_short_block_table_is_rejected(engine):
    call = arguments()
    call["block_table"] = call["block_table"][:, :2]
    if engine.device == "cuda":
        pytest.skip("on CUDA a later call raises")
    message = "block_table must have blocks for 40 keys of request 0, got 2 blocks of 16"
    with pytest.raises(mk.InvalidArgument, match=message):
        mk.paged_attention(**call, engine=engine.engine)


@pytest.mark.parametrize("num_blocks, kv_len", [(4, 65), (4, 600), (80, 1700)])
def test_device_side_lengths_past_the_block_table_stay_in_bounds(engine, num_blocks, kv_len):
    """As when a graph is replayed: tiles past the end of the table, and of its last split."""
    if engine.engine != "triton" or engine.device == "cuda":
        pytest.skip("other engines read the lengths; on CUDA a later call raises")
    rows = mk.mask.rows(mk.mask.causal(), mk.ChunkBatch([1, 1], [64, kv_len]))
    step = make_step(rows, heads=(1, 1), dims=(16, 16))
    step.block_table = step.block_table[:, :num_blocks].contiguous()
    rows.batch.kv_lens_list = [64, 64]
    message = r"block_table\[1, \d+\] must be a block of the cache, .* got -1"
    with pytest.raises(mk.InvalidArgument, match=message):
        step.run("triton")
    last_row = mk.mask.causal() & mk.mask.sliding_window(1)
    step.rows = mk.mask.rows(last_row, mk.ChunkBatch([1, 1], [64, kv_len]))
    step.rows.batch.kv_lens_list = [64, 64]
    entry = (kv_len - 1) // 16
    with pytest.raises(mk.InvalidArgument, match=rf"block_table\[1, {entry}\] must be"):
        step.run("triton")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": torch.ones(3, 4, 32)}, r"q must be \[3, heads, 64\]"),
        ({"q": torch.ones(2, 4, 64)}, r"q must be \[3, heads, 64\]"),
        ({"q": torch.ones(3, 3, 64)}, "q must have a multiple of the 2 heads of k_cache, got 3"),
        ({"q": torch.ones(3, 4, 64).double()}, "q must be float32, float16 or bfloat16, got"),
        ({"q": torch.ones(3, 4, 128)[..., ::2]}, r"q must have its dims packed \(stride 1\)"),
        ({"q": None}, "q must be a tensor, got None"),
        ({"k_cache": torch.ones(4, 16, 2, 64).int()}, "k_cache must be .* got torch.int32"),
        ({"k_cache": torch.ones(4, 16, 64)}, "k_cache must have 4 axes"),
        ({"k_cache": torch.ones(4, 16, 2, 128)[..., ::2]}, "k_cache must have its dims packed"),
        ({"v_cache": torch.ones(4, 8, 2, 64)}, "v_cache must have the shape of k_cache"),
        ({"q": torch.ones(3, 4, 64).requires_grad_()}, "q must not require grad, for there is no"),
        ({"v_cache": torch.ones(8, 16, 2, 64).requires_grad_()}, "v_cache must not require grad"),
        ({"k_scale": torch.ones(2).requires_grad_()}, "k_scale must not require grad"),
        ({"v_scale": torch.ones(()).half().requires_grad_()}, "v_scale must not require grad"),
        ({"block_table": torch.ones(2, 9).long()}, "block_table must be int32 on cpu"),
        ({"block_table": torch.ones(3, 9).int()}, r"block_table must be \[2, max_blocks\]"),
        ({"rows": torch.ones(3, 4)}, "rows must be a MaskRows"),
        ({"scale": float("nan")}, "scale must be a finite number that float32 holds, got nan"),
        ({"scale": 10**400}, "scale must be a finite number that float32 holds, got 1000"),
        ({"scale": 1e300}, "scale must be a finite number that float32 holds, got 1e"),
        ({"k_scale": 10**400}, "k_scale must be a positive number that float32 holds, got 1000"),
        ({"k_scale": torch.tensor([1.0, 0.0])}, "k_scale must be positive and finite, got"),
        ({"q": torch._neg_view(torch.ones(3, 4, 64))}, "q must not be negated lazily"),
        ({"q": torch.nested.as_nested_tensor([torch.ones(4, 64)])}, "q must not be nested"),
        ({"k_cache": QUANTIZED}, "k_cache must not be quantized"),
        ({"axes": "block token dim head dim"}, "axes must be an order of"),
        ({"k_scale": torch.ones(3)}, "k_scale must be a number, or a floating-point tensor"),
        ({"v_scale": "1"}, "v_scale must be a number"),
        ({"engine": "cuda"}, "engine must be one of"),
    ],
)
def test_bad_arguments_are_rejected(change, message):
    with pytest.raises(mk.InvalidArgument, match=f"^paged_attention: .*{message}"):
        mk.paged_attention(**arguments(**change))


def test_head_dims_too_large_for_a_gpu_are_rejected(engine):
    rows = mk.mask.rows(mk.mask.causal(), mk.ChunkBatch([1], [5]))
    step = make_step(rows, heads=(1, 1), dims=(4096, 2048), block_size=4)
    if engine.engine != "triton":
        check(step, engine, loose=2.0)  # torch's error in sums of 4096 depends on its BLAS
        return
    message = "k_cache and v_cache must have dims of which 16 keys fit .* got 4096 and 2048"
    with pytest.raises(mk.InvalidArgument, match=message):
        step.to(engine.device).run("triton")


def test_requires_grad_is_accepted_under_no_grad():
    q = torch.ones(3, 4, 64).requires_grad_()
    with torch.no_grad():
        out, lse = mk.paged_attention(**arguments(q=q))
    assert not out.requires_grad and not lse.requires_grad
    assert torch.equal(out, mk.paged_attention(**arguments(q=q.detach()))[0])


def test_handmade_rows_stay_inside_the_cache():
    """Intervals past the keys, or negative: only keys that are there are seen."""
    call = arguments()
    expected, _ = mk.paged_attention(**call)
    call["rows"].intervals[1, 1] = 1 << 30
    call["rows"].intervals[1, 0] = -5
    out, _ = mk.paged_attention(**call)
    assert torch.equal(out, expected)
