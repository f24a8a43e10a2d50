"""The parts of copy_engine and two_hop that need no GPU: their lists and layouts, on the CPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mooncake_kernels as mk
from mooncake_kernels.kv import execute_listed, two_hop
from mooncake_kernels.kv.execute import Packed, as_ids

from .checks import twin
from .layouts import LAYOUTS, Sizes, addressed, make_view, snapshot

SIZES = Sizes(layer=2, block=5, head=2, token=2)
NO_GPU = -1


def listed(plan, src, dst, *ids):
    execute_listed.copy_listed(plan, src, dst, *ids, execute_listed.EACH, NO_GPU)


def hops(to_host, staging_bytes=1 << 20, min_copy_bytes=0):
    def copy(plan, src, dst, *ids):
        limits = {"staging_bytes": staging_bytes, "min_copy_bytes": min_copy_bytes}
        two_hop.copy_in_two_hops(plan, src, dst, *ids, 0, 0, NO_GPU, to_host=to_host, **limits)

    return copy


def check(copy, src, dst, src_ids, dst_ids, by_slot=False, **options):
    expected = twin(dst)
    method = "run_slots" if by_slot else "run"
    getattr(mk.CopyPlan(src, expected, **options), method)(src_ids, dst_ids, engine="reference")
    (part,) = mk.CopyPlan(src, dst, **options)._copying.parts
    ids = [torch.tensor(i, dtype=torch.int32) for i in (src_ids, dst_ids)]
    copy(part.plan("test", None, by_slot), src, dst, *ids)
    assert torch.equal(snapshot(dst), snapshot(expected))


@pytest.mark.parametrize("src_name", LAYOUTS)
@pytest.mark.parametrize("copy", [listed, hops(True), hops(False)], ids=["list", "d2h", "h2d"])
def test_lists_copy_any_layout_to_any_other(copy, src_name):
    src = make_view(src_name, SIZES)
    for dst_name in LAYOUTS:
        dst = make_view(dst_name, SIZES, seed=100)
        check(copy, src, dst, [4, 0, -1, 2], [1, 3, 2, 0])


@pytest.mark.parametrize("to_host", [False, True])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_staging_copies_one_bufferful_at_a_time(to_host, blocks):
    src, dst = make_view("nhd_per_layer", SIZES), make_view("page_first", SIZES, seed=9)
    copy = hops(to_host, blocks * src.block_bytes + 1)
    check(copy, src, dst, [0, 1, 2, -1, 4], [4, 3, -1, 2, 0])
    plan = mk.CopyPlan(src, dst)._copying.parts[0].plan("test", None, False)
    for ids in ([0, 1, 2], [4, 4, 3], []):
        copy(plan, src, dst, torch.tensor(ids, dtype=torch.int64), torch.arange(len(ids)))


AXES = st.permutations(["layer", "kv", "block", "head", "token"])


@given(src_axes=AXES, dst_axes=AXES, data=st.data())
@settings(max_examples=60, deadline=None)
def test_lists_copy_selected_layers_and_heads_of_any_axis_order(src_axes, dst_axes, data):
    sizes = {"layer": 3, "kv": 2, "block": 4, "head": 3, "token": 2, "dim": 3}
    src, dst = (
        mk.KVView(
            addressed(tuple(sizes[a] for a in (*axes, "dim")), torch.int16, "cpu", seed),
            " ".join([*axes, "dim"]),
        )
        for axes, seed in ((src_axes, 1), (dst_axes, 50))
    )
    options = {"layers": [(0, 2), (2, 1)], "src_heads": slice(1, 3), "dst_heads": slice(0, 2)}
    dst_ids = data.draw(st.permutations(range(4)))
    src_ids = data.draw(st.lists(st.integers(-1, 3), min_size=4, max_size=4))
    copy = data.draw(st.sampled_from([listed, hops(True, 200), hops(False, 200)]))
    check(copy, src, dst, src_ids, dst_ids, **options)


def test_slots_are_listed_and_adjacent_ones_merged():
    src, dst = make_view("nhd_per_layer", SIZES), make_view("kv_apart", SIZES, seed=9)
    check(listed, src, dst, [1, 2, 3, -1, 9], [4, 5, 6, 0, 0], by_slot=True)
    plan = mk.CopyPlan(src, dst)._copying.parts[0].plan("test", None, True)
    ids = torch.tensor([1, 2, 3, 9]), torch.tensor([4, 5, 6, 0])
    count = execute_listed.copy_listed(plan, src, dst, *ids, execute_listed.COUNT, NO_GPU)
    assert count == 2 * 2 * 2  # layers, k and v, two rows of slots
    with pytest.raises(mk.InvalidArgument, match=r"two_hop must be given blocks .* got slots"):
        hops(True)(plan, src, dst, *ids)


@pytest.mark.parametrize("copy", [listed, hops(True), hops(False)], ids=["list", "d2h", "h2d"])
def test_lists_copy_packed_blocks(copy):
    view = make_view("nhd_per_layer", SIZES, dtype=torch.int16)
    ids = torch.tensor([3, -1, 0, 3, 4, 1, 1])  # more than there are blocks
    out = torch.full(view.packed_shape(len(ids)), 7, dtype=view.dtype)
    expected = mk.gather_blocks(view, ids, out=out.clone())
    copy(view.packed.gather_plan, view, Packed(out, out.data_ptr()), ids, None)
    assert torch.equal(out, expected)
    dst = make_view("page_head", SIZES, dtype=torch.int16, seed=9)
    wanted = twin(dst)
    back = torch.tensor([2, -1, 4, 0, -1, 1, -1])
    mk.scatter_blocks(expected, back, wanted)
    copy(dst.packed.scatter_plan, Packed(expected, expected.data_ptr()), dst, None, back)
    assert torch.equal(snapshot(dst), snapshot(wanted))


@pytest.mark.parametrize("copy", [listed, hops(True), hops(False)], ids=["list", "d2h", "h2d"])
def test_bad_id_is_found_before_any_byte_moves(copy):
    src, dst = make_view("nhd_per_layer", SIZES), make_view("page_first", SIZES, seed=9)
    before = snapshot(dst)
    plan = mk.CopyPlan(src, dst)._copying.parts[0].plan("test", None, False)
    with pytest.raises(mk.InvalidArgument, match=r"run: dst_blocks\[1\] must be .* 5\), got 5"):
        copy(plan, src, dst, torch.tensor([0, 1]), torch.tensor([0, 5]))
    assert torch.equal(snapshot(dst), before)


def test_two_hops_require_a_host_side_with_large_ranges():
    view = make_view("nhd_per_layer", SIZES)
    host = make_view("block_first_hnd", SIZES, seed=9)
    plan = mk.CopyPlan(view, host)._copying.parts[0].plan("test", None, False)
    ids = torch.tensor([0, 2, 4])
    hops(True, min_copy_bytes=view.block_bytes)(plan, view, host, ids, ids)
    before = snapshot(host)
    message = rf"dst must be contiguous in host memory over {view.block_bytes + 1} bytes .* 3 rang"
    with pytest.raises(mk.InvalidArgument, match=message):
        hops(True, min_copy_bytes=view.block_bytes + 1)(plan, view, host, ids, ids + 0)
    assert torch.equal(snapshot(host), before)
    other = make_view("block_first_hnd", Sizes(layer=2, block=3, head=2, token=4), seed=9)
    plan = mk.CopyPlan(view, other)._copying.parts[0].plan("test", None, False)
    with pytest.raises(mk.InvalidArgument, match="sides of one block_size, got 2 and 4"):
        hops(True)(plan, view, other, torch.tensor([0, 1]), torch.tensor([0]))


@pytest.mark.parametrize("engine", ["copy_engine", "two_hop"])
def test_list_engines_need_a_gpu_and_only_move_bytes(engine):
    view = make_view("nhd_per_layer", SIZES)
    message = f"engine {engine}(: _ops.so was built without nvcc| must be given cuda tensors)"
    with pytest.raises((mk.InvalidArgument, mk.Unavailable), match=message):
        mk.gather_blocks(view, [0], engine=engine)
    with pytest.raises(mk.Unavailable, match=f"engine {engine}: it moves bytes"):
        mk.CopyPlan(view, make_view("kv_apart", SIZES), checksum=True).run([0], [0], engine=engine)
    ids = torch.zeros(1, dtype=torch.int64, device="meta")
    with pytest.raises(mk.InvalidArgument, match=rf"ids must be on the CPU for engine {engine}"):
        as_ids("ids", ids, torch.device("cpu"), engine)
