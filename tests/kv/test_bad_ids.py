"""What views and plans on a GPU keep for reports of bad ids, as far as the CPU can test it."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mooncake_kernels as mk
from mooncake_kernels import _library, bad_ids
from mooncake_kernels.bad_ids import BadIds
from mooncake_kernels.lending import Lender

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
def test_plans_with_rows_compile_into_one_graph(rows, method, checksum):
    src, dst = sides()
    plan = mk.CopyPlan(src, dst, checksum=checksum)
    assert plan.bad_blocks.address and src.bad_ids.address

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
def test_plans_with_rows_run_in_a_fake_mode(rows, checksum):
    src, dst = sides()
    plan = mk.CopyPlan(src, dst, checksum=checksum)
    ids = torch.tensor([4]), torch.tensor([2])
    with FakeTensorMode(allow_non_fake_inputs=True):
        plan.run(*ids)
        plan.check()
        mk.gather_blocks(src, ids[0])
    plan.run(*ids)
    assert torch.equal(dst.plane(1, 1)[2], src.plane(1, 1)[4])


def test_a_view_of_fake_tensors_borrows_real_rows(monkeypatch):
    monkeypatch.setattr(bad_ids, "_rows", Lender(bad_ids._new_rows, 1))
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


def test_a_late_report_of_a_dropped_plan_is_not_of_the_next_ones():
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


def test_rows_are_lent_again_after_others():
    rows = Lender(lambda: torch.ones(4, 2, dtype=torch.int64).unbind(), 3)
    addresses = []
    for _ in range(9):
        owner = torch.nn.Module()
        row = rows.lend(owner)
        addresses.append(row.data_ptr())
        assert not row.any()
        row.fill_(7)
        del owner
    assert len(set(addresses)) == 4 and addresses[4:8] == addresses[:4]
