"""What a copy does to elements on their way: fp8 and RoPE, alone, together, in any layout."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mooncake_kernels as mk

from .checks import twin
from .layouts import LAYOUTS, Sizes, make_view, snapshot

HOLE = -1
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
SIZES = Sizes(layer=2, block=5, head=2, token=2, dim=16)


pytestmark = pytest.mark.usefixtures("not_triton")


def floats(name, sizes, dtype, device="cpu", seed=0, spread=2.0):
    """A cache of normal numbers, of a layout by its name."""
    view = make_view(name, sizes, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(seed)
    for tensor in view.tensors:
        numbers = torch.randn(tensor.shape, generator=generator) * spread
        tensor.copy_(numbers.to(dtype))
    return view


def run(plan, backend, src_ids, dst_ids, method="run", **options):
    ids = [torch.tensor(i, device=backend.device) for i in (src_ids, dst_ids)]
    out = getattr(plan, method)(*ids, engine=backend.engine, **options)
    plan.check()
    return out


def planes(view):
    """All of a view, ``[layer, kv, block, head, token, dim]``."""
    rows = [
        torch.stack([view.plane(layer, kv) for kv in range(view.num_kv)])
        for layer in range(view.num_layers)
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scale", [1.0, 0.37, "tensor", "head"])
def test_fp8_round_trip_is_exact(backend, fp8, dtype, scale):
    if scale == "tensor":
        scale = torch.tensor([[[0.5], [3.1]], [[0.01], [7.0]]])
    elif scale == "head":
        scale = torch.tensor([0.3, 0.9])[None, None]
    table = torch.as_tensor(scale).expand(2, 2, 2).to(backend.device)[:, :, None, :, None, None]
    src = floats("nhd_per_layer", SIZES, dtype, backend.device)
    small = floats("block_first_hnd", SIZES, fp8, backend.device, seed=3)
    run(mk.CopyPlan(src, small, convert=mk.Fp8(scale)), backend, [4, HOLE, 0], [1, 2, 3])
    largest = torch.finfo(fp8).max
    expected = (planes(src)[:, :, [4, 0]].float() / table).clamp(-largest, largest).to(fp8)
    assert torch.equal(planes(small)[:, :, [1, 3]].view(torch.uint8), expected.view(torch.uint8))

    back = floats("universal", SIZES, dtype, backend.device, seed=4)
    run(mk.CopyPlan(small, back, convert=mk.Fp8(scale)), backend, [1, 3], [0, 4])
    expected = (expected.float() * table).to(dtype)
    assert torch.equal(planes(back)[:, :, [0, 4]], expected)


@pytest.mark.parametrize("fp8", FP8)
def test_every_float16_rounds_to_fp8_as_in_torch(backend, fp8):
    """All 65,536 of them: NaN stays NaN, what is too large becomes the largest."""
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    numbers = codes.view(torch.float16).to(backend.device).view(4, 4, 4096)
    src = mk.KVView(numbers, "block token dim")
    dst = mk.KVView(torch.zeros(4, 4, 4096, device=backend.device).to(fp8), "block token dim")
    run(mk.CopyPlan(src, dst, convert=mk.Fp8()), backend, range(4), range(4))
    largest = torch.finfo(fp8).max
    expected = numbers.float().clamp(-largest, largest).to(fp8)
    got = dst.tensors[0]
    assert torch.equal(got.float().isnan(), numbers.isnan())
    numeric = ~numbers.isnan()
    assert torch.equal(got.view(torch.uint8)[numeric], expected.view(torch.uint8)[numeric])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("fp8", FP8)
def test_every_fp8_code_converts_as_in_torch(backend, fp8, dtype):
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(fp8).to(backend.device)
    src = mk.KVView(codes.view(1, 1, 256), "block token dim")
    dst = mk.KVView(torch.zeros(1, 1, 256, dtype=dtype, device=backend.device), "block token dim")
    run(mk.CopyPlan(src, dst, convert=mk.Fp8()), backend, [0], [0])
    got, expected = dst.tensors[0].flatten(), codes.to(dtype)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got[~got.isnan()], expected[~expected.isnan()])


def turned(rows, delta, inv_freq, interleaved, first, dtype):
    """RoPE's own formula, in `dtype`'s arithmetic for the rows and for the angles."""
    angle = (delta * inv_freq.double()).to(dtype)
    out = rows.to(dtype).clone()
    part = out[..., first : first + 2 * angle.numel()]
    half = angle.numel()
    x, y = (part[..., 0::2], part[..., 1::2]) if interleaved else part.split(half, dim=-1)
    new = x * angle.cos() - y * angle.sin(), y * angle.cos() + x * angle.sin()
    x.copy_(new[0]), y.copy_(new[1])
    return out


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("dim", "options"),
    [
        (16, {}),
        (64, {"rotary_dim": 32, "first": 32}),
        (24, {"rotary_dim": 8}),  # a device cannot take it by whole units
        (16, {"inv_freq": [1.0, 0.3, 0.25, 0.01]}),
        (7, {"rotary_dim": 4, "first": 1}),
    ],
)
def test_rope_rotates_keys_but_not_values(backend, dtype, interleaved, dim, options):
    sizes = Sizes(layer=2, block=5, head=2, token=4, dim=dim)
    src = floats("nhd_per_layer", sizes, dtype, backend.device)
    dst = floats("page_head", sizes, dtype, backend.device, seed=5)
    rope = mk.Rope(500000.0, interleaved, **options)
    plan = mk.CopyPlan(src, dst, rope=rope)
    src_ids, dst_ids = [0, 2, HOLE, 4], [3, 1, 0, 2]
    positions = [0, 4, 8, 100_000], [1_000_000, 4, 0, 7]
    run(
        *(plan, backend, src_ids, dst_ids),
        src_positions=positions[0],
        dst_positions=positions[1],
    )
    got, source = planes(dst).cpu(), planes(src).cpu()
    inv_freq = options.get("inv_freq")
    if inv_freq is None:
        num_pairs = options.get("rotary_dim", dim) // 2
        inv_freq = [500000.0 ** (-j / num_pairs) for j in range(num_pairs)]
    inv_freq = torch.tensor(inv_freq, dtype=torch.float64)
    for i, (src_id, dst_id) in enumerate(zip(src_ids, dst_ids, strict=True)):
        if src_id == HOLE:
            continue
        assert torch.equal(got[:, 1, dst_id], source[:, 1, src_id]), "a value was turned"
        delta = positions[1][i] - positions[0][i]
        arguments = (source[:, 0, src_id], delta, inv_freq, interleaved, options.get("first", 0))
        exact = turned(*arguments, torch.float64)
        of_torch = turned(*arguments, torch.float32).to(dtype)
        error, torchs = ((a.double() - exact).abs().max() for a in (got[:, 0, dst_id], of_torch))
        assert error <= 2 * torchs, (error, torchs)


def test_rope_positions_follow_tokens_between_block_sizes(backend):
    """Each token has a position of its own: that of its block, and its place in it."""
    src = floats("hnd_per_layer", Sizes(layer=1, token=2, dim=8), torch.float32, backend.device)
    dst = floats("hnd_per_layer", Sizes(layer=1, token=4, dim=8), torch.float32, backend.device)
    expected = twin(dst)
    positions = {"src_positions": [10, 40, 6], "dst_positions": [100, 7]}
    plan = mk.CopyPlan(src, dst, rope=mk.Rope())
    run(plan, backend, [5, 1, 0], [3, 2], **positions)
    slots = mk.CopyPlan(src, expected, rope=mk.Rope())
    slots.run_slots(
        [10, 11, 2, 3, 0, 1],
        [12, 13, 14, 15, 8, 9],
        src_positions=[10, 11, 40, 41, 6, 7],
        dst_positions=[100, 101, 102, 103, 7, 8],
        engine="reference",
    )
    torch.testing.assert_close(planes(dst), planes(expected), rtol=0, atol=1e-5)


def test_rope_round_trip_and_zero_rotation(backend):
    src = floats("kv_apart", SIZES, torch.float32, backend.device)
    dst = floats("lbnhc", SIZES, torch.float32, backend.device, seed=8)
    plan = mk.CopyPlan(src, dst, rope=mk.Rope())
    run(plan, backend, [0, 1], [2, 3], src_positions=[0, 50], dst_positions=[0, 50])
    assert torch.equal(planes(dst)[:, :, [2, 3]], planes(src)[:, :, [0, 1]])
    run(plan, backend, [0], [2], src_positions=[0], dst_positions=[77])
    back = floats("kv_apart", SIZES, torch.float32, backend.device, seed=9)
    plan = mk.CopyPlan(dst, back, rope=mk.Rope())
    run(plan, backend, [2], [0], src_positions=[77], dst_positions=[0])
    torch.testing.assert_close(planes(back)[:, :, 0], planes(src)[:, :, 0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("dtypes", ["quantize", "dequantize", "neither"])
def test_fp8_and_rope_combined(backend, fp8, dtypes):
    """The values are exact; a key may be off by one step of fp8, where float32 rounds otherwise."""
    src_dtype = torch.bfloat16 if dtypes == "quantize" else fp8
    dst_dtype = torch.bfloat16 if dtypes == "dequantize" else fp8
    src = floats("nhd_per_layer", SIZES, src_dtype, backend.device)
    dst = floats("lhbnc", SIZES, dst_dtype, backend.device, seed=5)
    expected = twin(dst)
    convert = None if dtypes == "neither" else mk.Fp8(0.25)
    for engine, target in (("reference", expected), (backend.engine, dst)):
        plan = mk.CopyPlan(src, target, convert=convert, rope=mk.Rope(100.0))
        plan.run([1, 4], [0, 2], src_positions=[0, 2], dst_positions=[9, 3], engine=engine)
        plan.check()
    got, wanted = planes(dst).float(), planes(expected).float()
    assert torch.equal(got[:, 1], wanted[:, 1])
    step = torch.finfo(dst_dtype).eps
    torch.testing.assert_close(got[:, 0], wanted[:, 0], rtol=step, atol=1e-5)
    assert (got[:, 0] == wanted[:, 0]).float().mean() > 0.95


def test_rope_rotates_only_the_tail_of_mla_rows(backend):
    """512 latent elements and 64 turned ones, to fp8 with the same plan."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(3, 2, 576, generator=generator).to(torch.bfloat16).to(backend.device)
    src = mk.KVView(rows, "block token dim")
    dst = mk.KVView(torch.zeros_like(rows), "block token dim")
    plan = mk.CopyPlan(src, dst, rope=mk.Rope(first=512, interleaved=True))
    run(plan, backend, [2], [0], src_positions=[5], dst_positions=[9])
    got = dst.tensors[0]
    assert torch.equal(got[0, :, :512], rows[2, :, :512])
    inv_freq = torch.tensor([10000.0 ** (-j / 32) for j in range(32)])
    exact = turned(rows[2].cpu(), 4, inv_freq, True, 512, torch.float64)
    torch.testing.assert_close(got[0].cpu().double(), exact, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("heads", [(slice(1, 3), slice(0, 2)), (slice(0, 1), slice(3, 4))])
def test_scales_follow_the_head_slice(backend, heads):
    """Scales are those of the fp8 cache's heads, whichever of them are copied."""
    src_heads, dst_heads = heads
    scale = torch.tensor([0.5, 1.0, 2.0, 4.0])[None, None]
    src = floats("hnd_per_layer", Sizes(head=4, dim=8), torch.bfloat16, backend.device)
    dst = floats("nhd_per_layer", Sizes(head=4, dim=8), FP8[0], backend.device)
    chosen = {"src_heads": src_heads, "dst_heads": dst_heads, "convert": mk.Fp8(scale)}
    run(mk.CopyPlan(src, dst, layers=[2, 0], **chosen), backend, [1], [2])
    table = scale.to(backend.device)[0, 0, dst_heads][:, None, None]
    for layer in (0, 2):
        source = src.plane(layer, 1)[1, src_heads].float()
        target = dst.plane(layer, 1)[2, dst_heads]
        assert torch.equal(target.view(torch.uint8), (source / table).to(FP8[0]).view(torch.uint8))


AXES = st.permutations(["layer", "kv", "block", "head", "token"])


@given(src_axes=AXES, dst_axes=AXES, data=st.data())
@settings(max_examples=60, deadline=None)
def test_transforms_work_in_any_axis_order(src_axes, dst_axes, data):
    extents = {axis: data.draw(st.integers(1, 3), axis) for axis in src_axes}
    extents |= {"kv": min(extents["kv"], 2), "dim": 2 * data.draw(st.integers(1, 9), "half dim")}
    dtypes = st.sampled_from([(torch.bfloat16, FP8[0]), (FP8[1], torch.float32)])
    src_dtype, dst_dtype = data.draw(dtypes)

    def view(axes, dtype, seed):
        shape = [extents[axis] for axis in (*axes, "dim")]
        numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return mk.KVView(numbers.to(dtype), " ".join([*axes, "dim"]))

    src = view(src_axes, src_dtype, 1)
    dst, expected = view(dst_axes, dst_dtype, 2), view(dst_axes, dst_dtype, 2)
    dst_ids = data.draw(st.permutations(range(extents["block"])))
    src_ids = [data.draw(st.integers(HOLE, extents["block"] - 1)) for _ in dst_ids]
    for engine, target in (("reference", expected), ("host", dst)):
        plan = mk.CopyPlan(src, target, convert=mk.Fp8(0.7), checksum=True)
        sums = plan.run(src_ids, dst_ids, engine=engine)
        if engine == "reference":
            expected_sums = sums
    assert torch.equal(snapshot(dst), snapshot(expected))
    assert torch.equal(sums, expected_sums)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mk.Fp8("1"), "Fp8: scale must be a number or a tensor, got str"),
        (lambda: mk.Fp8(0.0), "Fp8: scale must be positive and finite, got 0.0"),
        (lambda: mk.Fp8(math.inf), "Fp8: scale must be positive and finite, got inf"),
        (lambda: mk.Fp8(torch.ones(2)), r"floating-point tensor \[layer, kv, head\], got .*\(2,\)"),
        (lambda: mk.Fp8(torch.tensor(1)), "floating-point tensor .*, got torch.int64"),
        (lambda: mk.Rope(-1.0), "Rope: theta must be a positive number, got -1.0"),
        (lambda: mk.Rope(interleaved=1), "Rope: interleaved must be True or False, got 1"),
        (lambda: mk.Rope(rotary_dim=3), "Rope: rotary_dim must be even, got 3"),
        (lambda: mk.Rope(rotary_dim=0), "Rope: rotary_dim must be an integer >= 2, got 0"),
        (lambda: mk.Rope(-(10**5000)), "Rope: theta must be a positive number, got a huge int"),
        (lambda: mk.Rope(first=-1), "Rope: first must be an integer >= 0, got -1"),
        (lambda: mk.Rope(inv_freq=[]), "Rope: inv_freq must be a list of finite numbers"),
        (lambda: mk.Rope(rotary_dim=4, inv_freq=[1.0]), "inv_freq must be a list of 2 finite"),
        (lambda: mk.Rope(inv_freq="abc"), "Rope: inv_freq must be numbers that float64 holds"),
        (lambda: mk.Rope(inv_freq=[[1.0, 2.0], [3.0]]), "Rope: inv_freq must be numbers that"),
        (lambda: mk.Rope(10**400), "Rope: theta must be numbers that float64 holds, got int"),
        (lambda: mk.Fp8(10**400), "Fp8: scale must be numbers that float64 holds, got int"),
    ],
)
def test_bad_transforms_are_rejected(make, message):
    with pytest.raises(mk.InvalidArgument, match=message):
        make()


@pytest.mark.parametrize("number", [2, 0.3, Fraction(3, 10)])
def test_scale_ignores_torch_default_dtype_and_device(number):
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # as engines do while they load a model
    try:
        with torch.device("meta"):
            scale = mk.Fp8(number).scale
    finally:
        torch.set_default_dtype(dtype)
    assert scale.device.type == "cpu"
    assert torch.equal(scale, torch.tensor(float(number), dtype=torch.float32))


@pytest.mark.parametrize(
    ("src", "dst", "options", "message"),
    [
        (torch.float16, FP8[0], {}, r"dst must have src's dtype torch.float16 or convert=Fp8"),
        (torch.float16, torch.float32, {}, r"dst must have src's dtype torch.float16, got"),
        (torch.float16, torch.float32, {"convert": mk.Fp8()}, "convert must be between float32"),
        (FP8[0], FP8[1], {"convert": mk.Fp8()}, "convert must be between float32"),
        (FP8[0], FP8[0], {"convert": mk.Fp8()}, "convert must be None where dst has src's dtype"),
        (torch.float16, FP8[0], {"convert": 2.0}, "convert must be mk.Fp8 or None, got float"),
        (torch.int8, torch.int8, {"rope": mk.Rope()}, "rope must be given floats .*, got .*int8"),
        (torch.half, torch.half, {"rope": 1}, "rope must be mk.Rope or None, got int"),
        (torch.half, torch.half, {"rope": mk.Rope(first=8)}, "inside rows of 8 elements, got 0"),
        (torch.half, torch.half, {"rope": mk.Rope(rotary_dim=10)}, "of 8 elements, got 10"),
        (
            *(torch.half, FP8[0], {"convert": mk.Fp8(torch.ones(1, 1, 3))}),
            r"scale must broadcast to \[3, 2, 2\].*, got shape \(1, 1, 3\)",
        ),
    ],
)
def test_bad_plans_are_rejected(src, dst, options, message):
    src = make_view("nhd_per_layer", Sizes(), dtype=src)
    dst = make_view("hnd_per_layer", Sizes(), dtype=dst)
    with pytest.raises(mk.InvalidArgument, match=message):  # when it is made, not when it is run
        mk.CopyPlan(src, dst, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "src_positions must be given for a plan with rope, got NoneType"),
        ({"src_positions": [0]}, "dst_positions must be given for a plan with rope"),
        (
            {"src_positions": [0, 1], "dst_positions": [0]},
            r"src_positions must be as many as the ids \(1\), got 2",
        ),
        (
            {"src_positions": [0], "dst_positions": [0.5]},
            "dst_positions must be 1-d int32 or int64, got torch.float32",
        ),
        (
            {"src_positions": [0], "dst_positions": [0], "checksums": torch.zeros(1).long()},
            "checksums must be None for a plan without checksum",
        ),
    ],
)
def test_bad_runs_are_rejected(options, message):
    src, dst = (floats("nhd_per_layer", SIZES, torch.half, seed=i) for i in range(2))
    with pytest.raises(mk.InvalidArgument, match=f"CopyPlan.run: {message}"):
        mk.CopyPlan(src, dst, rope=mk.Rope()).run([0], [1], **options)
    with pytest.raises(mk.InvalidArgument, match="must be None for a plan without rope, got list"):
        mk.CopyPlan(src, dst).run([0], [1], src_positions=[0])


def test_triton_rejects_checksums():
    src, dst = (floats("nhd_per_layer", SIZES, torch.half, seed=i) for i in range(2))
    with pytest.raises(mk.Unavailable, match="^CopyPlan.run: engine triton: it moves bytes"):
        mk.CopyPlan(src, dst, checksum=True).run([0], [1], engine="triton")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_transforming_plan_compiles(layout):
    src = floats("nhd_per_layer", SIZES, torch.half)
    dst, expected = (floats(layout, SIZES, FP8[0], seed=1) for _ in range(2))
    plan = mk.CopyPlan(src, dst, convert=mk.Fp8(2.0), rope=mk.Rope(), checksum=True)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(src_ids, dst_ids, src_positions, dst_positions):
        return plan.run(src_ids, dst_ids, src_positions=src_positions, dst_positions=dst_positions)

    arguments = [torch.tensor(i) for i in ([4, 1], [0, 2], [0, 9], [5, 8])]
    sums = step(*arguments)
    again = mk.CopyPlan(src, expected, convert=mk.Fp8(2.0), rope=mk.Rope(), checksum=True)
    eager = again.run(*arguments[:2], src_positions=[0, 9], dst_positions=[5, 8])
    assert torch.equal(snapshot(dst), snapshot(expected)) and torch.equal(sums, eager)


def test_more_planes_than_one_launch_takes(backend):
    """Of 600 planes, the last 88 have scales, keys and words of their own."""
    numbers = torch.randn(300, 2, 2, 1, 4, generator=torch.Generator().manual_seed(5))
    src = mk.KVView(numbers.half().to(backend.device), "layer kv block token dim")
    scales = torch.arange(1.0, 301).view(300, 1, 1) / 100
    sums = {}
    for engine in (backend.engine, "reference"):
        dst = mk.KVView(
            torch.zeros(300, 2, 2, 1, 4).to(backend.device, FP8[0]), "layer kv block token dim"
        )
        plan = mk.CopyPlan(src, dst, convert=mk.Fp8(scales), checksum=True)
        sums[engine] = plan.run([1, 0], [0, 1], engine=engine)
        plan.check()
        plan = mk.CopyPlan(src, twin(src), rope=mk.Rope())
        plan.run([1], [0], src_positions=[0], dst_positions=[1], engine=engine)
        keys, values = planes(plan.dst)[:, 0], planes(plan.dst)[:, 1]
        assert torch.equal(values[:, 0], planes(src)[:, 1, 1])
        assert bool((keys[:, 0] != planes(src)[:, 0, 1]).any(-1).all())
        assert torch.equal(sums[engine], mk.checksum_blocks(dst, [0, 1], engine=engine))
    assert torch.equal(sums[backend.engine], sums["reference"])
