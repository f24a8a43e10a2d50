"""A plan between a GPU and host memory, as far as it can be tested without a GPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mooncake_kernels as mk
from mooncake_kernels import _library
from mooncake_kernels.kv.layout import HEADER

from .layouts import Sizes, make_view

SIZES = Sizes()


def on_gpu():
    """A view of tensors that have no memory; to be called in a FakeTensorMode."""
    shape = (SIZES.kv, SIZES.block, SIZES.token, SIZES.head, SIZES.dim)
    layers = [torch.empty(shape, dtype=torch.float16, device="cuda") for _ in range(SIZES.layer)]
    return mk.KVView(layers, "kv block token head dim")


def test_pageable_memory_has_no_address_on_a_gpu():
    assert _library.gpu_address(torch.zeros(8)) == 0
    assert _library.gpu_address(torch.zeros(0)) == torch.zeros(0).data_ptr()
    view = make_view("nhd_per_layer", SIZES)
    plan = view.packed.gather_plan.values
    table = torch.zeros(HEADER + (plan.numel() - HEADER) // 2, dtype=torch.int64)
    message = r"src must be on the GPU or in pinned .* \(pin_memory\(\)\), got tensor 0 in pageable"
    with pytest.raises(mk.InvalidArgument, match=message):
        _library.call(_library.resolve_copy_plan, view.tensors, [], plan, table, 0, 0)
    assert not table.any()


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("to_gpu", [False, True])
def test_a_plan_with_one_side_on_a_gpu_runs_there(monkeypatch, to_gpu, checksum):
    with FakeTensorMode():
        device = on_gpu()
        host = make_view("page_first_direct", SIZES)
        sides = (host, device) if to_gpu else (device, host)
        called = []
        for name in ("copy_blocks", "transform_blocks"):
            monkeypatch.setattr(_library, name, lambda *a, n=name: called.append((n, a)))
        monkeypatch.setattr(_library, "has_cuda", True)
        plan = mk.CopyPlan(*sides, checksum=checksum)
        assert plan._copying.device == torch.device("cuda:0")
        plan.run([1, 2], [3, 4])
        ((name, arguments),) = called
        assert name == ("transform_blocks" if checksum else "copy_blocks")
        ids = arguments[4 if checksum else 3]
        assert ids.device == torch.device("cuda:0")
        for engine in ("host", "triton"):
            with pytest.raises((mk.InvalidArgument, mk.Unavailable), match=f"engine {engine}"):
                plan.run([1, 2], [3, 4], engine=engine)


def test_graph_capture_rejects_inputs_in_pageable_memory(monkeypatch):
    """Of pageable memory a graph would keep the address, and read at each replay what is there."""
    with FakeTensorMode():
        device = on_gpu()
        host = make_view("page_first_direct", SIZES)
        plan, sums = mk.CopyPlan(host, device), mk.CopyPlan(host, device, checksum=True)
        for name in ("copy_blocks", "transform_blocks"):
            monkeypatch.setattr(_library, name, lambda *a: None)
        monkeypatch.setattr(_library, "has_cuda", True)
        for name in ("is_initialized", "is_current_stream_capturing"):
            monkeypatch.setattr(torch.cuda, name, lambda: True)
        ids = torch.zeros(2, dtype=torch.int64, device="cuda:0")
        plan.run(ids, ids)
        for given in ([1, 2], torch.tensor([1, 2])):
            with pytest.raises(mk.InvalidArgument, match="dst_blocks must be on cuda:0 .* graph"):
                plan.run(ids, given)
            with pytest.raises(mk.InvalidArgument, match="src_slots must be on cuda:0 .* graph"):
                plan.run_slots(given, ids)
        with pytest.raises(mk.InvalidArgument, match="checksums must be on cuda:0 .* graph"):
            sums.run(ids, ids, checksums=torch.zeros(2, dtype=torch.int64))
    monkeypatch.setattr(_library, "require_engine", lambda *a: None)
    view = make_view("page_first_direct", SIZES)
    for engine in ("copy_engine", "two_hop"):
        with pytest.raises(mk.InvalidArgument, match=f"engine {engine} must not .* captured"):
            mk.gather_blocks(view, [0], engine=engine)


def test_plan_rejects_mismatched_devices():
    with FakeTensorMode():
        one, other = (
            mk.KVView(torch.zeros(2, 3, 4, device=d), "block token dim")
            for d in ("cuda:0", "cuda:1")
        )
    with pytest.raises(mk.InvalidArgument, match="dst must have src's device cuda:0 .* cuda:1"):
        mk.CopyPlan(one, other)
    view = mk.KVView(torch.zeros(2, 3, 4), "block token dim")
    with pytest.raises(mk.InvalidArgument, match="KVView: tensors must be on cpu or cuda, got met"):
        mk.KVView(torch.zeros(2, 3, 4, device="meta"), "block token dim")
    with pytest.raises(
        mk.InvalidArgument, match="out must have the cache's device cpu .* got meta"
    ):
        mk.gather_blocks(view, [0], out=torch.zeros(1, 1, 1, 1, 3, 4, device="meta"))


def test_the_gather_of_a_host_view_to_a_gpu_reports_bad_ids_there(monkeypatch):
    host = make_view("nhd_per_layer", SIZES)
    with FakeTensorMode(allow_non_fake_inputs=True):
        monkeypatch.setattr(_library, "has_cuda", True)
        out = torch.empty(host.packed_shape(2), dtype=host.dtype, device="cuda")
        with pytest.raises(mk.InvalidArgument, match=r"view must be on cuda:0 or in pinned .*"):
            mk.gather_blocks(host, [0, 1], out=out)
    assert host.gpu_bad_ids is None
