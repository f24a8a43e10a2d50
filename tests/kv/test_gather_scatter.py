"""gather_blocks and scatter_blocks: packed buffers, torch.compile, and refusals."""

import itertools
import threading
import time

import pytest
import torch

import mooncake_kernels as mk
from mooncake_kernels.kv.layout import HEADER, SIDE_FIELDS

from .layouts import LAYOUTS, PACKED_AXES, Sizes, make_view, snapshot

SIZES = Sizes()
UNTOUCHED = 0xEE


def canonical(packed, axes):
    """Return packed blocks as ``[n, layer, kv, head, token, dim]``."""
    return packed.permute(0, *(1 + axes.split().index(axis) for axis in PACKED_AXES.split()))


def num_runs(plan):
    """Return the contiguous ranges of one block."""
    axes = plan.values[2 + 2 * SIDE_FIELDS : HEADER].reshape(-1, 3)
    return plan.num_planes * int(axes[:, 0].prod())


@pytest.mark.parametrize("name", LAYOUTS)
def test_gather_returns_blocks_in_order(backend, name):
    sizes = Sizes(layer=2, block=5, token=2)
    view = make_view(name, sizes, dtype=torch.int16, device=backend.device)
    ids = torch.tensor([4, 0, 4], device=backend.device)
    for axes in (None, PACKED_AXES, "token kv layer head dim"):
        out = mk.gather_blocks(view, ids, axes=axes, engine=backend.engine)
        assert out.shape == view.packed_shape(3, axes) and out.is_contiguous()
        out = canonical(out, axes or view.packed_axes)
        for i, block in enumerate([4, 0, 4]):
            for layer in range(view.num_layers):
                for kv in range(view.num_kv):
                    assert torch.equal(out[i, layer, kv], view.plane(layer, kv)[block])


@pytest.mark.parametrize("name", LAYOUTS)
def test_packed_order_is_the_one_of_the_longest_runs(name):
    """A block that is contiguous in the cache is one run; else no order has fewer runs."""
    view = make_view(name, SIZES)
    orders = [
        " ".join([*order, "dim"]) for order in itertools.permutations(PACKED_AXES.split()[:-1])
    ]
    runs = {axes: num_runs(view.packed_as("", axes).gather_plan) for axes in orders}
    assert runs[view.packed_axes] == min(runs.values())


@pytest.mark.parametrize(
    ("axes_of_view", "num_lists", "expected"),
    [
        ("kv block token head dim", 1, "layer kv token head dim"),
        ("kv block head token dim", 1, "layer kv head token dim"),
        ("block token head dim", 2, "layer kv token head dim"),
        ("block token kv head dim", 1, "layer token kv head dim"),
        ("block head layer kv token dim", 0, "head layer kv token dim"),
        ("block layer token dim", 0, "layer kv head token dim"),
        ("block dim", 1, "layer kv head token dim"),
    ],
)
def test_packed_axes_follow_the_cache(axes_of_view, num_lists, expected):
    tensor = torch.zeros([2] * len(axes_of_view.split()))
    tensors = {0: tensor, 1: [tensor, tensor.clone()]}.get(num_lists)
    if num_lists == 2:
        tensors = [[tensor.clone() for _ in range(2)] for _ in range(2)]
    assert mk.KVView(tensors, axes_of_view).packed_axes == expected


@pytest.mark.parametrize(
    "axes",
    [
        *("", 3, "layer kv token head", "layer kv kv head dim"),
        *("dim layer kv head token", "block layer kv head token dim"),
    ],
)
def test_axes_that_are_none_of_a_packed_block_are_refused(axes):
    view = make_view("nhd_per_layer", SIZES)
    with pytest.raises(mk.InvalidArgument, match="gather_blocks: axes must be None or name layer"):
        mk.gather_blocks(view, [1], axes=axes)
    with pytest.raises(mk.InvalidArgument, match="scatter_blocks: axes must be None or name layer"):
        mk.scatter_blocks(torch.zeros(view.packed_shape(1)), [1], view, axes=axes)
    with pytest.raises(mk.InvalidArgument, match="packed_shape: axes must be None or name layer"):
        view.packed_shape(1, axes)


def test_hole_leaves_its_output_row_unchanged(backend):
    view = make_view("hnd_per_layer", SIZES, dtype=torch.uint8, device=backend.device)
    out = torch.full(view.packed_shape(3), UNTOUCHED, dtype=torch.uint8, device=backend.device)
    ids = torch.tensor([1, -1, 2], device=backend.device)
    assert mk.gather_blocks(view, ids, out=out, engine=backend.engine) is out
    assert (out[1] == UNTOUCHED).all() and not (out[0] == UNTOUCHED).all()


@pytest.mark.parametrize("src_name", ["nhd_per_layer", "page_head"])
@pytest.mark.parametrize("dst_name", ["kv_apart", "block_first_hnd"])
def test_gather_then_scatter_into_another_layout(backend, src_name, dst_name):
    sizes = Sizes(layer=2, token=2)
    src = make_view(src_name, sizes, dtype=torch.int16, device=backend.device)
    dst = make_view(dst_name, sizes, dtype=torch.int16, device=backend.device, seed=70)
    src_ids, dst_ids = [6, 2, 3], [0, -1, 5]
    packed = mk.gather_blocks(src, src_ids, engine=backend.engine)
    mk.scatter_blocks(packed, dst_ids, dst, axes=src.packed_axes, engine=backend.engine)
    for layer in range(src.num_layers):
        for kv in range(2):
            assert torch.equal(dst.plane(layer, kv)[0], src.plane(layer, kv)[6])
            assert torch.equal(dst.plane(layer, kv)[5], src.plane(layer, kv)[3])


def test_nothing_is_copied_when_an_id_is_bad():
    view = make_view("nhd_per_layer", SIZES)
    before = snapshot(view)
    packed = torch.zeros(view.packed_shape(2), dtype=view.dtype)
    for engine in ("host", "reference"):
        with pytest.raises(mk.InvalidArgument):
            mk.scatter_blocks(packed, [0, 99], view, engine=engine)
        assert torch.equal(snapshot(view), before)


def test_bad_id_is_reported_with_its_index(backend):
    view = make_view("nhd_per_layer", SIZES, device=backend.device)
    packed = torch.zeros(view.packed_shape(2), dtype=view.dtype, device=backend.device)

    def finish():
        """On CUDA the kernel reports; the next call raises."""
        if backend.device == "cuda":
            torch.cuda.synchronize()
            mk.gather_blocks(view, [0], engine=backend.engine)

    def gather(ids):
        mk.gather_blocks(view, ids, engine=backend.engine)
        finish()

    def scatter(ids):
        mk.scatter_blocks(packed, ids, view, engine=backend.engine)
        finish()

    with pytest.raises(
        mk.InvalidArgument, match=r"gather_blocks: block_ids\[2\] .* \[0, 7\), got 7"
    ):
        gather([0, -1, 7])
    with pytest.raises(mk.InvalidArgument, match=r"scatter_blocks: block_ids\[0\] .* got -2"):
        scatter([-2, 0])
    plan = mk.CopyPlan(view, make_view("kv_apart", SIZES, device=backend.device))
    with pytest.raises(
        mk.InvalidArgument, match=r"CopyPlan.run: dst_blocks\[1\] .* got 12345678901"
    ):
        plan.run([0, 1], [0, 12345678901], engine=backend.engine)
        plan.check()
    mk.gather_blocks(view, [0], engine=backend.engine)  # and the next call is unharmed


def quantized(shape):
    return torch.quantize_per_tensor(torch.zeros(shape), 0.1, 0, torch.qint8)


def nested(shape):
    return torch.nested.as_nested_tensor([torch.zeros(shape)])


def view_of(shape=(2, 7, 4, 2, 8), axes="kv block token head dim", **kwargs):
    return mk.KVView([torch.zeros(shape, **kwargs) for _ in range(2)], axes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: view_of(axes="kv block token heads dim"), "axes must name .*'heads'"),
        (lambda: view_of(axes="kv block block head dim"), "axes must name .*'block'"),
        (lambda: view_of(axes="kv block token dim"), "5 dimensions, got 'kv block token dim'"),
        (lambda: view_of(axes="kv token layer head dim"), "axes must contain 'block'"),
        (lambda: view_of(axes="kv block token dim head"), "axes must end in 'dim'"),
        (lambda: view_of(axes=""), "axes must name each of"),
        (lambda: view_of(axes=None), "axes must be names in one str, as .*, got None"),
        (lambda: view_of(axes=["block", "dim"]), r"names in one str, .*, got \['block', 'dim'\]"),
        (lambda: view_of(axes="layer block token head dim"), "must not name 'layer'"),
        (lambda: view_of((3, 7, 4, 2, 8)), "'kv' must have size 1 or 2, got 3"),
        (lambda: view_of((2, 7, 4, 0, 8)), "axis 'head' must have size 1 or more, got 0"),
        (lambda: view_of(requires_grad=True), r"tensor 0 must not require grad.* detach\(\)"),
        (lambda: mk.KVView(torch.zeros(7, 4, 8, dtype=torch.complex64).conj(), "block token dim"),
         "must not be conjugated lazily"),
        (lambda: mk.KVView(torch.zeros(7, 4, 8).to_sparse(), "block token dim"),
         "must be strided, got torch.sparse"),
        (lambda: mk.KVView(quantized((7, 4, 8)), "block token dim"),
         r"tensor 0 must not be quantized: pass what its int_repr\(\) returns"),
        (lambda: mk.KVView(nested((4, 8)), "block token dim"), "tensor 0 must not be nested"),
        (lambda: mk.gather_blocks(view_of(), [1], out=nested((2, 2, 2, 4, 8))),
         "out must not be nested"),
        (lambda: mk.KVView(None, "block token dim"), "tensors must be .*got NoneType$"),
        (lambda: mk.KVView((None,), "block token dim"), "tensors must be .*got tuple of 1 entries"),
        (lambda: mk.KVView([], "block token dim"), "tensors must be"),
        (lambda: mk.KVView([torch.zeros(2, 2, 2), 3], "block token dim"), "got int"),
        (lambda: mk.KVView([torch.zeros(2, 2, 2), torch.zeros(2, 2, 3)], "block token dim"),
         r"got shape torch.Size\(\[2, 2, 3\]\) at tensor 1"),
        (lambda: mk.KVView(torch.zeros(2, 4, 4).transpose(1, 2), "block token dim"),
         "'dim' must be packed"),
        (lambda: view_of().plane(2, 0), r"plane: layer must be in \[0, 2\), got 2"),
        (lambda: mk.CopyPlan(None, view_of()), "src must be a KVView or a list .* got NoneType"),
        (lambda: mk.CopyPlan(view_of(), view_of(dtype=torch.float16)), "dtype torch.float32"),
        (lambda: mk.CopyPlan(view_of(), view_of((2, 7, 4, 3, 8))), r"src_heads \(2\), got 3"),
        (lambda: mk.CopyPlan(view_of(), view_of(), src_heads=slice(0, 3)), "src_heads must be"),
        (lambda: mk.CopyPlan(view_of(), view_of(), dst_heads=slice(1, 1)), "dst_heads must be"),
        (lambda: mk.CopyPlan(view_of(), view_of(), layers=[2]), r"layers must be .* 2\), got 2"),
        (lambda: mk.CopyPlan(view_of(), view_of(), layers=[0]).run([0], [0], layers=[1]),
         r"among the plan's \[0\], got 1"),
        (lambda: mk.CopyPlan(view_of(), view_of(), layers=1), "layers must be a slice or a list"),
        (lambda: mk.CopyPlan(view_of(), view_of(), layers=[(0, 1), (1, 1)]),
         "^CopyPlan: layers must name a layer of dst once, got 1 twice"),
        (lambda: mk.CopyPlan(view_of(), view_of()).run([0], [0], layers=[0, 1, 0]),
         "^CopyPlan.run: layers must name a layer of dst once, got 0 twice"),
        (lambda: mk.CopyPlan(view_of(), view_of(), layers=slice(0.5)), "slice of integers"),
        (lambda: mk.CopyPlan(view_of(), view_of(), dst_heads=slice(-3, 2)), "dst_heads must be"),
        (lambda: mk.CopyPlan(view_of(), view_of()).run([0], [0, 1]), r"\(1\), got 2"),
        (lambda: mk.CopyPlan(view_of(), view_of()).run([0.5], [0]), "src_blocks must be 1-d int32"),
        (lambda: mk.CopyPlan(view_of(), view_of()).run([0], [0], max_sms=0), "max_sms .* got 0"),
        (lambda: mk.gather_blocks(view_of(), [0], max_sms=2.5), "max_sms .* got 2.5"),
        (lambda: mk.gather_blocks(view_of(), [0], max_sms=10**5000), "max_sms .* got a huge int"),
        (lambda: mk.gather_blocks(view_of(), [2, True]), "block_ids must be .* got a bool in"),
        (lambda: mk.CopyPlan(view_of(), view_of()).run([0], [0], engine="gpu"),
         "^CopyPlan.run: engine must be one of .*, got 'gpu'"),
        (lambda: mk.CopyPlan(view_of(), view_of()).run_slots([0], [0], engine=None),
         "^CopyPlan.run_slots: engine must be one of .*, got None"),
        (lambda: mk.checksum_blocks(view_of(), [0], engine="cpu"),
         "^checksum_blocks: engine must be one of .*, got 'cpu'"),
        (lambda: mk.gather_blocks(view_of(), [[0]]), "block_ids must be 1-d"),
        (lambda: mk.gather_blocks(view_of(), None), "block_ids must be 1-d .*got NoneType"),
        (lambda: mk.gather_blocks(view_of(), ["a"]), "block_ids must be 1-d .*got list"),
        (lambda: mk.gather_blocks(view_of(), [2**70]), "block_ids must be 1-d .*got list"),
        (lambda: mk.gather_blocks(torch.zeros(2), [0]), "view must be a KVView, got Tensor"),
        (lambda: mk.scatter_blocks(torch.zeros(1, 1, 1, 1, 4, 8), [0], mk.KVView(
            torch.zeros(7, 1, 8).expand(7, 4, 8), "block token dim")), "stride 0 along 'token'"),
        (lambda: mk.gather_blocks(view_of(), [0], out=torch.zeros(1, 2)), "out must have shape"),
        (lambda: mk.scatter_blocks(torch.zeros(1, 2, 2, 4, 2, 8).half(), [0], view_of()),
         "packed must have the cache's dtype"),
        (lambda: mk.scatter_blocks(torch.zeros(1, 2, 2, 4, 8, 2).mT, [0], view_of()),
         "packed must be packed"),
    ],
)  # fmt: skip
def test_bad_arguments_are_rejected(make, message):
    with pytest.raises(mk.InvalidArgument, match=message):
        make()


@pytest.mark.parametrize(
    "strides, step",
    [
        ((8, 8, 1), "stride 8 along 'block', over 32 elements along 'token'"),
        ((31, 8, 1), "stride 31 along 'block', over 32 elements along 'token'"),
        ((8, 64, 1), None),
        ((64, 2, 1), "stride 2 along 'token', over 8 elements along 'dim'"),
    ],
)
def test_blocks_that_share_memory_are_only_read(strides, step):
    axes, packed = "block token dim", torch.arange(256.0).view(8, 1, 1, 1, 4, 8)
    cache = mk.KVView(torch.zeros(512).as_strided((8, 4, 8), strides), axes)
    plain = mk.KVView(torch.arange(256.0).view(8, 4, 8), axes)
    if step is None:
        mk.CopyPlan(plain, cache).run(range(8), range(8))
        assert torch.equal(mk.gather_blocks(cache, range(8)), packed)
        return
    with pytest.raises(mk.InvalidArgument, match=f"^CopyPlan: dst must have memory .* {step}"):
        mk.CopyPlan(plain, cache)
    with pytest.raises(mk.InvalidArgument, match=f"^scatter_blocks: view must have .* {step}"):
        mk.scatter_blocks(packed, range(8), cache)
    assert not cache.tensors[0].any()
    mk.CopyPlan(cache, plain).run(range(8), range(8))
    assert not plain.tensors[0].any()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_named_engine_never_falls_back():
    view, wrong = view_of(), (mk.Unavailable, mk.InvalidArgument)
    with pytest.raises(wrong, match="^gather_blocks: engine cuda"):
        mk.gather_blocks(view, [0], engine="cuda")
    plan, packer = mk.CopyPlan(view, view_of()), mk.Packer(view)
    staging = torch.zeros(packer.header(1).num_bytes, dtype=torch.uint8)
    header = packer.pack([0], staging)
    for op, call in (
        ("CopyPlan.run", lambda engine: plan.run([0], [0], engine=engine)),
        ("CopyPlan.run_slots", lambda engine: plan.run_slots([0], [0], engine=engine)),
        ("Packer.pack", lambda engine: packer.pack([0], staging, engine=engine)),
        ("Packer.unpack", lambda engine: packer.unpack(header, staging, [1], engine=engine)),
    ):
        for engine in ("cuda", "tma", "copy_engine", "two_hop"):
            with pytest.raises(wrong, match=f"^{op}: engine {engine}"):
                call(engine)
    packed = torch.zeros(view.packed_shape(1))
    with pytest.raises(wrong, match="^scatter_blocks: engine tma"):
        mk.scatter_blocks(packed, [0], view, engine="tma")
    with pytest.raises(wrong, match="^merge_attention: engine cuda"):
        mk.merge_attention(torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1), engine="cuda")


def test_operator_rejects_a_plan_made_for_other_tensors():
    """Called past the Python API, it still does not touch memory outside its tensors."""
    big, small = view_of(), view_of((2, 3, 4, 2, 8))
    out = torch.empty(big.packed_shape(1))
    ids = torch.tensor([6])
    with pytest.raises(ValueError, match="made for others"):
        torch.ops.mooncake_kernels.copy_blocks(
            small.tensors, [out], big.packed.gather_plan.values, ids, None, 0, 0
        )
    with pytest.raises(ValueError, match="plan must be an int64"):
        torch.ops.mooncake_kernels.copy_blocks(
            small.tensors, [out], torch.zeros(3), ids, None, 0, 0
        )


def operator_arguments(device):
    view = make_view("nhd_per_layer", SIZES, dtype=torch.int32, device=device)
    ids = torch.tensor([1, 3], device=device)
    out = torch.zeros(view.packed_shape(2), dtype=torch.int32, device=device)
    bad_id = view.bad_ids.address
    return view.tensors, [out], view.packed.gather_plan.values, ids, None, bad_id, 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_opcheck(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    src, [out], plan, ids, *_ = arguments = operator_arguments(device)
    operators = torch.ops.mooncake_kernels
    table = torch.empty(HEADER + (plan.numel() - HEADER) // 2, dtype=torch.int64)
    gpu = src[0].device.index if device == "cuda" else -1
    operators.resolve_copy_plan(src, [], plan, table, 0, gpu)
    for operator, given in [
        (operators.copy_blocks, arguments),
        (operators.resolve_copy_plan, (src, [], plan, table, 0, gpu)),
        (operators.copy_resolved, (table, 0, out.data_ptr(), ids, None, 0, 0)),
    ]:
        result = torch.library.opcheck(operator.default, given)
        assert set(result.values()) == {"SUCCESS"}, (operator, result)
    assert torch.equal(out[:, 1, 0], src[1][0, ids.cpu()])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_compiles_into_one_graph_with_the_cache_mutated(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    src = make_view("nhd_per_layer", SIZES, dtype=torch.int32, device=device)
    dst = make_view("block_first_hnd", SIZES, dtype=torch.int32, device=device, seed=9)
    plan = mk.CopyPlan(src, dst)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x, src_ids, dst_ids, gathered_ids):
        plan.run(src_ids, dst_ids)
        packed = mk.gather_blocks(dst, gathered_ids)
        return packed * 2 + x

    ids = [torch.tensor(i, device=device) for i in ([4, 2], [0, 5], [5, 0])]
    result = step(torch.ones((), dtype=torch.int32, device=device), *ids)
    assert torch.equal(dst.plane(1, 0)[0], src.plane(1, 0)[4])
    expected = mk.gather_blocks(dst, [5, 0], engine="reference") * 2 + 1
    assert torch.equal(result, expected)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_views_and_plans_can_be_made_in_compiled_code(compiler):
    axes = LAYOUTS["nhd_per_layer"][0]
    src, dst = (make_view("nhd_per_layer", SIZES, dtype=torch.int32, seed=seed) for seed in (1, 9))
    before = dst.tensors[0].clone()

    @torch.compile(fullgraph=True, backend=compiler)
    def step(x, caches, ids):
        there = mk.KVView(caches[len(src.tensors) :], axes)
        mk.CopyPlan(mk.KVView(caches[: len(src.tensors)], axes), there).run(ids, ids)
        return mk.gather_blocks(there, ids) + x

    ids = torch.tensor([5, 2])
    result = step(torch.ones((), dtype=torch.int32), [*src.tensors, *dst.tensors], ids)
    assert torch.equal(result, mk.gather_blocks(src, ids, engine="reference") + 1)
    expected = before.clone()
    expected[:, ids] = src.tensors[0][:, ids]
    assert torch.equal(dst.tensors[0], expected), "the cache that was handed in is mutated"


def test_a_bad_id_raises_in_compiled_code_too():
    view = make_view("nhd_per_layer", SIZES)
    compiled = torch.compile(lambda ids: mk.gather_blocks(view, ids), backend="aot_eager")
    with pytest.raises(ValueError, match=r"block_ids\[1\] must be -1 or in \[0, 7\), got 70"):
        compiled(torch.tensor([0, 70]))


def test_fake_cuda_tensors_work_on_any_machine():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        view = mk.KVView(torch.empty(2, 4, 16, 1, 64, device="cuda"), "kv block token head dim")
        out = torch.empty(view.packed_shape(2), device="cuda")
        ids = torch.empty(2, dtype=torch.int32, device="cuda")
        torch.ops.mooncake_kernels.copy_blocks(
            view.tensors, [out], view.packed.gather_plan.values, ids, None, 0, 0
        )
        cache = mk.KVView(torch.empty(4, 16, 64), "block token dim")  # and through the functions
        packed = mk.gather_blocks(cache, torch.empty(2, dtype=torch.int64))
        mk.scatter_blocks(packed, torch.empty(2, dtype=torch.int64), cache)
    assert out.device.type == "cuda" and packed.shape == (2, 1, 1, 1, 16, 64)


def test_copy_releases_the_gil():
    """The interpreter lock is free while blocks move: a counting thread makes progress."""
    view = mk.KVView(torch.zeros((64, 1, 4 << 20), dtype=torch.uint8), "block token dim")
    ids, out = torch.arange(64), torch.empty(view.packed_shape(64), dtype=torch.uint8)
    ticks, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            ticks[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    during, until = 0, time.monotonic() + 60
    while during <= 100 and time.monotonic() < until:  # a copy may be over before it has a core
        before = ticks[0]
        torch.ops.mooncake_kernels.copy_blocks(
            view.tensors, [out], view.packed.gather_plan.values, ids, None, 0, 0
        )
        during = ticks[0] - before
    stop.set()
    thread.join()
    assert during > 100
