"""append_kv: bitwise where nothing is converted; Fp8 and Rope as a CopyPlan applies them."""

import logging
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mooncake_kernels as mk
from mooncake_kernels import _library

from .steps import LAYOUTS

FP8 = torch.float8_e4m3fn
SLOTS = [5, -1, 0, 47, 13]


def caches(axes, dtype, dims=(16, 8), num_blocks=6, block_size=8, heads=2):
    sizes = {"block": num_blocks, "token": block_size, "head": heads}
    return [
        torch.full([{**sizes, "dim": dim}[axis] for axis in axes.split()], 0.5).to(dtype)
        for dim in dims
    ]


def by_slots(cache, axes):
    """Return a view ``[block, token, head, dim]``."""
    return cache.permute([axes.split().index(axis) for axis in LAYOUTS[0].split()])


def run(engine, k, v, caches, slots, **options):
    """Run on the engine's device; return the caches."""
    moved = [cache.to(engine.device) for cache in caches]
    tensors = {"positions", "k_scale", "v_scale"}
    options = {
        name: value.to(engine.device)
        if name in tensors and isinstance(value, torch.Tensor)
        else value
        for name, value in options.items()
    }
    arguments = (k.to(engine.device), v.to(engine.device), *moved, slots.to(engine.device))
    mk.append_kv(*arguments, engine=engine.engine, **options)
    return [cache.cpu() for cache in moved]


@pytest.mark.parametrize("axes", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_written_to_their_slots(engine, axes, dtype):
    k, v = torch.randn(5, 2, 16).to(dtype), torch.randn(5, 3, 8).to(dtype)[:, 1:]
    before = caches(axes, dtype)
    expected = [cache.clone() for cache in before]
    for rows, cache in zip((k, v), expected, strict=True):
        for row, slot in zip(rows, SLOTS, strict=True):
            if slot >= 0:
                by_slots(cache, axes)[slot // 8, slot % 8] = row
    for ours, other in zip(
        run(engine, k, v, before, torch.tensor(SLOTS), axes=axes), expected, strict=True
    ):
        assert torch.equal(ours, other)


def test_fp8_saturates_and_scales_each_head(host_engine):
    k, v = torch.randn(5, 2, 16) * 300, torch.randn(5, 2, 8)
    scales = torch.tensor([0.25, 2.0])
    ours = run(
        host_engine, k, v, caches(LAYOUTS[0], FP8), torch.tensor(SLOTS), k_scale=scales, v_scale=0.5
    )
    expected = (k / scales[:, None]).clamp(-448, 448).to(FP8)
    assert torch.equal(ours[0][0, 5].view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(ours[0][5, 7].view(torch.uint8), expected[3].view(torch.uint8))
    assert torch.equal(ours[1][1, 5].float(), (v[4] / 0.5).to(FP8).float())
    assert torch.equal(ours[1][3].float(), torch.full((8, 2, 8), 0.5))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim, first", [(None, 0), (8, 0), (8, 4)])
def test_rope_rotates_keys_by_their_positions(engine, interleaved, rotary_dim, first):
    rope = mk.Rope(1000.0, interleaved, rotary_dim=rotary_dim, first=first)
    k, v = torch.randn(5, 2, 16), torch.randn(5, 2, 8)
    positions = torch.tensor([0, 3, 100, 70000, 9])
    ours = run(
        engine, k, v, caches(LAYOUTS[0], torch.float32), torch.tensor(SLOTS),
        rope=rope, positions=positions,
    )  # fmt: skip
    num_pairs = (rotary_dim or 16) // 2
    angles = positions.double()[:, None] * 1000.0 ** -(torch.arange(num_pairs).double() / num_pairs)
    expected = k.double().clone()
    for j in range(num_pairs):
        x = first + (2 * j if interleaved else j)
        y = x + (1 if interleaved else num_pairs)
        cos, sin = angles[:, j, None].cos(), angles[:, j, None].sin()
        expected[:, :, x] = k[:, :, x] * cos - k[:, :, y] * sin
        expected[:, :, y] = k[:, :, y] * cos + k[:, :, x] * sin
    for i, slot in enumerate(SLOTS):
        if slot >= 0:
            got = ours[0][slot // 8, slot % 8].double()
            torch.testing.assert_close(got, expected[i], rtol=0, atol=2e-6)
            assert torch.equal(ours[1][slot // 8, slot % 8], v[i])


def test_mla_writes_one_row_per_token(engine):
    latent = torch.randn(5, 24)
    cache = torch.zeros(6, 8, 24, device=engine.device)
    slots = torch.tensor(SLOTS, device=engine.device)
    mk.append_kv(
        latent.to(engine.device), None, cache, None, slots, axes="block token dim",
        engine=engine.engine,
    )  # fmt: skip
    assert torch.equal(cache[0, 5].cpu(), latent[0]) and torch.equal(cache[5, 7].cpu(), latent[3])
    assert cache.count_nonzero() == 4 * 24


@settings(max_examples=50, deadline=None)
@given(st.data(), st.integers(1, 9), st.integers(1, 3), st.integers(1, 40), st.integers(1, 5))
def test_appended_tokens_are_attended_to(data, num_tokens, heads, dim, block_size):
    """A prompt written token by token, in any slots, is the prompt."""
    num_slots = (num_tokens + 2) * block_size
    blocks = data.draw(st.permutations(range(num_tokens + 2)))
    slots = [blocks[i // block_size] * block_size + i % block_size for i in range(num_tokens)]
    assert max(slots) < num_slots
    k, v = torch.randn(2, num_tokens, heads, dim)
    cache = torch.full((2, num_tokens + 2, block_size, heads, dim), torch.nan)
    mk.append_kv(k, v, cache[0], cache[1], torch.tensor(slots))
    batch = mk.ChunkBatch([num_tokens], [num_tokens])
    rows = mk.mask.rows(mk.mask.causal(), batch)
    q = torch.randn(num_tokens, heads, dim)
    table = torch.tensor([blocks[: -(-num_tokens // block_size)]], dtype=torch.int32)
    out, _ = mk.paged_attention(q, cache[0], cache[1], table, rows)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True
    )
    torch.testing.assert_close(out, expected.transpose(0, 1), rtol=1e-4, atol=1e-5)


def test_auto_logs_its_choice_once(caplog):
    k, v = torch.randn(2, 5, 2, 8)
    cache = caches(LAYOUTS[0], torch.float32, (8, 8))
    _library._logged.clear()
    with caplog.at_level(logging.INFO, logger="mooncake_kernels"):
        for _ in range(2):
            mk.append_kv(k, v, *cache, torch.tensor(SLOTS))
    assert caplog.messages == ["engine auto: host for append_kv on cpu"]


def test_opcheck_and_compile():
    k, v = torch.randn(2, 5, 2, 8)
    cache = caches(LAYOUTS[0], torch.float32, (8, 8))
    operator = torch.ops.mooncake_kernels.append_kv.default
    slots = torch.tensor(SLOTS)
    torch.library.opcheck(operator, (k, v, *cache, slots, None, 0, False, None, None))
    _library._logged.clear()  # a choice that was not logged yet must not break the graph
    compiled = torch.compile(mk.append_kv, backend="aot_eager", fullgraph=True)
    other = caches(LAYOUTS[0], torch.float32, (8, 8))
    compiled(k, v, *other, slots)
    mk.append_kv(k, v, *cache, slots)
    assert torch.equal(cache[0], other[0]) and torch.equal(cache[1], other[1])


def test_autograd_detects_a_write_to_the_cache(engine):
    k = torch.ones(5, 1, 8, device=engine.device)
    cache = torch.zeros(6, 8, 1, 8, device=engine.device)
    product = torch.ones_like(cache, requires_grad=True) * cache  # saves cache
    slots = torch.tensor(SLOTS, device=engine.device)
    mk.append_kv(k, None, cache, None, slots, engine=engine.engine)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_writes_a_cache_made_in_inference_mode(engine):
    with torch.inference_mode():
        cache = torch.zeros(6, 8, 1, 8, device=engine.device)
    k = torch.ones(5, 1, 8, device=engine.device)
    slots = torch.tensor(SLOTS, device=engine.device)
    mk.append_kv(k, None, cache, None, slots, engine=engine.engine)
    assert cache.sum() == 4 * 8


def test_bad_slot_is_reported_and_nothing_is_written(engine):
    if engine.device == "cuda":
        pytest.skip("on CUDA a later call raises")
    k = torch.ones(3, 2, 16)
    cache = caches(LAYOUTS[0], torch.float32, (16, 16))
    with pytest.raises(
        mk.InvalidArgument, match=r"^append_kv: slots\[2\] must be -1 or in \[0, 48\), got 48"
    ):
        mk.append_kv(k, k, *cache, torch.tensor([0, -1, 48]), engine=engine.engine)
    assert (cache[0] == 0.5).all() and (cache[1] == 0.5).all()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"slots": torch.zeros(5)}, r"slots must be int64 \[5\]"),
        ({"slots": torch.zeros(4, dtype=torch.int64)}, r"slots must be int64 \[5\]"),
        ({"k": torch.ones(5, 3, 16)}, r"k must be .* \[n, 2, 16\]"),
        ({"k": torch.ones(5, 2, 16).requires_grad_()}, "k must not require grad"),
        ({"k_scale": torch.ones(2).requires_grad_()}, "k_scale must not require grad"),
        ({"v_scale": torch.ones(()).half().requires_grad_()}, "v_scale must not require grad"),
        ({"v": None}, "v and v_cache must both be given"),
        ({"axes": "block token dim head x"}, "axes must be an order of"),
        ({"rope": mk.Rope()}, "positions must be a tensor where there is a rope"),
        ({"k_scale": torch.ones(3)}, "k_scale must be a number"),
        ({"k_scale": 10**400}, "k_scale must be a positive number that float32 holds, got 1000"),
        ({"k_scale": 0.0}, "k_scale must be a positive number that float32 holds, got 0.0"),
        ({"v_scale": torch.tensor([1, float("nan")])}, "v_scale must be positive and finite, got"),
        ({"v_scale": torch.tensor(-1.0)}, "v_scale must be positive and finite, got -1.0"),
        ({"k": torch._neg_view(torch.ones(5, 2, 16))}, "k must not be negated lazily"),
        ({"engine": "cuda"}, "engine must be one of"),
    ],
)
def test_bad_arguments_are_rejected(change, message):
    k_cache, v_cache = caches(LAYOUTS[0], torch.float32)
    arguments = {
        "k": torch.ones(5, 2, 16), "v": torch.ones(5, 2, 8), "k_cache": k_cache,
        "v_cache": v_cache, "slots": torch.tensor(SLOTS),
    }  # fmt: skip
    with pytest.raises(mk.InvalidArgument, match=f"^append_kv: {message}"):
        mk.append_kv(**{**arguments, **change})


def on_meta(cache):
    return cache.to("meta")


@pytest.mark.parametrize(
    "change, message",
    [
        (torch._neg_view, "k_cache must not be negated lazily"),
        (torch.Tensor.to_sparse, "k_cache must be strided, got torch.sparse_coo"),
        (lambda cache: cache[:1].expand(6, -1, -1, -1), "k_cache must have memory .* 'block'"),
        (on_meta, "k_cache must be on cpu or cuda, got meta"),
    ],
)
def test_unwritable_cache_is_rejected(engine, change, message):
    k, cache = torch.ones(5, 2, 16), torch.zeros(6, 8, 2, 16)
    changed = change(cache)
    rows = on_meta(k) if change is on_meta else k
    with pytest.raises(mk.InvalidArgument, match=f"^append_kv: {message}"):
        mk.append_kv(rows, rows, changed, cache, torch.tensor(SLOTS), engine=engine.engine)
    assert not cache.any()


@pytest.mark.parametrize(
    "strides, axis",
    [
        ((8, 2, 8, 1), "token"),  # tokens step into the middle of the dims of others
        ((32, 8, 4, 1), "head"),
        ((24, 16, 8, 1), "block"),
    ],
)
def test_cache_with_overlapping_elements_is_rejected(strides, axis):
    cache = torch.zeros(128).as_strided((2, 2, 2, 8), strides)
    rows, slots = torch.ones(1, 2, 8), torch.tensor([0])
    message = f"^append_kv: v_cache must have memory for each .* stride .* along '{axis}', over"
    with pytest.raises(mk.InvalidArgument, match=message):
        mk.append_kv(rows, rows, torch.zeros(2, 2, 2, 8), cache, slots)


SIDES = {  # of [block, token, head, dim] each
    "one after the other": lambda whole: (whole[0], whole[1]),
    "blocks alternate": lambda whole: (whole[:, 0], whole[:, 1]),
    "tokens alternate": lambda whole: (whole[:, :, 0], whole[:, :, 1]),
    "dims alternate": lambda whole: (whole[..., :3], whole[..., 3:]),
    "reversed": lambda whole: (whole[..., 3:], whole[..., :3]),
    "heads": lambda whole: (whole[:, :, :1], whole[:, :, 1:]),
    "heads overlap": lambda whole: (whole[:, :, :2], whole[:, :, 1:]),
    "dims overlap": lambda whole: (whole[..., :4], whole[..., 3:]),
    "blocks overlap": lambda whole: (whole[:3], whole[1:]),
    "tokens overlap": lambda whole: (whole[:, :1], whole[:, 1:]),
}


@pytest.mark.parametrize("shape", [(2, 2, 2, 2, 8), (4, 2, 2, 8), (4, 2, 3, 8)])
@pytest.mark.parametrize("sides", SIDES)
def test_caches_sharing_elements_are_rejected_and_only_those(shape, sides):
    whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    k_cache, v_cache = SIDES[sides](whole)
    if k_cache.dim() != 4 or k_cache.shape[:3] != v_cache.shape[:3]:
        pytest.skip("no caches of such a shape")
    share = not set(k_cache.flatten().tolist()).isdisjoint(v_cache.flatten().tolist())
    k, v = (torch.ones(1, *cache.shape[2:]) for cache in (k_cache, v_cache))
    call = (k, v, k_cache, v_cache, torch.tensor([0]))
    if not share:
        mk.append_kv(*call)
        return
    with pytest.raises(mk.InvalidArgument, match="v_cache must have memory of its own, got"):
        mk.append_kv(*call)


def test_rows_and_caches_may_share_an_allocation_but_no_memory():
    whole = torch.zeros(6, 2, 8, 2, 16)
    k_cache, v_cache = whole[:, 0], whole[:, 1]  # one range, but not one element
    k, slots = torch.ones(5, 2, 16), torch.tensor(SLOTS)
    for caches_and_rows, message in (
        ((k, k, k_cache, k_cache), "v_cache must have memory of its own, got that of k_cache"),
        ((k_cache[0, :5], k, k_cache, v_cache), "k must have .* got some inside k_cache"),
        ((k, v_cache[0, :5], k_cache, v_cache), "v must have .* got some inside k_cache"),
    ):
        with pytest.raises(mk.InvalidArgument, match=f"^append_kv: {message}"):
            mk.append_kv(*caches_and_rows, slots)
    assert not whole.any()
    mk.append_kv(k, 2 * k, k_cache, v_cache, slots)
    assert whole.sum() == 4 * 2 * 16 * 3
    arena = torch.zeros(5 * 2 * 16 + k_cache.numel())
    rows, cache = arena[: 5 * 2 * 16].view(5, 2, 16), arena[5 * 2 * 16 :].view(6, 8, 2, 16)
    rows.fill_(1)
    mk.append_kv(rows, None, cache, None, slots)
    assert cache.sum() == 4 * 2 * 16
