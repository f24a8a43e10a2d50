"""A plan between a GPU and pinned host memory, both ways: bitwise, compared with the reference."""

import pytest
import torch

import mooncake_kernels as mk

from .layouts import LAYOUTS, Sizes, addressed, make_view, snapshot

SIZES = Sizes(layer=2, block=5, head=2, token=2)
TO_GPU = pytest.mark.parametrize("to_gpu", [False, True])


def sides(src_name, dst_name, to_gpu, gpu, **options):
    """Src and dst, one of them on the GPU and the other pinned."""
    places = [{"pinned": True}, {"device": gpu}]
    src_place, dst_place = places if to_gpu else places[::-1]
    src = make_view(src_name, SIZES, **src_place, **options)
    return src, make_view(dst_name, SIZES, seed=100, **dst_place, **options)


def on_host(view):
    """The same in pageable memory, for the reference."""
    copies = [t.cpu().clone(memory_format=torch.preserve_format) for t in view.tensors]
    table = [[copies[i] for i in row] for row in view.layout.tensors]
    if len(table) == 1:
        return mk.KVView(table[0] if len(table[0]) > 1 else table[0][0], view.axes)
    return mk.KVView(table, view.axes)


def planes(view):
    return [view.plane(i, kv).cpu() for i in range(view.num_layers) for kv in range(view.num_kv)]


def check(src, dst, src_ids, dst_ids, method="run", **options):
    expected = on_host(dst)
    by_reference = mk.CopyPlan(on_host(src), expected)
    getattr(by_reference, method)(src_ids, dst_ids, engine="reference")
    plan = mk.CopyPlan(src, dst)
    getattr(plan, method)(src_ids, dst_ids, **options)
    plan.check()
    for ours, theirs in zip(planes(dst), planes(expected), strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@TO_GPU
@pytest.mark.parametrize("src_name", LAYOUTS)
def test_copies_any_layout_to_any_other(gpu, src_name, to_gpu):
    for dst_name in LAYOUTS:
        src, dst = sides(src_name, dst_name, to_gpu, gpu)
        check(src, dst, [4, 0, -1, 2], [1, 3, 2, 0])


@TO_GPU
@pytest.mark.parametrize("max_sms", [None, 1])
def test_copies_slots(gpu, to_gpu, max_sms):
    src, dst = sides("nhd_per_layer", "page_head", to_gpu, gpu)
    check(src, dst, [9, 0, 3], [1, 8, 0], "run_slots", max_sms=max_sms)


@TO_GPU
def test_pageable_memory_is_rejected_when_the_plan_is_made(gpu, to_gpu):
    device, host = make_view("nhd_per_layer", SIZES, device=gpu), make_view("page_first", SIZES)
    name = "src" if to_gpu else "dst"
    with pytest.raises(mk.InvalidArgument, match=rf"CopyPlan: {name} must be .*pin_memory\(\)\)"):
        mk.CopyPlan(*((host, device) if to_gpu else (device, host)))
    before, packed = snapshot(host), torch.zeros(host.packed_shape(1), dtype=host.dtype)
    with pytest.raises(
        mk.InvalidArgument, match="gather_blocks: out must be on cuda:0 or in pinned"
    ):
        mk.gather_blocks(device, [0], out=packed)
    with pytest.raises(mk.InvalidArgument, match="packed must be on cuda:0 or in pinned"):
        mk.scatter_blocks(packed, [0], device)
    with pytest.raises(mk.InvalidArgument, match="view must be on cuda:0 or in pinned"):
        mk.scatter_blocks(packed.cuda(), [0], host)
    assert torch.equal(snapshot(host), before)


@TO_GPU
def test_packed_blocks_on_the_other_side(gpu, to_gpu):
    """The view on the GPU and packed blocks pinned, and the other way round."""
    src, _ = sides("nhd_per_layer", "nhd_per_layer", to_gpu, gpu)
    shape = src.packed_shape(2)
    out = torch.zeros(shape, dtype=src.dtype)
    out = out.pin_memory() if src.device.type == "cuda" else out.cuda()
    mk.gather_blocks(src, [3, 1], out=out)
    torch.cuda.synchronize()
    expected = mk.gather_blocks(on_host(src), [3, 1])
    assert torch.equal(out.cpu().view(torch.uint8), expected.view(torch.uint8))
    mk.scatter_blocks(out, [0, 4], src)
    torch.cuda.synchronize()
    back = mk.gather_blocks(on_host(src), [0, 4])
    assert torch.equal(back.view(torch.uint8), expected.view(torch.uint8))
    with pytest.raises(mk.InvalidArgument, match=r"gather_blocks: block_ids\[1\] .* got 99"):
        mk.gather_blocks(src, [3, 99], out=out)
        torch.cuda.synchronize()
        mk.gather_blocks(src, [3, 1], out=out)


@TO_GPU
def test_bad_id_is_reported_with_its_index(gpu, to_gpu):
    src, dst = sides("nhd_per_layer", "kv_apart", to_gpu, gpu)
    plan = mk.CopyPlan(src, dst)
    plan.run(*(torch.tensor(ids, device=gpu) for ids in ([0, 5], [1, 2])))
    with pytest.raises(mk.InvalidArgument, match=r"src_blocks\[1\] must be .* got 5"):
        plan.check()
    with pytest.raises(mk.InvalidArgument, match=r"src_blocks\[1\] must be .* got 5"):
        plan.run([0, 5], [1, 2])  # checked here


@TO_GPU
def test_transforms_and_checksums_match_the_host(gpu, to_gpu):
    """fp8, RoPE and checksums: what the same plan makes of the same bytes on the CPU."""
    src, dst = sides("nhd_per_layer", "block_first_hnd", to_gpu, gpu)
    for view in (src, dst):
        for tensor in view.tensors:
            tensor.copy_(torch.linspace(-2, 2, tensor.numel()).view(tensor.shape))
    options = {"rope": mk.Rope(1e4), "checksum": True}
    call = {"src_positions": [4, 8], "dst_positions": [9, 8]}
    here_src, here_dst = on_host(src), on_host(dst)
    expected = mk.CopyPlan(here_src, here_dst, **options).run([1, 4], [3, 0], **call)
    plan = mk.CopyPlan(src, dst, **options)
    sums = plan.run([1, 4], [3, 0], **call)
    plan.check()
    assert sums.is_cuda
    for ours, theirs in zip(planes(dst), planes(here_dst), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert torch.equal(mk.CopyPlan(dst, src, checksum=True).run([3, 0], [1, 4]), sums)
    assert torch.equal(mk.checksum_blocks(on_host(dst), [3, 0]), sums.cpu())
    assert expected.shape == sums.shape


def test_tensor_across_two_registrations_is_accepted(gpu):
    """Two registrations side by side hold one tensor."""
    whole = torch.empty(3 * 4096, dtype=torch.uint8)
    start = -whole.data_ptr() % 4096
    pages = whole[start : start + 8192]
    pages.copy_(addressed((8192,), torch.uint8, "cpu", 3))
    cudart = torch.cuda.cudart()
    halves = [pages[:4096].data_ptr(), pages[4096:].data_ptr()]
    for address in halves:
        assert int(cudart.cudaHostRegister(address, 4096, 0)) == 0
    try:
        host = mk.KVView(pages.view(8, 4, 256), "block token dim")
        device = mk.KVView(torch.zeros(8, 4, 256, dtype=torch.uint8, device=gpu), "block token dim")
        plan = mk.CopyPlan(host, device)
        plan.run(range(8), range(8))
        plan.check()
        assert torch.equal(device.tensors[0].cpu(), host.tensors[0])
    finally:
        for address in halves:
            cudart.cudaHostUnregister(address)
    with pytest.raises(mk.InvalidArgument, match="in pageable memory"):
        mk.CopyPlan(host, device)
