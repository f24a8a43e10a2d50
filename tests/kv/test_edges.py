"""Nothing to copy, tensors that are more than their bytes, and views that are copied themselves."""

import copy
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import mooncake_kernels as mk

from .layouts import LAYOUTS, PACKED_AXES, Sizes, make_view, snapshot


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_ids_copy_nothing(backend, name):
    view = make_view(name, Sizes(), device=backend.device)
    before = snapshot(view)
    packed = mk.gather_blocks(view, [], engine=backend.engine)
    assert packed.shape == view.packed_shape(0)
    mk.scatter_blocks(packed, [], view, engine=backend.engine)
    mk.CopyPlan(view, make_view(name, Sizes(), device=backend.device)).run([], [])
    assert torch.equal(snapshot(view), before)


def test_cache_of_zero_blocks_accepts_only_holes(backend):
    empty = make_view("nhd_per_layer", Sizes(block=0), device=backend.device)
    full = make_view("nhd_per_layer", Sizes(), device=backend.device)
    before = snapshot(full)
    assert mk.gather_blocks(empty, [-1], engine=backend.engine).shape == empty.packed_shape(1)
    mk.CopyPlan(empty, full).run([-1], [3], engine=backend.engine)
    mk.CopyPlan(full, empty).run([3], [-1], engine=backend.engine)
    assert torch.equal(snapshot(full), before)


@pytest.mark.parametrize("checksum", [False, True])
def test_pipeline_stages_copy_their_own_layers(checksum):
    """Stages hold layers 0 to 2 and 3 to 4 of the model; a whole model takes both."""
    model = make_view("block_first_hnd", Sizes(layer=5), dtype=torch.int16, seed=9)
    first = make_view("nhd_per_layer", Sizes(layer=3), dtype=torch.int16)
    second = make_view("kv_apart", Sizes(layer=2), dtype=torch.int16, seed=5)
    mk.CopyPlan(first, model, layers=[(i, i) for i in range(3)], checksum=checksum).run([1], [2])
    plan = mk.CopyPlan(second, model, layers=[(0, 3), (1, 4)], checksum=checksum)
    plan.run([6], [2], layers=[1])
    plan.run([6], [2], layers=[(0, 3)])
    for layer in range(5):
        stage, of_stage, block = (first, layer, 1) if layer < 3 else (second, layer - 3, 6)
        for kv in range(2):
            source = stage.plane(of_stage, kv)[block]
            assert torch.equal(model.plane(layer, kv)[2], source), (layer, kv)
    for layers, words in (([2], r"\[0, 1\], got 2"), ([(0, 1)], r"\[\(0, 3\), .*, got \(0, 1\)")):
        with pytest.raises(mk.InvalidArgument, match=f"layers must be among the plan's {words}"):
            plan.run([0], [0], layers=layers)
    with pytest.raises(mk.InvalidArgument, match=r"layers must be in \[0, 5\), got 5"):
        mk.CopyPlan(second, model, layers=[(0, 5)])
    with pytest.raises(mk.InvalidArgument, match="list of integers or pairs of them, got"):
        mk.CopyPlan(second, model, layers=[(0, 1, 2)])
    mk.CopyPlan(model, model, layers=[(0, 1)]).run([0, 1], [0, 1])  # one cache, another layer


def test_run_and_plan_name_layers_the_same_way(backend):
    sizes = Sizes(layer=5)
    src = make_view("nhd_per_layer", sizes, dtype=torch.int16, device=backend.device)

    def copied(of_plan, of_run):
        dst = make_view("nhd_per_layer", sizes, dtype=torch.int16, device=backend.device, seed=50)
        before = [dst.plane(layer, 0)[1].clone() for layer in range(5)]
        plan = mk.CopyPlan(src, dst, layers=of_plan)
        plan.run([1], [1], layers=of_run, engine=backend.engine)
        now = [dst.plane(layer, 0)[1] for layer in range(5)]
        return [i for i, block in enumerate(now) if not torch.equal(block, before[i])]

    assert copied(slice(2, 4), slice(2, 4)) == [2, 3]
    assert copied([1, 2, 3], slice(1, 2)) == [1]
    assert copied([1, 2, 3], slice(0, 2)) == [1]
    assert copied([1, 2, 3], torch.tensor([3, 1])) == [1, 3]
    assert copied(None, slice(-1, None)) == [4]


def test_autograd_detects_a_write_to_the_cache(backend):
    weight = torch.zeros(7, 4, 8, device=backend.device)
    leaf = torch.ones_like(weight, requires_grad=True)
    product = leaf * weight  # saves weight, to differentiate by it
    view = mk.KVView(weight, "block token dim")
    packed = torch.ones(view.packed_shape(1), device=backend.device)
    mk.scatter_blocks(packed, [2], view, engine=backend.engine)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_writes_a_cache_made_in_inference_mode(backend):
    with torch.inference_mode():
        view = make_view("nhd_per_layer", Sizes(), device=backend.device)
    packed = torch.zeros(view.packed_shape(1), dtype=view.dtype, device=backend.device)
    mk.scatter_blocks(packed, [2], view, engine=backend.engine)
    assert not mk.gather_blocks(view, [2], engine=backend.engine).any()
    with pytest.raises(mk.InvalidArgument, match=r"block_ids\[0\] .* got 99"):
        mk.gather_blocks(view, [99], engine=backend.engine)
        if backend.device == "cuda":
            torch.cuda.synchronize()
            mk.gather_blocks(view, [0], engine=backend.engine)
    mk.gather_blocks(view, [0], engine=backend.engine)


def test_late_report_names_the_call_that_made_it():
    """As on CUDA, where the next call finds what the kernel wrote: here it is written by hand."""
    view = make_view("nhd_per_layer", Sizes())
    view.bad_ids.words.copy_(torch.tensor([-1, 0, 0]))  # half written: not yet to be looked at
    packed = mk.gather_blocks(view, [0, 1])
    view.bad_ids.words.copy_(torch.tensor([1, 4, 99]))
    with pytest.raises(
        mk.InvalidArgument, match=r"gather_blocks: block_ids\[4\] .* \[0, 7\), got 99"
    ):
        mk.scatter_blocks(packed, [0, 1], view)
    mk.scatter_blocks(packed, [0, 1], view)  # it is told once


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))]
)
def test_duplicated_plan_copies_its_own_caches(duplicate):
    src, dst = (
        make_view("nhd_per_layer", Sizes(), dtype=torch.int16, seed=seed) for seed in (1, 50)
    )
    plan = duplicate(mk.CopyPlan(src, dst))
    before = snapshot(dst)
    plan.run([4], [2])
    assert torch.equal(snapshot(dst), before)
    assert torch.equal(plan.dst.plane(1, 1)[2], src.plane(1, 1)[4])
    with pytest.raises(mk.InvalidArgument, match=r"dst_blocks\[0\] .* got 70"):
        plan.run([4], [70])


def test_run_rejects_a_block_that_is_both_read_and_written(backend):
    cache = make_view("nhd_per_layer", Sizes(), dtype=torch.int16, device=backend.device)
    again = mk.KVView(cache.tensors, cache.axes)
    expected = [cache.plane(layer, 1)[4].clone() for layer in range(3)]
    plan = mk.CopyPlan(cache, again)
    plan.run([4, -1, 4, 6], [0, 4, 6, -1], engine=backend.engine)  # skipped pairs read nothing
    assert all(torch.equal(cache.plane(i, 1)[6], expected[i]) for i in range(3))
    halves = mk.CopyPlan(cache, again, src_heads=slice(0, 1), dst_heads=slice(1, 2))
    halves.run([5], [5], engine=backend.engine)  # different heads of one block
    assert torch.equal(cache.plane(0, 0)[5, 0], cache.plane(0, 0)[5, 1])
    if backend.device == "cpu":
        before = snapshot(cache)
        message = "dst_blocks must not be among src's, for src and dst are one cache, got 2"
        with pytest.raises(mk.InvalidArgument, match=message):
            plan.run([1, 2, -1], [2, 0, 3], engine=backend.engine)
        with pytest.raises(mk.InvalidArgument, match="dst_slots must not be among .* got 20"):
            plan.run_slots([20], [20], engine=backend.engine)
        with pytest.raises(mk.InvalidArgument, match=r"src_blocks\[0\] must be .* got 99"):
            plan.run([99], [99], engine=backend.engine)
        k, v = (mk.KVView([t[i] for t in cache.tensors], "block token head dim") for i in (0, 1))
        with pytest.raises(mk.InvalidArgument, match=message):
            mk.CopyPlan([k, v], [v, k]).run([2], [2], engine=backend.engine)
        assert torch.equal(snapshot(cache), before)


AXES = "block token head dim"


@pytest.mark.parametrize(
    "shared, pair", [("one tensor", (0, 1)), ("one block", (1, 2)), ("half a row", (0, 1))]
)
def test_target_with_overlapping_tensors_is_rejected(backend, shared, pair):
    big = torch.zeros(12, 4, 2, 16, dtype=torch.int16, device=backend.device)
    tensors = {
        "one tensor": [big] * 3,
        "one block": [big[8:], big[:4], big[3:7]],
        "half a row": [big.view(-1)[i : i + 1024].view(8, 4, 2, 16) for i in (0, 136)],
    }[shared]
    view = mk.KVView(tensors, AXES)
    message = f"must have memory for each of its elements, got some that tensors {pair[0]} and "
    message += f"{pair[1]} share"
    packed = mk.gather_blocks(view, [1], engine=backend.engine)  # reading is fine
    for _ in range(2):
        with pytest.raises(mk.InvalidArgument, match=f"^scatter_blocks: view {message}"):
            mk.scatter_blocks(packed, [1], view, engine=backend.engine)
        with pytest.raises(mk.InvalidArgument, match=f"^CopyPlan: dst {message}"):
            mk.CopyPlan(view, view)
    both = mk.KVView([[big], [big]], AXES)  # k and v
    with pytest.raises(mk.InvalidArgument, match=r"some that tensors 0 and 1 share"):
        mk.CopyPlan(both, both)


def test_interleaved_target_tensors_are_accepted(backend):
    options = {"dtype": torch.int16, "device": backend.device}
    by_block, by_row = (
        torch.zeros(6, 3, 2, 4, 2, 16, **options),
        torch.zeros(6, 4, 2, 6, 16, **options),
    )
    views = [
        mk.KVView([[by_block[:, i, kv] for i in range(3)] for kv in range(2)], AXES),
        mk.KVView([[by_row[..., 2 * i + kv, :] for i in range(3)] for kv in range(2)], AXES),
        mk.KVView([by_block[:0, 0, 0]] * 2, AXES),  # has no elements
    ]
    for view in views[:2]:
        packed = torch.arange(view.block_bytes, device=backend.device).to(torch.int16)
        packed = packed[: view.block_bytes // 2].view(view.packed_shape(1))
        mk.scatter_blocks(packed, [4], view, engine=backend.engine)
        assert torch.equal(mk.gather_blocks(view, [4], engine=backend.engine), packed)
    none = torch.empty(views[2].packed_shape(0), **options)
    mk.scatter_blocks(none, [], views[2], engine=backend.engine)


def test_freed_cache_memory_is_rejected(backend):
    view = make_view("nhd_per_layer", Sizes(), device=backend.device)
    mk.gather_blocks(view, [0], engine=backend.engine)
    for tensor in view.tensors:
        tensor.untyped_storage().resize_(0)
    if backend.engine in ("host", "cuda"):
        with pytest.raises(mk.InvalidArgument, match="their memory was freed"):
            mk.gather_blocks(view, [0], engine=backend.engine)


@pytest.mark.parametrize("mode", ["meta", "fake"])
def test_first_run_under_a_mode_does_not_break_the_plan(backend, mode):
    """What a plan and a view keep is on the CPU, and real."""
    src = make_view("nhd_per_layer", Sizes(), dtype=torch.int16, device=backend.device)
    dst = make_view("kv_apart", Sizes(), dtype=torch.int16, device=backend.device, seed=50)
    plan = mk.CopyPlan(src, dst)
    ids = [torch.tensor(i, device=backend.device) for i in ([4], [2])]
    if mode == "meta":
        with torch.device("meta"):
            made_here = mk.KVView(src.tensors, src.axes)
            plan.run([4], [2], engine=backend.engine)
        assert torch.equal(dst.plane(1, 1)[2], src.plane(1, 1)[4])
        dst.plane(1, 1)[2].zero_()
        packed = mk.gather_blocks(made_here, ids[0], axes=PACKED_AXES, engine=backend.engine)
        assert torch.equal(packed[0, 1, 1], src.plane(1, 1)[4])
    elif backend.engine in ("host", "cuda"):
        with FakeTensorMode(allow_non_fake_inputs=True):
            plan.run(*ids, engine=backend.engine)
    plan.run(*ids, engine=backend.engine)
    assert torch.equal(dst.plane(1, 1)[2], src.plane(1, 1)[4])


def test_threads_share_a_plan():
    src, dst = make_view("nhd_per_layer", Sizes()), make_view("kv_apart", Sizes(), seed=50)
    for _ in range(20):
        plan = mk.CopyPlan(src, dst)
        for tensor in dst.tensors:
            tensor.zero_()
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda i, plan=plan: plan.run([i], [i]), range(7)))
        for layer in range(3):
            assert torch.equal(
                dst.plane(layer, 1).view(torch.int16), src.plane(layer, 1).view(torch.int16)
            )


def test_freed_packed_buffer_is_rejected(backend):
    view = make_view("nhd_per_layer", Sizes(), device=backend.device)
    packed = mk.gather_blocks(view, [0], engine=backend.engine)
    packed.untyped_storage().resize_(0)
    with pytest.raises(mk.InvalidArgument, match="packed must have memory, got a tensor whose"):
        mk.scatter_blocks(packed, [0], view, engine=backend.engine)
    with pytest.raises(mk.InvalidArgument, match="out must have memory"):
        mk.gather_blocks(view, [0], out=packed, engine=backend.engine)


def test_moved_cache_memory_is_found_again(backend):
    """As by an engine that frees its cache to sleep, and wakes up with another."""
    view = make_view("nhd_per_layer", Sizes(), dtype=torch.int16, device=backend.device)
    packed = mk.gather_blocks(view, [3], engine=backend.engine)
    old = [
        tensor.data for tensor in view.tensors
    ]  # keeps the memory, so that it is not given again
    for tensor in view.tensors:
        tensor.data = tensor.data.clone() + 1
    assert torch.equal(mk.gather_blocks(view, [3], engine=backend.engine), packed + 1)
    mk.scatter_blocks(packed, [3], view, engine=backend.engine)
    assert torch.equal(mk.gather_blocks(view, [3], engine=backend.engine), packed)
    del old


def test_triton_not_installed_is_reported_as_unavailable(monkeypatch):
    monkeypatch.delitem(sys.modules, "mooncake_kernels.triton.kv", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    view = make_view("nhd_per_layer", Sizes())
    message = "engine triton: the package triton is not installed: pip install 'mooncake-kernels"
    with pytest.raises(mk.Unavailable, match=f"^gather_blocks: {message}"):
        mk.gather_blocks(view, [0], engine="triton")
    with pytest.raises(mk.Unavailable, match=f"^CopyPlan.run: {message}"):
        mk.CopyPlan(view, make_view("nhd_per_layer", Sizes())).run([0], [0], engine="triton")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
def test_each_view_on_a_gpu_has_pinned_report_words():
    views = [make_view("nhd_per_layer", Sizes(), device="cuda") for _ in range(300)]
    addresses = {view.bad_ids.address for view in views}
    assert 0 not in addresses and len(addresses) == len(views)
    assert all(view.bad_ids.words.is_pinned() for view in views)


def test_layers_may_be_a_one_shot_iterator():
    def caches(seed):
        return [make_view(name, Sizes(), dtype=torch.int16, seed=seed)
                for name in ("nhd_per_layer", "kv_apart")]  # fmt: skip

    src, dst, expected = caches(1), caches(50), caches(50)
    mk.CopyPlan(src, expected, layers=[0, 2]).run([1], [2], layers=[2])
    mk.CopyPlan(src, dst, layers=(i for i in (0, 2))).run([1], [2], layers=iter([2]))
    for view, wanted in zip(dst, expected, strict=True):
        assert torch.equal(snapshot(view), snapshot(wanted))


def plain_view(num_blocks: int = 6) -> mk.KVView:
    return mk.KVView(
        torch.arange(num_blocks * 16.0).view(num_blocks, 2, 2, 4), "block token head dim"
    )


@pytest.mark.parametrize("call", ["gather", "run", "checksum"])
def test_freed_ids_are_refused(call):
    """They count as none, which would stand for all blocks in turn."""
    view = plain_view()
    ids = torch.full((12,), 99)
    ids.untyped_storage().resize_(0)
    calls = {
        "gather": lambda: mk.gather_blocks(view, ids),
        "run": lambda: mk.CopyPlan(view, plain_view()).run(ids, torch.arange(12) % 6),
        "checksum": lambda: mk.checksum_blocks(view, ids),
    }
    with pytest.raises(
        mk.InvalidArgument, match="must have memory, got a tensor whose storage was"
    ):
        calls[call]()


def test_gather_into_functional_memory_is_refused():
    view = plain_view()
    mk.gather_blocks(view, [0])
    with pytest.raises(mk.InvalidArgument, match="out must have memory"):
        torch.func.functionalize(lambda ids: mk.gather_blocks(view, ids))(torch.tensor([0, 1]))


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_traced_copy_is_no_dead_code(mode):
    src, dst = plain_view(), mk.KVView(torch.zeros(6, 2, 2, 4), "block token head dim")
    plan = mk.CopyPlan(src, dst)
    ids = torch.tensor([1, 2])
    trace = make_fx(
        lambda a, b: (plan.run(a, b), a + 1)[1], tracing_mode=mode, _allow_non_fake_inputs=True
    )
    graph = trace(ids, ids)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    graph(ids, ids)
    assert torch.equal(dst.tensors[0][1:3], src.tensors[0][1:3])


@pytest.mark.parametrize(
    "ids",
    [torch.eye(2).to_sparse_csr(), torch.zeros(2, dtype=torch.uint16), torch.zeros(2).bool()],
    ids=["sparse", "uint16", "bool"],
)
def test_ids_of_other_kinds_are_named(ids):
    plan = mk.CopyPlan(plain_view(), plain_view())
    for src, dst, name in [(ids, [0, 1], "src_blocks"), ([0, 1], ids, "dst_blocks")]:
        with pytest.raises(
            mk.InvalidArgument, match=f"run: {name} must be 1-d int32 or int64, got"
        ):
            plan.run(src, dst)


def test_compiled_checksum_takes_more_ids_than_blocks():
    view, ids = plain_view(3), torch.tensor([0, 1, 2, 0])
    compiled = torch.compile(lambda ids: mk.checksum_blocks(view, ids), backend="eager")
    assert torch.equal(compiled(ids), mk.checksum_blocks(view, ids))
