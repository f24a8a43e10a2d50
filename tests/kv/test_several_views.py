"""A cache of several views: tensors besides the keys and values travel in the same plan."""

import pytest
import torch

import mooncake_kernels as mk

from .checks import twin
from .layouts import addressed, snapshot

BLOCKS, TOKENS, HEADS = 6, 4, 4


def cache(device="cpu", seed=1, num_heads=HEADS, token_first=True):
    """fp8 keys and values, a scale for each token and head, and an SSM state for each block."""
    order = "token head" if token_first else "head token"
    sizes = {"kv": 2, "block": BLOCKS, "token": TOKENS, "head": num_heads}

    def view(axes, dtype, dim, num_layers):
        shape = (*(sizes[axis] for axis in axes.split()), dim)
        tensors = [addressed(shape, dtype, device, seed + 10 * i) for i in range(num_layers)]
        return mk.KVView(tensors, f"{axes} dim")

    return [
        view(f"kv block {order}", torch.float8_e4m3fn, 16, 3),
        view(f"kv block {order}", torch.float32, 1, 3),
        view("block", torch.uint8, 37, 5),
    ]


def run_both(src, dst, backend, src_ids, dst_ids, run_options=None, **plan_options):
    """Run the plan on the backend, and each view by itself by the reference."""
    expected = [twin(view) for view in dst]
    for views in zip(src, expected, strict=True):
        options = {k: v for k, v in plan_options.items() if k == "layers" or views[0].has_heads}
        plan = mk.CopyPlan(*views, **options)
        plan.run(src_ids, dst_ids, engine="reference", **(run_options or {}))
    plan = mk.CopyPlan(src, dst, **plan_options)
    plan.run(src_ids, dst_ids, engine=backend.engine, **(run_options or {}))
    plan.check()
    for view, other in zip(dst, expected, strict=True):
        assert torch.equal(snapshot(view), snapshot(other))


def test_plan_copies_every_view(backend):
    src = cache(backend.device)
    dst = cache(backend.device, seed=70, token_first=False)
    run_both(src, dst, backend, [5, -1, 0], [1, 2, 4])


def test_head_slices_apply_only_to_views_with_heads(backend):
    src, dst = cache(backend.device), cache(backend.device, seed=70, num_heads=2)
    run_both(src, dst, backend, [5, 0], [1, 4], src_heads=slice(2, 4))


def test_layers_apply_to_every_view(backend):
    src, dst = cache(backend.device)[:2], cache(backend.device, seed=70)[:2]
    run_both(src, dst, backend, [5, 0], [1, 4], layers=[0, 2], run_options={"layers": [2]})


def test_layers_of_a_side_with_fewer_layers(backend):
    """As the first stage of a pipeline."""
    src, dst = cache(backend.device)[:2], cache(backend.device, seed=70)[:2]
    dst = [mk.KVView(view.tensors[:2], view.axes) for view in dst]
    run_both(src, dst, backend, [5, 0], [1, 4], layers=[0, 1])


def test_nothing_is_copied_when_the_memory_of_one_view_was_freed():
    src, dst = cache(), cache(seed=70)
    plan = mk.CopyPlan(src, dst)
    dst[2].tensors[0].untyped_storage().resize_(0)
    before = [snapshot(view) for view in dst[:2]]
    with pytest.raises(mk.InvalidArgument, match="their memory was freed"):
        plan.run([0], [1])
    assert all(map(torch.equal, before, (snapshot(view) for view in dst[:2])))


def test_nothing_is_copied_of_any_view_when_an_id_is_bad():
    src, dst = cache(), cache(seed=70)
    before = [snapshot(view) for view in dst]
    with pytest.raises(mk.InvalidArgument, match=r"dst_blocks\[1\] .* got 6"):
        mk.CopyPlan(src, dst).run([0, 1], [0, 6])
    assert all(map(torch.equal, before, (snapshot(view) for view in dst)))


def test_run_slots_requires_a_token_axis_in_every_view(backend):
    src, dst = cache(backend.device), cache(backend.device, seed=70)
    plan = mk.CopyPlan(src[:2], dst[:2])
    plan.run_slots([23, 0], [1, 9], engine=backend.engine)
    for view, other in zip(src[:2], dst[:2], strict=True):
        rows, others = view.plane(2, 1), other.plane(2, 1)
        assert torch.equal(rows[5, :, 3].view(torch.uint8), others[0, :, 1].view(torch.uint8))
    with pytest.raises(mk.InvalidArgument, match="run_slots: views must have a 'token' axis"):
        mk.CopyPlan(src, dst).run_slots([0], [1], engine=backend.engine)


def per_block(num_blocks=BLOCKS, **kwargs):
    return mk.KVView(torch.zeros(num_blocks, 8, **kwargs), "block dim")


def per_token(token=TOKENS, layers=1):
    tensors = [torch.zeros(BLOCKS, token, 8) for _ in range(layers)]
    return mk.KVView(tensors, "block token dim")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mk.CopyPlan([], []), r"src must be a KVView or a list of them, got \[\]"),
        (lambda: mk.CopyPlan([per_block()], [3]), "dst must be a KVView or a list .* got int"),
        (lambda: mk.CopyPlan([per_block()], [per_block()] * 2), "for each of src's 1, got 2"),
        (lambda: mk.CopyPlan([per_block(), per_block(5)], [per_block()] * 2),
         "views of src must have one num_blocks, got 6 and 5"),
        (lambda: mk.CopyPlan([per_token(), per_token(2)], [per_block()] * 2),
         "views of src must have one block_size, got 2 and 4"),
        (lambda: mk.CopyPlan(per_block(), per_token()),
         r"dst must have a 'token' axis if src has one \('block dim'\), got 'block token dim'"),
        (lambda: mk.CopyPlan([per_token(), per_block()], [per_token(2), per_block()]),
         "dst must have src's block_size 4 to take views without a 'token' axis, got 2"),
        (lambda: mk.CopyPlan([per_token(), per_token(layers=2)],
                             [per_token(), per_token(layers=2)], layers=[0]),
         "CopyPlan: layers must be None for views of 1 and of 2 layers"),
        (lambda: mk.CopyPlan([per_token(), per_token(layers=2)],
                             [per_token(), per_token(layers=2)]).run([0], [0], layers=[0]),
         "CopyPlan.run: layers must be None for views of 1 and of 2 layers"),
        (lambda: mk.CopyPlan(per_block(), per_block(), src_heads=slice(0, 2)), "src_heads must"),
    ],
)  # fmt: skip
def test_bad_arguments_are_rejected(make, message):
    with pytest.raises(mk.InvalidArgument, match=message):
        make()
