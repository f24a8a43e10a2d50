"""A plan run by a backend, compared with the reference."""

import copy

import torch

import mooncake_kernels as mk

from .layouts import snapshot


def twin(view: mk.KVView) -> mk.KVView:
    """A copy of a view with memory of its own and the same layout, padding included."""
    clones = copy.deepcopy(view.tensors)  # keeps storages and strides, which clone() would pack
    table = [[clones[i] for i in row] for row in view.layout.tensors]
    if len(table) == 1:
        return mk.KVView(table[0] if len(table[0]) > 1 else table[0][0], view.axes)
    return mk.KVView(table, view.axes)


def check(src, dst, src_ids, dst_ids, backend, ids_dtype=torch.int32, method="run", **plan_options):
    """Run a plan on the backend and by the reference; compare all of dst, and src with itself."""
    expected = twin(dst)
    by_reference = mk.CopyPlan(src, expected, **plan_options)
    getattr(by_reference, method)(src_ids, dst_ids, engine="reference")
    src_before = snapshot(src)
    plan = mk.CopyPlan(src, dst, **plan_options)
    getattr(plan, method)(
        torch.tensor(src_ids, dtype=ids_dtype, device=backend.device),
        torch.tensor(dst_ids, dtype=ids_dtype, device=backend.device),
        engine=backend.engine,
    )
    plan.check()
    assert torch.equal(snapshot(dst), snapshot(expected))
    assert torch.equal(snapshot(src), src_before), "the source was written to"
