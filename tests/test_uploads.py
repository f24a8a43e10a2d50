"""How small tensors get to a GPU: without waiting for it. The device "meta" stands in for one."""

import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import mooncake_kernels as mk
from mooncake_kernels._tensors import staged, upload
from mooncake_kernels.attention import append

from .conftest import HAS_CUDA
from .kv.layouts import Sizes, make_view

LENGTHS = ("q_lens", "kv_lens", "cu_q", "positions")
META = torch.device("meta")  # has nothing to read back, so whatever tries that fails


class Copies(TorchDispatchMode):
    """Records of each copy from the host to the device whether torch would wait for it."""

    def __init__(self):
        super().__init__()
        self.waits, self.pinned = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result, named = func(*args, **(kwargs or {})), kwargs or {}
        if func._schema.name in ("aten::_to_copy", "aten::copy_"):
            is_new = func._schema.name == "aten::_to_copy"
            target, source = (result, args[0]) if is_new else args[:2]
            if (target.device.type, source.device.type) == ("meta", "cpu"):
                non_blocking = named.get("non_blocking") or True in args[2:]
                is_pinned = any(source is each for each in self.pinned)
                self.waits.append(not (non_blocking and is_pinned))
        return result

    def pin(self, tensor):
        self.pinned.append(tensor.clone())
        return self.pinned[-1]


@pytest.fixture
def copies(monkeypatch):
    copies = Copies()
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: copies.pin(tensor))
    for name in ("build", "builder", "packed"):  # "meta" has the operators' fakes
        module = sys.modules[f"mooncake_kernels.mask.{name}"]
        monkeypatch.setattr(module, "choose", lambda *arguments: "host")
    with copies:
        yield copies


def test_plain_torch_copies_wait_but_uploads_do_not(copies):
    host = torch.zeros(4)
    host.to(META)
    host.to(META, non_blocking=True)  # the driver may wait, for it is pageable
    torch.empty(4, device=META).copy_(host)
    assert copies.waits == [True, True, True]
    assert upload("it", host, META).device == META
    torch.empty(4, device=META).copy_(staged("it", host, META), non_blocking=True)
    assert copies.waits[3:] == [False, False]


def test_a_batch_is_made_without_waiting(copies):
    batch = mk.ChunkBatch([2, 1], [9, 7], [8, 1, 0], device=META)
    assert {getattr(batch, name).device for name in LENGTHS} == {META}
    assert batch.num_q == 3 and batch.kv_lens_list == [9, 7]
    assert copies.waits == [False] * 4


def test_masks_are_made_without_waiting(copies):
    rule = mk.mask.causal() & mk.mask.sliding_window(9)
    batch = mk.ChunkBatch([5, 0, 3], [12, 4, 9], device=META)
    copies.waits.clear()
    mk.mask.rows(rule, batch).packed()
    mk.mask.packed(rule, batch)
    assert copies.waits == [False] * 4  # the rule twice, and twice where each request begins


@pytest.mark.parametrize("positions", [(), ([0, 1, 3],)])
def test_a_builder_takes_lengths_without_waiting(copies, positions):
    batch = mk.ChunkBatch([2, 1], [9, 9], *positions, device=META)
    made = mk.mask.MaskBuilder(mk.mask.causal(), batch)
    copies.waits.clear()
    made.set_lengths([1, 2], [3, 4], *positions)
    assert copies.waits == [False] * (3 + len(positions))


def test_rope_frequencies_are_uploaded_once(monkeypatch):
    monkeypatch.setattr(append, "_kept_frequencies", {})
    positions = torch.zeros(3, dtype=torch.int64, device=META)
    kept = append._frequencies(mk.Rope(500.0), 8, positions)
    assert kept.device == positions.device
    assert append._frequencies(mk.Rope(500.0), 8, positions) is kept
    for other in (mk.Rope(501.0), mk.Rope(500.0, inv_freq=[1.0, 2.0, 3.0, 4.0])):
        assert append._frequencies(other, 8, positions) is not kept
    with FakeTensorMode(allow_non_fake_inputs=True):  # does not spoil what is kept
        append._frequencies(mk.Rope(502.0), 8, positions)
        append._frequencies(mk.Rope(502.0), 8, torch.zeros(3, dtype=torch.int64))
    assert {type(each) for each in append._kept_frequencies.values()} == {torch.Tensor}


def test_planes_are_uploaded_once_for_triton(monkeypatch):
    if HAS_CUDA:
        pytest.skip("Triton is not in its interpreter")
    triton_kv = pytest.importorskip("mooncake_kernels.triton.kv")
    src, dst = (
        make_view(name, Sizes(), dtype=torch.int16, seed=seed)
        for name, seed in (("nhd_per_layer", 1), ("block_first_hnd", 9))
    )
    plan, moved, tensor = mk.CopyPlan(src, dst), [], torch.tensor
    monkeypatch.setattr(
        triton_kv.torch, "tensor", lambda *a, **named: moved.append(a) or tensor(*a, **named)
    )
    results = []
    for block in tensor([[4], [2], [3]]):
        moved.clear()
        plan.run(block, block, engine="triton")
        results.append(mk.gather_blocks(src, block, engine="triton"))  # each in other memory
        mk.scatter_blocks(results[-1] + 1, block, src, engine="triton")
        assert torch.equal(dst.plane(1, 1)[block] + 1, src.plane(1, 1)[block])
    assert not moved, "addresses were moved again"
    src.tensors[0].data = src.tensors[0].data.clone()
    plan.run(tensor([5]), tensor([5]), engine="triton")
    assert moved and torch.equal(dst.plane(0, 1)[5], src.plane(0, 1)[5])


def test_upload_during_graph_capture_is_rejected(monkeypatch):
    for name in ("is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    with pytest.raises(mk.InvalidArgument, match="^it must be on cuda:0 before a CUDA graph"):
        upload("it", torch.zeros(4), torch.device("cuda", 0))
    assert upload("it", torch.ones(4), torch.device("cpu")).sum() == 4
