"""What views and plans on a GPU keep for reports of bad ids, as far as the CPU can test it."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mooncake_kernels as mk
from mooncake_kernels import _library, bad_ids
from mooncake_kernels.bad_ids import BadIds
from mooncake_kernels.kv import blocks, copying
from mooncake_kernels.kv.execute import as_ids
from mooncake_kernels.small_buffer_cache import SmallBufferCache

from .layouts import Sizes, make_view

CUDA = torch.device("cuda", 0)


@pytest.fixture
def rows(monkeypatch):
    """Every view and plan has a row from the start, as on a GPU."""
    make = BadIds.__init__
    monkeypatch.setattr(BadIds, "__init__", lambda bad, _, *rest: make(bad, CUDA, *rest))


def sides():
    src = make_view("nhd_per_layer", Sizes(), dtype=torch.int32)
    return src, make_view("block_first_hnd", Sizes(), dtype=torch.int32, seed=9)


@pytest.mark.parametrize("method", ["run", "run_slots"])
@pytest.mark.parametrize("checksum", [False, True])
def test_plans_with_report_rows_compile_into_one_graph(rows, method, checksum):
    src, dst = sides()
    plan = mk.CopyPlan(src, dst, checksum=checksum)
    assert plan._copying.blocks.bad.address and src.bad_ids.address

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(src_ids, dst_ids):
        getattr(plan, method)(src_ids, dst_ids)
        packed = mk.gather_blocks(dst, dst_ids)
        mk.scatter_blocks(packed, src_ids, dst)
        return packed, mk.checksum_blocks(dst, dst_ids)

    packed, sums = step(torch.tensor([4, 2]), torch.tensor([0, 5]))
    expected = sides()
    getattr(mk.CopyPlan(*expected), method)([4, 2], [0, 5], engine="reference")
    assert torch.equal(packed, mk.gather_blocks(expected[1], [0, 5], engine="reference"))
    assert torch.equal(sums, mk.checksum_blocks(expected[1], [0, 5], engine="reference"))


@pytest.mark.parametrize("checksum", [False, True])
def test_plans_with_report_rows_run_in_fake_mode(rows, checksum):
    src, dst = sides()
    plan = mk.CopyPlan(src, dst, checksum=checksum)
    ids = torch.tensor([4]), torch.tensor([2])
    with FakeTensorMode(allow_non_fake_inputs=True):
        plan.run(*ids)
        plan.check()
        mk.gather_blocks(src, ids[0])
    plan.run(*ids)
    assert torch.equal(dst.plane(1, 1)[2], src.plane(1, 1)[4])


def test_view_of_fake_tensors_borrows_real_report_rows(monkeypatch):
    monkeypatch.setattr(bad_ids, "_rows", SmallBufferCache(bad_ids._new_rows, 1))
    monkeypatch.setattr(_library, "has_cuda", True)
    with FakeTensorMode(allow_non_fake_inputs=True):  # a plan is one
        cache = torch.empty(2, 4, 16, 1, 64, device="cuda")
        view = mk.KVView(cache, "kv block token head dim")
        mk.gather_blocks(view, torch.tensor([1], device="cuda"))
        mk.gather_blocks(view, torch.tensor([1], device="cuda"))
        del view
    bad = BadIds(CUDA, ("a", "b"), (1, 1))
    assert type(bad.words) is torch.Tensor and bad.address == bad.words.data_ptr()
    bad.words[:3] = torch.tensor([1, 3, 7])
    with pytest.raises(mk.InvalidArgument, match=r"^a\[3\] must be -1 or in \[0, 1\), got 7"):
        bad.raise_if_any()
    bad.raise_if_any()


def test_late_report_of_a_dropped_plan_does_not_reach_later_plans():
    def plan_of(name):
        return BadIds(CUDA, (f"{name}: src_blocks", f"{name}: dst_blocks"), (8, 8))

    dropped = plan_of("dropped")
    row = dropped.words
    address = dropped.address
    del dropped
    later = [plan_of(i) for i in range(300)]
    row[:3] = torch.tensor([1, 5, 99])  # as a kernel does that was queued all the time
    for bad in later:
        bad.raise_if_any()
    assert address not in {bad.address for bad in later}


def test_report_rows_are_reused_in_fifo_order():
    rows = SmallBufferCache(lambda: torch.ones(4, 2, dtype=torch.int64).unbind(), 3)
    addresses = []
    for _ in range(9):
        owner = torch.nn.Module()
        row = rows.lend(owner)
        addresses.append(row.data_ptr())
        assert not row.any()
        row.fill_(7)
        del owner
    assert len(set(addresses)) == 4 and addresses[4:8] == addresses[:4]


@pytest.mark.parametrize("ids", [[0, 8], torch.tensor([3, -2]), range(9)], ids=str)
def test_host_ids_are_checked_before_transfer_to_the_device(ids):
    """As for a GPU: any other device will do."""
    message = r"^op: ids\[\d\] must be -1 or in \[0, 8\), got (8|-2)$"
    with pytest.raises(mk.InvalidArgument, match=message):
        as_ids("op: ids", ids, torch.device("meta"), num_ids=8)
    moved = as_ids("op: ids", [7, -1, 0], torch.device("meta"), num_ids=8)
    assert moved.device.type == "meta" and moved.shape == (3,)
    with FakeTensorMode():  # has no contents to check
        as_ids("op: ids", torch.tensor([9]), torch.device("meta"), num_ids=8)


def test_every_call_checks_ids_on_the_host(monkeypatch):
    """Each call knows how many ids there are; the operators of the CPU would say it as well."""
    view = make_view("nhd_per_layer", Sizes(), dtype=torch.int32)
    plan = mk.CopyPlan(view, make_view("block_first_hnd", Sizes(), dtype=torch.int32))
    asked = []
    for module in (blocks, copying):
        monkeypatch.setattr(
            module, "as_ids", lambda *given, num_ids: asked.append(num_ids) or as_ids(*given)
        )
    packed = mk.gather_blocks(view, [1])
    mk.scatter_blocks(packed, [1], view)
    mk.checksum_blocks(view, [1])
    plan.run([1], [2])
    plan.run_slots([1], [2])
    num_slots = view.num_blocks * view.block_size
    assert asked == [view.num_blocks] * 5 + [num_slots] * 2


def test_view_check_raises_late_reports(rows):
    view, other = sides()
    ids = torch.tensor([1])
    mk.checksum_blocks(view, ids)
    view.check()
    for bad, name in (
        (view.bad_ids, "scatter_blocks"),
        (view.sums[1], "checksum_blocks"),
    ):
        bad.words[:3] = torch.tensor([2, 5, 99])  # as a kernel does
        with pytest.raises(mk.InvalidArgument, match=rf"^{name}: block_ids\[5\] must .* got 99"):
            view.check()
        view.check()
        other.check()
