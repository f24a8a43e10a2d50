"""Caches that share memory: a run is refused if it reads what it writes, and only then."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mooncake_kernels as mk
from mooncake_kernels.bad_ids import SHARED, BadIds
from mooncake_kernels.kv.overlap import shared_ids, unless_shared

from .layouts import PACKED_AXES, snapshot

ORDERS = st.permutations(["block", "layer", "head", "token"])


def view_of(memory, axes, sizes, offset):
    shape = [sizes[axis] for axis in axes] + [sizes["dim"]]
    count = torch.Size(shape).numel()
    return mk.KVView(memory[offset : offset + count].view(shape), " ".join([*axes, "dim"]))


def touched(places, blocks):
    """Every element of the named blocks, by its place in memory."""
    return set(mk.gather_blocks(places, blocks).flatten().tolist())


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_overlap_is_rejected_if_and_only_if_bytes_are_shared(data):
    memory = torch.arange(4000, dtype=torch.int16)
    sizes = {"block": 4, "layer": 2, "head": 2, "dim": 3}
    views, places = [], []
    for name in ("src", "dst"):
        of_side = sizes | {"token": 2}
        offset = data.draw(st.integers(0, 150), f"{name} begins")
        axes = data.draw(ORDERS, f"{name} axes")
        views.append(view_of(memory, axes, of_side, offset))
        places.append(view_of(torch.arange(4000), axes, of_side, offset))
    src, dst = views
    ids = st.permutations(range(4))
    src_ids, dst_ids = data.draw(ids)[:2], data.draw(ids)[:2]
    if data.draw(st.booleans()):
        src_ids[0] = dst_ids[0] = -1
    copied = [[i for i in side if i >= 0] for side in (src_ids, dst_ids)]
    overlaps = bool(touched(places[0], copied[0]) & touched(places[1], copied[1]))
    before = memory.clone()
    checksum = data.draw(st.booleans())
    plan = mk.CopyPlan(src, dst, checksum=checksum)
    if overlaps:
        with pytest.raises(mk.InvalidArgument, match="dst_blocks must not"):
            plan.run(src_ids, dst_ids)
        assert torch.equal(memory, before)
    else:
        expected = mk.gather_blocks(src, [i for i in src_ids if i >= 0], axes=PACKED_AXES)
        plan.run(src_ids, dst_ids)
        got = mk.gather_blocks(dst, [i for i in dst_ids if i >= 0], axes=PACKED_AXES)
        assert torch.equal(got, expected)


def test_overlap_of_slots_several_views_and_block_sizes():
    memory = torch.zeros(64, 8, dtype=torch.int16)
    src = mk.KVView(memory[:32].view(8, 4, 8), "block token dim")
    dst = mk.KVView(memory[24:].view(5, 8, 8), "block token dim")
    plan = mk.CopyPlan(src, dst)
    plan.run_slots([23, 0], [0, 1])
    plan.run([5, 4], [0])
    with pytest.raises(mk.InvalidArgument, match="dst_slots must not share memory"):
        plan.run_slots([24], [0])
    with pytest.raises(mk.InvalidArgument, match="dst_blocks must not share memory .* 0x"):
        plan.run([6], [0])
    with pytest.raises(mk.InvalidArgument, match=r"src_blocks\[0\] must be -1 or in \[0, 8\)"):
        plan.run([9], [0])
    apart = mk.KVView(torch.zeros(8, 4, 8, dtype=torch.int16), "block token dim")
    other = mk.KVView(torch.zeros(5, 8, 8, dtype=torch.int16), "block token dim")
    both = mk.CopyPlan([src, apart], [other, dst])  # what the first reads, the second writes
    before = snapshot(dst)
    with pytest.raises(mk.InvalidArgument, match="dst_blocks must not share memory"):
        both.run([6, 7], [0])
    assert torch.equal(snapshot(dst), before)
    both.run([4, 5], [0])


def test_empty_layer_selection_never_overlaps():
    memory = torch.arange(356, dtype=torch.int16)
    src, dst = (mk.KVView(memory[at:][:256].view(2, 4, 32), "layer block dim") for at in (0, 100))
    plan, before = mk.CopyPlan(src, dst), memory.clone()
    plan.run([0, 1], [0, 1], layers=[])
    assert torch.equal(memory, before)
    with pytest.raises(mk.InvalidArgument, match="must not share memory"):
        plan.run([0, 3], [0, 1], layers=[0])


@given(st.lists(st.tuples(st.integers(-2, 6), st.integers(-2, 6)), max_size=8), st.booleans())
@settings(max_examples=200, deadline=None)
def test_ids_both_read_and_written_are_found(pairs, short):
    src, dst = (
        torch.tensor(pairs, dtype=torch.int32 if short else torch.int64).view(-1, 2).unbind(1)
    )
    copied = [i for i, pair in enumerate(pairs) if all(0 <= side < 5 for side in pair)]
    read = {pairs[i][0] for i in copied}
    shared = [i in copied and pairs[i][1] in read for i in range(len(pairs))]
    assert shared_ids(src, dst, 5).tolist() == shared
    for_kernel = unless_shared(dst, shared_ids(src, dst, 5))
    assert for_kernel.dtype == dst.dtype
    assert for_kernel.tolist() == ([SHARED] * len(pairs) if any(shared) else dst.tolist())


def test_kernel_report_of_shared_memory_is_raised():
    bad = BadIds(torch.device("cpu"), ("src_blocks", "dst_blocks"), (8, 8))
    bad.words[:] = torch.tensor([2, 5, SHARED])
    with pytest.raises(mk.InvalidArgument, match="^dst_blocks must not share memory .* nothing"):
        bad.raise_if_any()


@pytest.mark.parametrize("captured", [False, True])
def test_overlap_of_ids_on_a_gpu(gpu, captured):
    memory = torch.arange(64 * 8, device=gpu).view(64, 8).short()
    before = memory.clone()
    whole = mk.KVView(memory.view(16, 4, 8), "block token dim")
    part = mk.KVView(memory[32:].view(4, 8, 8), "block token dim")
    one, two = mk.CopyPlan(whole, mk.KVView(whole.tensors, whole.axes)), mk.CopyPlan(whole, part)

    def run(plan, *ids):
        src, dst = (torch.tensor(side, device=gpu) for side in ids)
        if not captured:
            return plan.run(src, dst)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            plan.run(src, dst)
        graph.replay()

    for plan, ids in ((one, ([1, 2, 3], [5, 3, 6])), (two, ([4, 10, 0, 1], [2, 1]))):
        run(plan, *ids)
        with pytest.raises(mk.InvalidArgument, match="dst_blocks must not share memory"):
            plan.check()
        assert torch.equal(memory, before)
    run(one, [1, -1], [5, 1])
    run(two, [2, 3, 0, 1], [3, 2])
    one.check(), two.check()
    expected = before.clone()
    expected[20:24] = before[4:8]
    expected[56:64], expected[48:56] = before[8:16], before[0:8]
    assert torch.equal(memory, expected)


def test_packed_blocks_inside_the_cache_are_rejected():
    cache = torch.arange(2 * 6 * 4 * 8, dtype=torch.int16).view(6, 2, 4, 8)
    view = mk.KVView(cache[:, :1], "block layer token dim")  # next to it in each block: free memory
    before = cache.clone()
    inside = cache[3, 0].view(view.packed_shape(1))
    for ids in ([3], torch.tensor([5, 3, -1])[1:2]):
        with pytest.raises(mk.InvalidArgument, match="gather_blocks: out must not share memory"):
            mk.gather_blocks(view, ids, out=inside)
        with pytest.raises(mk.InvalidArgument, match="scatter_blocks: packed must not share"):
            mk.scatter_blocks(inside, ids, view)
    flat = cache.view(-1)[40:][: 2 * 32].view(view.packed_shape(2))  # the end of the first block
    with pytest.raises(mk.InvalidArgument, match="out must not share memory .* 0x"):
        mk.gather_blocks(view, [1, 5], out=flat)
    assert torch.equal(cache, before)
    mk.gather_blocks(view, [4], out=inside)  # another block, as far as the ids tell
    between = cache[2, 1].view(view.packed_shape(1))
    mk.gather_blocks(view, [5], out=between)
    assert torch.equal(cache[2, 1], before[5, 0]) and torch.equal(cache[3, 0], before[4, 0])
    whole = mk.KVView([torch.zeros(2, 8), torch.zeros(2, 8)], "block dim")
    mk.gather_blocks(whole, [], out=torch.zeros(whole.packed_shape(0)))
