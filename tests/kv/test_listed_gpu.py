"""copy_engine and two_hop on a GPU: bitwise, compared with the reference."""

import pytest
import torch

import mooncake_kernels as mk

from .layouts import LAYOUTS, Sizes, make_view, snapshot
from .test_two_sides_gpu import check, on_host, planes, sides

SIZES = Sizes(layer=2, block=5, head=2, token=2)
LARGE = Sizes(layer=2, block=5, head=2, token=16, dim=1024)  # 32 KiB and more at a time
TO_GPU = pytest.mark.parametrize("to_gpu", [False, True])


@pytest.fixture
def stream(gpu):
    """Not the default stream, which no copy engine takes."""
    stream = torch.cuda.Stream(gpu)
    stream.wait_stream(torch.cuda.current_stream(gpu))
    with torch.cuda.stream(stream):
        yield stream
        stream.synchronize()


@TO_GPU
@pytest.mark.parametrize("src_name", LAYOUTS)
def test_copy_engine_copies_any_layout(stream, gpu, src_name, to_gpu):
    for dst_name in LAYOUTS:
        src, dst = sides(src_name, dst_name, to_gpu, gpu)
        check(src, dst, [4, 0, -1, 2], [1, 3, 2, 0], engine="copy_engine")


def test_copy_engine_within_a_gpu_and_by_slots(stream, gpu):
    src, dst = (make_view("nhd_per_layer", SIZES, device=gpu, seed=seed) for seed in (1, 50))
    check(src, dst, [4, 0, -1, 2], [1, 3, 2, 0], engine="copy_engine")
    check(src, dst, [1, 2, 3, 9], [4, 5, 6, 0], "run_slots", engine="copy_engine")


@TO_GPU
@pytest.mark.parametrize("host_name", ["block_first_hnd", "page_first", "universal"])
@pytest.mark.parametrize("max_sms", [None, 1])
def test_two_hops_copy_to_and_from_pinned_memory(gpu, host_name, to_gpu, max_sms):
    """On the default stream, too."""
    places = [
        make_view(host_name, LARGE, pinned=True, seed=1 if to_gpu else 70),
        make_view("nhd_per_layer", LARGE, device=gpu, seed=70 if to_gpu else 1),
    ]
    src, dst = places if to_gpu else places[::-1]
    check(src, dst, [4, 0, -1, 2, 3], [1, 2, 4, 3, 0], engine="two_hop", max_sms=max_sms)


def test_two_hops_copy_packed_blocks(gpu):
    view = make_view("nhd_per_layer", LARGE, device=gpu, dtype=torch.int16)
    out = torch.zeros(view.packed_shape(3), dtype=view.dtype).pin_memory()
    mk.gather_blocks(view, [3, 1, 3], out=out, engine="two_hop")
    torch.cuda.synchronize()
    assert torch.equal(out, mk.gather_blocks(on_host(view), [3, 1, 3]))
    mk.scatter_blocks(out, [0, -1, 4], view, engine="two_hop")
    torch.cuda.synchronize()
    assert all(torch.equal(p[4], p[3]) for p in planes(view))


@pytest.mark.parametrize("engine", ["copy_engine", "two_hop"])
def test_bad_and_device_side_ids_are_rejected(stream, gpu, engine):
    src, dst = sides("nhd_per_layer", "block_first_hnd", False, gpu)
    plan = mk.CopyPlan(src, dst)
    before = snapshot(dst)
    with pytest.raises(mk.InvalidArgument, match=r"src_blocks\[1\] must be .* got 5"):
        plan.run([0, 5], [1, 2], engine=engine)
    with pytest.raises(mk.InvalidArgument, match=f"must be on the CPU for engine {engine}"):
        plan.run(torch.tensor([0], device=gpu), [1], engine=engine)
    stream.synchronize()
    assert torch.equal(snapshot(dst), before)


def test_default_stream_and_single_device_are_rejected(gpu):
    src, dst = sides("nhd_per_layer", "block_first_hnd", False, gpu)
    with pytest.raises(mk.InvalidArgument, match="current stream must not be the default"):
        mk.CopyPlan(src, dst).run([0], [1], engine="copy_engine")
    with pytest.raises(mk.InvalidArgument, match="two_hop must be given one side in pinned host"):
        mk.CopyPlan(src, src).run([0], [1], engine="two_hop")
    with pytest.raises(mk.InvalidArgument, match="two_hop: dst must be contiguous .*engine cuda"):
        narrow = make_view("nhd_per_layer", SIZES, pinned=True)
        mk.CopyPlan(src, narrow).run([0], [1], engine="two_hop")
