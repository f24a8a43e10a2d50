"""Blocks of different sizes on the two sides, and single tokens by their slots."""

import pytest
import torch

import mooncake_kernels as mk

from .checks import check
from .layouts import Sizes, addressed, make_view, snapshot, sparse_blocks

HOLE = -1


def caches(backend, src_size, dst_size, src_name="nhd_per_layer", dst_name="block_first_hnd", **kw):
    src = make_view(src_name, Sizes(layer=2, token=src_size), device=backend.device, **kw)
    dst = make_view(dst_name, Sizes(layer=2, token=dst_size), device=backend.device, seed=90, **kw)
    return src, dst


@pytest.mark.parametrize("src_name", ["nhd_per_layer", "universal"])
@pytest.mark.parametrize("dst_name", ["hnd_per_layer", "nhd_per_layer", "page_head"])
@pytest.mark.parametrize(
    ("src_size", "dst_size", "src_ids", "dst_ids"),
    [
        (2, 4, [5, 1, 0, 6], [3, 2]),
        (4, 2, [3, 2], [5, 1, 0, 6]),
        (2, 4, [5, 1, 0], [3, 2]),  # half of block 2 stays as it was
        (4, 2, [3, 2], [5, 1, 0]),  # half of block 2 is not read
        (2, 4, [5, HOLE, 0, 6], [3, HOLE]),
        (4, 6, [1, 2, 3], [6, 5]),  # neither divides the other
        (3, 5, [6], [0]),
        (4, 1, [2], [6, 5, 4, 3]),
        (2, 4, [], []),
    ],
)
def test_copy_between_block_sizes_keeps_token_order(
    backend, src_name, dst_name, src_size, dst_size, src_ids, dst_ids
):
    src, dst = caches(backend, src_size, dst_size, src_name, dst_name)
    check(src, dst, src_ids, dst_ids, backend)


@pytest.mark.parametrize("sizes", [(16, 32), (16, 64), (64, 16), (32, 64), (64, 32)])
def test_engine_block_sizes_keep_each_token_in_place(sizes):
    """Token t of the request is found at token t of both, whatever the blocks."""
    src_size, dst_size = sizes
    src = mk.KVView(addressed((8, 2, src_size, 3), torch.int16, "cpu", 1), "block head token dim")
    dst = mk.KVView(torch.zeros(8, dst_size, 2, 3, dtype=torch.int16), "block token head dim")
    num_tokens = 128
    src_ids = torch.randperm(8)[: num_tokens // src_size]
    dst_ids = torch.randperm(8)[: num_tokens // dst_size]
    mk.CopyPlan(src, dst).run(src_ids, dst_ids)
    for token in range(num_tokens):
        there = dst.plane(0, 0)[dst_ids[token // dst_size], :, token % dst_size]
        here = src.plane(0, 0)[src_ids[token // src_size], :, token % src_size]
        assert torch.equal(there, here), token
    assert dst.tensors[0].count_nonzero() == src.plane(0, 0)[src_ids].count_nonzero()


@pytest.mark.parametrize("src_name", ["nhd_per_layer", "lbhnc"])
@pytest.mark.parametrize("dst_name", ["nhd_per_layer", "universal", "kv_apart"])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("padding", [0, 1])
def test_run_slots_copies_single_tokens(backend, src_name, dst_name, ids_dtype, padding):
    src, dst = caches(backend, 4, 3, src_name, dst_name, padding=padding)
    check(src, dst, [0, 27, HOLE, 5, 5], [20, 0, 4, HOLE, 7], backend, ids_dtype, "run_slots")
    check(src, dst, [], [], backend, ids_dtype, "run_slots")


def test_run_slots_copies_mla_rows_of_odd_size(backend):
    rows = addressed((5, 4, 656), torch.uint8, backend.device, 1)
    src = mk.KVView(rows, "block token dim")
    dst = mk.KVView(torch.zeros_like(rows), "block token dim")
    check(src, dst, [19, 3], [0, 18], backend, method="run_slots")


def finish(plan, backend):
    """On CUDA the kernel reports, and check() raises."""
    if backend.device == "cuda":
        plan.check()


def test_bad_id_is_reported_with_its_index(backend):
    src, dst = caches(backend, 2, 4)
    plan = mk.CopyPlan(src, dst)
    before = snapshot(dst)
    for run, ids, message in [
        (plan.run, ([0, 1, 7], [0, 1]), r"CopyPlan.run: src_blocks\[2\] .* \[0, 7\), got 7"),
        (plan.run, ([0, 1, 2], [0, 9]), r"CopyPlan.run: dst_blocks\[1\] .* \[0, 7\), got 9"),
        (
            plan.run_slots,
            ([0, 14], [0, 1]),
            r"run_slots: src_slots\[1\] .* \[0, 14\), got 14",
        ),
        (
            plan.run_slots,
            ([0, 1], [28, 1]),
            r"run_slots: dst_slots\[0\] .* \[0, 28\), got 28",
        ),
    ]:
        with pytest.raises(mk.InvalidArgument, match=message):
            run(*ids, engine=backend.engine)
            finish(plan, backend)
    if backend.engine in ("host", "reference"):
        assert torch.equal(snapshot(dst), before), "something was copied"
    plan.run([0, 1], [0], engine=backend.engine)
    finish(plan, backend)


@pytest.mark.parametrize(
    ("src_ids", "dst_ids", "message"),
    [
        ([0], [0, 1], "hold the 2 tokens of src_blocks.*, got 2 blocks of 4"),
        ([0, 1, 2], [0], "hold the 6 tokens of src_blocks.*, got 1 blocks of 4"),
        ([], [0], "hold the 0 tokens of src_blocks.*, got 1 blocks of 4"),
    ],
)
def test_run_rejects_ids_holding_different_token_counts(backend, src_ids, dst_ids, message):
    src, dst = caches(backend, 2, 4)
    with pytest.raises(mk.InvalidArgument, match=message):
        mk.CopyPlan(src, dst).run(src_ids, dst_ids, engine=backend.engine)
    with pytest.raises(mk.InvalidArgument, match="dst_slots must have as many ids .*, got 2"):
        mk.CopyPlan(src, dst).run_slots([0], [0, 1], engine=backend.engine)


def test_the_operator_checks_the_number_of_ids():
    src, dst = make_view("nhd_per_layer", Sizes()), make_view("nhd_per_layer", Sizes(), seed=9)
    with pytest.raises(ValueError, match=r"dst_blocks must have 1 ids, got 2"):
        torch.ops.mooncake_kernels.copy_blocks(
            src.tensors,
            dst.tensors,
            src.packed.gather_plan.values,
            torch.tensor([0]),
            torch.tensor([0, 1]),
            0,
            0,
        )


def test_slots_beyond_32_bits(tmp_path):
    """Of 6 GiB, in blocks that are padded, so that a slot has to be divided."""
    num_blocks, block_bytes = 6 << 10, 1 << 20
    memory = sparse_blocks(tmp_path / "cache", num_blocks, block_bytes)
    cache = mk.KVView(memory[:, :3], "block token dim")
    rows = addressed((1, 2, block_bytes // 4), torch.uint8, "cpu", 5)
    last = num_blocks * 3 - 1
    mk.CopyPlan(mk.KVView(rows, "block token dim"), cache).run_slots([0, 1], [last, 4097 * 3])
    assert torch.equal(memory[-1, 2], rows[0, 0]) and torch.equal(memory[4097, 0], rows[0, 1])
    assert not memory[-1, 3].any() and not memory[1].any()


def test_compiles_with_slots_and_block_sizes():
    src, dst = make_view("nhd_per_layer", Sizes(token=2)), make_view("kv_apart", Sizes(), seed=9)
    expected = make_view("kv_apart", Sizes(), seed=9)
    plan, by_reference = mk.CopyPlan(src, dst), mk.CopyPlan(src, expected)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(src_ids, dst_ids, src_slots, dst_slots):
        plan.run(src_ids, dst_ids)
        plan.run_slots(src_slots, dst_slots)

    ids = [torch.tensor(i) for i in ([4, 2], [0], [5, 3], [27, 9])]
    step(*ids)
    by_reference.run(*ids[:2], engine="reference")
    by_reference.run_slots(*ids[2:], engine="reference")
    assert torch.equal(snapshot(dst), snapshot(expected))
