"""Copies on streams of a GPU: concurrent, in sequence, from threads, and in CUDA graphs."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

import mooncake_kernels as mk

from ..threads import in_threads
from .layouts import Sizes, make_view

SIZES = Sizes(layer=4, block=64, head=4, token=16, dim=64)
NUM_STREAMS, ROUNDS = 4, 20


def two_caches(gpu, **options):
    src = make_view("nhd_per_layer", SIZES, device=gpu, **options)
    return src, make_view("block_first_hnd", SIZES, device=gpu, seed=50, **options)


def same_blocks(src, dst, src_ids, dst_ids):
    pairs = [(layer, kv) for layer in range(SIZES.layer) for kv in range(SIZES.kv)]
    return all(
        torch.equal(
            dst.plane(*pair)[dst_ids].view(torch.uint8), src.plane(*pair)[src_ids].view(torch.uint8)
        )
        for pair in pairs
    )


def clear(view):
    for tensor in view.tensors:
        tensor.zero_()


@pytest.mark.parametrize("threads", [False, True])
def test_concurrent_streams_do_not_interfere(gpu, threads):
    """One plan, of which each stream copies blocks of its own, again and again."""
    src, dst = two_caches(gpu)
    clear(dst)
    plan = mk.CopyPlan(src, dst)
    ids = torch.randperm(SIZES.block, device=gpu).chunk(NUM_STREAMS)
    targets = torch.randperm(SIZES.block, device=gpu).chunk(NUM_STREAMS)
    streams = [torch.cuda.Stream(gpu) for _ in range(NUM_STREAMS)]
    torch.cuda.synchronize(gpu)

    def copy(i):
        with torch.cuda.stream(streams[i]):
            for _ in range(ROUNDS):
                plan.run(ids[i], targets[i], max_sms=i or None)

    if threads:
        in_threads(*(partial(copy, each) for each in range(NUM_STREAMS)))
    else:
        for i in range(NUM_STREAMS):
            copy(i)
    torch.cuda.synchronize(gpu)
    plan.check()
    assert same_blocks(src, dst, torch.cat(ids), torch.cat(targets))


def test_copy_is_ordered_after_the_work_its_stream_waits_for(gpu):
    """A slow write on one stream, a copy on the next, and one on from there on a third."""
    src, dst = two_caches(gpu, dtype=torch.float16)
    last = make_view("page_head", SIZES, device=gpu, seed=9, dtype=torch.float16)
    there, back = mk.CopyPlan(src, dst), mk.CopyPlan(dst, last)
    ids = torch.randperm(SIZES.block, device=gpu)
    writes, first, second = (torch.cuda.Stream(gpu) for _ in range(3))
    for value in range(ROUNDS):
        writes.wait_stream(second)
        with torch.cuda.stream(writes):
            torch.cuda._sleep(1_000_000)
            for tensor in src.tensors:
                tensor.fill_(value)
        first.wait_stream(writes)
        with torch.cuda.stream(first):
            there.run(ids, ids)
        second.wait_stream(first)
        with torch.cuda.stream(second):
            back.run(ids, ids)
        second.synchronize()
        assert all(bool((tensor == value).all()) for tensor in last.tensors), value


@pytest.mark.parametrize("way", ["run", "run_slots", "gather_blocks", "fp8"])
def test_a_graph_reads_its_ids_at_each_replay(gpu, way):
    src, dst = two_caches(gpu, dtype=torch.bfloat16)
    if way == "fp8":
        src, dst = (
            mk.KVView([torch.randn(2, 64, 16, 4, 64, device=gpu).to(dtype)], view_axes)
            for dtype, view_axes in [
                (torch.bfloat16, "kv block token head dim"),
                (torch.float8_e4m3fn, "kv block token head dim"),
            ]
        )
    plan = mk.CopyPlan(src, dst, convert=mk.Fp8(0.5) if way == "fp8" else None)
    ids, targets = (torch.arange(4, device=gpu) for _ in range(2))
    packed = torch.empty(src.packed_shape(4), dtype=src.dtype, device=gpu)

    def copy():
        if way == "gather_blocks":
            mk.gather_blocks(src, ids, out=packed)
        else:
            getattr(plan, "run_slots" if way == "run_slots" else "run")(ids, targets)

    copy()  # once before, as graphs want it
    torch.cuda.synchronize(gpu)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy()
    for round_ in range(3):
        ids.copy_(torch.randperm(SIZES.block)[:4])
        targets.copy_(torch.randperm(SIZES.block)[:4])
        clear(dst)
        packed.zero_()
        graph.replay()
        torch.cuda.synchronize(gpu)
        got = [tensor.clone() for tensor in (*dst.tensors, packed)]
        clear(dst)
        packed.zero_()
        copy()
        plan.check()
        assert any(bool(tensor.view(torch.uint8).any()) for tensor in got)
        for replayed, eager in zip(got, (*dst.tensors, packed), strict=True):
            assert torch.equal(replayed.view(torch.uint8), eager.view(torch.uint8)), round_
    if way in ("run", "run_slots"):
        ids[2] = 1 << 30
        graph.replay()
        with pytest.raises(mk.InvalidArgument, match=r"src_(blocks|slots)\[2\] must be"):
            plan.check()


def test_captured_copy_rejects_pageable_ids(gpu):
    plan = mk.CopyPlan(*two_caches(gpu))
    plan.run([0], [1])
    pinned = torch.tensor([0]).pin_memory()
    torch.cuda.synchronize(gpu)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(pinned, pinned)
        for engine in ("auto", "copy_engine", "two_hop"):
            with pytest.raises(mk.InvalidArgument, match="graph"):
                plan.run([0], [1], engine=engine)
    graph.replay()
    plan.check()


def test_copy_engine_works_in_a_thread_without_a_context(gpu):
    """A thread that has not called CUDA's runtime has no current context."""
    src, dst = two_caches(gpu)
    plan, stream = mk.CopyPlan(src, dst), torch.cuda.Stream(gpu)
    torch.cuda.synchronize(gpu)

    def copy():
        with torch.cuda.stream(stream):
            plan.run([3, 5], [1, 2], engine="copy_engine")

    with ThreadPoolExecutor(1) as pool:
        pool.submit(copy).result()
    stream.synchronize()
    assert same_blocks(src, dst, [3, 5], [1, 2])
