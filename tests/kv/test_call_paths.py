"""How many functions of this package a copy enters: a small copy takes as long as a few dozen."""

import pytest
import torch

import mooncake_kernels as mk

from ..walk import walk


@pytest.fixture(scope="module")
def calls():
    views = [mk.KVView(torch.zeros(16, 4, 2, 8), "block token head dim") for _ in range(3)]
    wide = mk.KVView(torch.zeros(4, 16, 2, 8), "block token head dim")
    first, second = torch.arange(2), torch.arange(2, 4)
    packed = mk.gather_blocks(views[0], first)
    plan, in_place = mk.CopyPlan(*views[:2]), mk.CopyPlan(views[0], views[0])
    of_other_size = mk.CopyPlan(views[0], wide)
    addresses = [torch.tensor([view.tensors[0].data_ptr()]) for view in views[:2]]
    return {
        "run, tensors": lambda: plan.run(first, second),
        "run, lists": lambda: plan.run([0, 1], [2, 3]),
        "run, arrays": lambda: plan.run(first.numpy(), second.numpy()),
        "run, named engine": lambda: plan.run(first, second, engine="host"),
        "run, layers": lambda: plan.run([0, 1], [2, 3], layers=[0]),
        "run, one cache": lambda: in_place.run([0, 1], [2, 3]),
        "run, other block size": lambda: of_other_size.run([0, 1, 2, 3], [1]),
        "run_slots, tensors": lambda: plan.run_slots(first, second),
        "run_slots, lists": lambda: plan.run_slots([0, 1], [2, 3]),
        "gather_blocks": lambda: mk.gather_blocks(views[0], [0, 1]),
        "gather_blocks, out": lambda: mk.gather_blocks(views[0], first, packed),
        "scatter_blocks": lambda: mk.scatter_blocks(packed, [0, 1], views[2]),
        "checksum_blocks": lambda: mk.checksum_blocks(views[0], [0, 1]),
        "copy_batch": lambda: mk.copy_batch(*addresses, torch.tensor([64])),
    }


@pytest.mark.parametrize(
    ("case", "most"),
    [
        ("run, tensors", 6),
        ("run, lists", 8),
        ("run, arrays", 8),
        ("run, named engine", 6),
        ("run, layers", 14),
        ("run, one cache", 12),
        ("run, other block size", 8),
        ("run_slots, tensors", 6),
        ("run_slots, lists", 8),
        ("gather_blocks", 12),
        ("gather_blocks, out", 12),
        ("scatter_blocks", 12),
        ("checksum_blocks", 12),
        ("copy_batch", 12),
    ],
)
def test_copy_enters_few_functions(calls, case, most):
    calls[case]()
    steps = walk(calls[case])
    assert len(steps) <= most, steps
    assert len({file for file, _ in steps}) <= 7, steps
