"""copy_batch: what it refuses, its messages, and torch.compile."""

import logging

import pytest
import torch

import mooncake_kernels as mk
from mooncake_kernels import _library

from .batches import GPU_ENGINES, memory, run

A, B = 1 << 20, 1 << 21  # addresses that are never looked at


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ((A, B, -1), r"sizes\[2\] must be in \[0, 2\*\*47\], got -1"),
        ((A, B, 1 << 60), r"sizes\[2\] must be in \[0, 2\*\*47\], got 1152921504606846976"),
        ((0, B, 8), r"src_ptrs\[2\] must be an address, got 0"),
        ((A, 0, 8), r"dst_ptrs\[2\] must be an address, got 0"),
        ((A, -8, 8), r"dst_ptrs\[2\] must be an address, got -8"),
        (((1 << 63) - 8, B, 64), r"src_ptrs\[2\] must be an address, got 9223372036854775800"),
        ((A, A, 1), r"dst_ptrs\[2\] must not overlap the 1 bytes at 0x100000, got 0x100000"),
        ((A, A + 7, 8), r"dst_ptrs\[2\] must not overlap the 8 bytes at 0x100000, got 0x100007"),
        ((A + 7, A, 8), r"dst_ptrs\[2\] must not overlap the 8 bytes at 0x100007, got 0x100000"),
    ],
)
def test_bad_entries_are_rejected_before_any_byte_moves(engine, entry, message):
    src, dst = memory(64, engine, seed=1), memory(64, engine)
    good = (src.data_ptr(), dst.data_ptr(), 16)
    columns = torch.tensor([good, (0, 0, 0), entry, good]).unbind(1)
    with pytest.raises(mk.InvalidArgument, match=f"copy_batch: {message}"):
        mk.copy_batch(*columns, engine=engine)
    if engine in GPU_ENGINES:
        torch.cuda.synchronize()
    assert set(dst.tolist()) == {0x77}


GOOD = torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((GOOD, GOOD[:1], GOOD), r"dst_ptrs must have as many values as src_ptrs \(2\), got 1"),
        ((GOOD, GOOD, torch.zeros(3, dtype=torch.int64)), "sizes must have as many values"),
        ((GOOD.int(), GOOD, GOOD), "src_ptrs must be 1-d int64 on the CPU, got torch.int32"),
        ((GOOD, GOOD.view(1, 2), GOOD), r"dst_ptrs must be 1-d .* of shape \(1, 2\)"),
        ((GOOD, GOOD, GOOD.to("meta")), "sizes must be 1-d int64 on the CPU, .* on meta"),
        ((GOOD, GOOD, [0, 0]), "sizes must be a tensor, got list"),
    ],
)
def test_copy_batch_rejects_bad_tensors(engine, arguments, message):
    with pytest.raises(mk.InvalidArgument, match=f"copy_batch: {message}"):
        mk.copy_batch(*arguments, engine=engine)


def test_copy_batch_rejects_bad_options():
    with pytest.raises(mk.InvalidArgument, match="engine must be one of .* got 'triton'"):
        mk.copy_batch(GOOD, GOOD, GOOD, engine="triton")
    with pytest.raises(mk.InvalidArgument, match="max_sms must be None or an integer .* got 0"):
        mk.copy_batch(GOOD, GOOD, GOOD, max_sms=0)
    with pytest.raises(mk.InvalidArgument, match="order_any must be True or False, got 'no'"):
        mk.copy_batch(GOOD, GOOD, GOOD, "no")


@pytest.mark.parametrize("name", GPU_ENGINES)
def test_pageable_memory_is_rejected_by_gpu_engines(name):
    src, dst = torch.zeros(16, dtype=torch.uint8), torch.ones(16, dtype=torch.uint8)
    columns = [torch.tensor([x]) for x in (src.data_ptr(), dst.data_ptr(), 16)]
    if not _library.has_cuda:
        with pytest.raises(mk.Unavailable, match="built without nvcc"):
            mk.copy_batch(*columns, engine=name)
        return
    message = r"src_ptrs\[0\] must be in a GPU's memory or pinned, got 0x.* in pageable memory"
    with pytest.raises(mk.InvalidArgument, match=message):
        mk.copy_batch(
            *(torch.tensor([x.data_ptr()]) for x in (src, dst)), GOOD[:1] + 16, engine=name
        )
    assert dst.all()


def test_auto_picks_the_host_for_host_memory_and_logs_it_once(caplog):
    src, dst = memory(64, "host", seed=1), memory(64, "host")
    _library._logged.clear()
    with caplog.at_level(logging.INFO, logger="mooncake_kernels"):
        run(src, dst, [(0, 0, 64)], "auto")
        run(src, dst, [(0, 0, 64)], "auto")
    assert caplog.messages == ["engine auto: host for copy_batch"]
    assert torch.equal(src, dst)


def test_copy_batch_runs_outside_the_compiled_graph():
    src, dst = memory(64, "host", seed=1), memory(64, "host")

    @torch.compile(backend="aot_eager")
    def step(x):
        y = x + 1
        run(src, dst, [(0, 0, 64)], "host")
        return 2 * y

    assert torch.equal(step(torch.zeros(2)), torch.full((2,), 2.0))
    assert torch.equal(src, dst)


def test_opcheck():
    src, dst = memory(64, "host", seed=1), memory(64, "host")
    table = [torch.tensor([value]) for value in (src.data_ptr(), dst.data_ptr(), 64)]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(_library.copy_batch, (*table, False, 1, 0), test_utils=tests)
