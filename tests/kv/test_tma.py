"""Engine tma, which needs a GPU of compute capability 9.0; bitwise, compared with the reference."""

import pytest
import torch

import mooncake_kernels as mk
from mooncake_kernels import _library

from ..conftest import skip
from .layouts import Sizes, make_view
from .test_two_sides_gpu import check, sides

# Rows of 16 bytes, runs of 64 bytes up to some hundred KiB: several chunks of the ring.
SIZES = [Sizes(layer=2, block=5, head=2, token=2), Sizes(layer=2, block=5, token=16, dim=2048)]


@pytest.fixture
def hopper(gpu):
    if torch.cuda.get_device_capability()[0] < 9:
        skip("cuda", "the GPU is older than compute capability 9.0")
    return gpu


@pytest.mark.parametrize("sizes", SIZES, ids=["small", "large"])
@pytest.mark.parametrize("max_sms", [None, 1, 3])
@pytest.mark.parametrize("dst_name", ["nhd_per_layer", "block_first_hnd", "page_first"])
def test_copies_within_a_gpu(hopper, sizes, dst_name, max_sms):
    src = make_view("nhd_per_layer", sizes, device=hopper)
    dst = make_view(dst_name, sizes, device=hopper, seed=60)
    check(src, dst, [4, 0, -1, 2], [1, 3, 2, 0], engine="tma", max_sms=max_sms)
    check(src, dst, [4, 0, -1, 2], [1, 3, 2, 0], "run_slots", engine="tma", max_sms=max_sms)


@pytest.mark.parametrize("to_gpu", [False, True])
def test_copies_to_and_from_host_memory(hopper, to_gpu):
    src, dst = sides("nhd_per_layer", "block_first_hnd", to_gpu, hopper)
    check(src, dst, [4, 0, -1, 2], [1, 3, 2, 0], engine="tma")


def test_ring_wraps_around_over_many_blocks(hopper):
    view = make_view("nhd_per_layer", Sizes(block=2000, token=16, dim=64), device=hopper)
    ids = torch.randperm(2000, device=hopper)
    ours = mk.gather_blocks(view, ids, engine="tma", max_sms=2)
    assert torch.equal(ours.view(torch.uint8), mk.gather_blocks(view, ids).view(torch.uint8))


def test_bad_id_is_reported_with_its_index(hopper):
    src, dst = (make_view("nhd_per_layer", SIZES[0], device=hopper, seed=s) for s in (1, 60))
    plan = mk.CopyPlan(src, dst)
    plan.run(*(torch.tensor(ids, device=hopper) for ids in ([0, 5], [1, 2])), engine="tma")
    with pytest.raises(mk.InvalidArgument, match=r"src_blocks\[1\] must be .* got 5"):
        plan.check()


def test_copy_is_captured_into_a_graph(hopper):
    src, dst = (make_view("nhd_per_layer", SIZES[1], device=hopper, seed=s) for s in (1, 60))
    ids = [torch.tensor(i, device=hopper) for i in ([4, 1], [0, 2])]
    plan = mk.CopyPlan(src, dst)
    plan.run(*ids, engine="tma")  # once before, as graphs want it
    dst.tensors[0].zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(*ids, engine="tma")
    graph.replay()
    plan.check()
    assert torch.equal(dst.plane(0, 1)[2].view(torch.uint8), src.plane(0, 1)[1].view(torch.uint8))


def test_unaligned_runs_are_rejected(hopper):
    odd = Sizes(layer=1, block=3, head=1, token=2, dim=7)
    src, dst = (make_view("nhd_per_layer", odd, device=hopper, seed=s) for s in (1, 60))
    before = dst.tensors[0].clone()
    with pytest.raises(
        mk.InvalidArgument, match="engine tma must be given runs at multiples of 16"
    ):
        mk.CopyPlan(src, dst).run([0], [1], engine="tma")
    assert torch.equal(dst.tensors[0].view(torch.uint8), before.view(torch.uint8))


def test_engine_needs_a_gpu_and_only_moves_bytes():
    view = make_view("nhd_per_layer", SIZES[0])
    message = "engine tma(: _ops.so was built without nvcc| must be given cuda tensors)"
    with pytest.raises((mk.InvalidArgument, mk.Unavailable), match=message):
        mk.gather_blocks(view, [0], engine="tma")
    with pytest.raises(mk.Unavailable, match="engine tma: it moves bytes"):
        mk.checksum_blocks(view, [0], engine="tma")
    plan = view.packed.gather_plan.resolved(view.tensors, [])
    with pytest.raises(mk.InvalidArgument, match="bulk must be false for ids on the CPU"):
        _library.call(_library.copy_resolved, plan, 0, 0, torch.tensor([0]), None, 0, 0, True)
