"""copy_blocks moves bytes: every comparison is bitwise, and each byte identifies its source."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mooncake_kernels as mk

from .checks import check, twin
from .layouts import (
    LAYOUTS,
    MLA_LAYOUTS,
    Sizes,
    addressed,
    make_view,
    snapshot,
    sparse_blocks,
)

HOLE = -1
SIZES = Sizes()


@pytest.mark.parametrize("src_name", LAYOUTS)
def test_copies_any_layout_to_any_other(backend, src_name):
    names = list(LAYOUTS)
    if backend.engine == "triton" and backend.device == "cpu":
        # The interpreter takes a millisecond a program: each layout once on either side.
        names = [names[names.index(src_name) - 1]]
    sizes = Sizes(layer=2, block=5, head=2, token=2)
    src = make_view(src_name, sizes, device=backend.device)
    for dst_name in names:
        dst = make_view(dst_name, sizes, device=backend.device, seed=100)
        check(src, dst, [4, 0, 2], [1, 3, 0], backend)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("src_ids", "dst_ids"),
    [([], []), ([3], [3]), ([6, 0, 6], [0, 1, 2]), ([HOLE], [2]), ([2, HOLE, 4], [HOLE, 1, 6])],
)
def test_copies_ids_and_skips_holes(backend, ids_dtype, src_ids, dst_ids):
    src = make_view("nhd_per_layer", SIZES, device=backend.device)
    dst = make_view("block_first_hnd", SIZES, device=backend.device, seed=50)
    check(src, dst, src_ids, dst_ids, backend, ids_dtype)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dim", [1, 3, 8, 576])
def test_every_alignment(backend, dtype, dim):
    sizes = Sizes(layer=1, block=3, head=1, token=2, dim=dim)
    src = make_view("nhd_per_layer", sizes, dtype=dtype, device=backend.device)
    dst = make_view("hnd_per_layer", sizes, dtype=dtype, device=backend.device, seed=9)
    check(src, dst, [2, 1], [0, 2], backend)


def test_padding_between_rows_is_left_untouched(backend):
    src = make_view("nhd_per_layer", SIZES, device=backend.device, padding=2)
    dst = make_view("hnd_per_layer", SIZES, device=backend.device, padding=1, seed=40)
    check(src, dst, [0, 6], [5, 1], backend)


def test_views_at_an_odd_offset(backend):
    """A base address that no vector is aligned to."""
    whole = addressed((2, 5, 2, 2, 3, 9), torch.uint8, backend.device, 1)
    src = mk.KVView(whole[..., 1:], "layer block kv head token dim")
    dst = make_view(
        "layer_first", Sizes(2, 2, 4, 2, 3, 8), dtype=torch.uint8, device=backend.device
    )
    check(src, dst, [4, 2], [0, 3], backend)


@pytest.mark.parametrize("src_name", MLA_LAYOUTS)
@pytest.mark.parametrize(("dtype", "dim"), [(torch.bfloat16, 576), (torch.uint8, 656)])
def test_copies_any_mla_layout_to_any_other(backend, src_name, dtype, dim):
    names = list(MLA_LAYOUTS)
    if backend.engine == "triton" and backend.device == "cpu":
        names = [names[names.index(src_name) - 1]]
    sizes = Sizes(layer=2, kv=1, block=4, head=1, token=2, dim=dim)
    src = make_view(src_name, sizes, dtype=dtype, device=backend.device)
    for dst_name in names:
        for padding in (0, 1):
            options = {"dtype": dtype, "device": backend.device, "padding": padding}
            dst = make_view(dst_name, sizes, seed=100, **options)
            check(src, dst, [3, 0, HOLE], [1, 2, 0], backend)
            dst = make_view(dst_name, sizes, seed=100, **options)
            check(src, dst, [7, 0, 3], [1, 2, 6], backend, method="run_slots")


def test_mla_views_need_no_kv_and_head_axes(backend):
    sizes = (5, 4, 576)
    layers = [addressed(sizes, torch.bfloat16, backend.device, i) for i in range(2)]
    src = mk.KVView(layers, "block token dim")
    dst = mk.KVView(
        addressed((5, 2, 4, 576), torch.bfloat16, backend.device, 7), "block layer token dim"
    )
    check(src, dst, [4, 1], [0, 2], backend)


@pytest.mark.parametrize("layers", [None, [2], [0, 2], slice(1, None)])
def test_run_copies_only_the_selected_layers(backend, layers):
    src = make_view("page_first", SIZES, device=backend.device)
    dst = make_view("block_first_hnd", SIZES, device=backend.device, seed=3)
    expected = twin(dst)
    mk.CopyPlan(src, expected).run([1], [2], layers=layers, max_sms=1, engine="reference")
    max_sms = None if backend.engine == "triton" else 1
    mk.CopyPlan(src, dst).run([1], [2], layers=layers, max_sms=max_sms, engine=backend.engine)
    assert torch.equal(snapshot(dst), snapshot(expected))


def test_more_planes_than_one_launch_takes():
    """600 planes go to the kernel in two parts."""
    layers = [addressed((2, 2, 2, 1, 4), torch.uint8, "cpu", i) for i in range(300)]
    src = mk.KVView(layers, "kv block token head dim")
    out = mk.gather_blocks(src, [1, 0], engine="host")
    assert torch.equal(out, mk.gather_blocks(src, [1, 0], engine="reference"))


def test_offsets_beyond_32_bits(tmp_path):
    block_bytes, num_blocks = 1 << 20, 6 << 10
    cache = sparse_blocks(tmp_path / "cache", num_blocks, block_bytes)
    view = mk.KVView(cache, "block token dim")
    data = addressed((2, 1, 1, 1, 4, block_bytes // 4), torch.uint8, "cpu", 5)
    ids = torch.tensor([num_blocks - 1, 4097])
    mk.scatter_blocks(data, ids, view)
    assert torch.equal(cache[-1], data[0, 0, 0, 0]) and torch.equal(cache[4097], data[1, 0, 0, 0])
    assert torch.equal(mk.gather_blocks(view, ids), data)
    assert not cache[1].any() and not cache[2047].any()


def test_large_copy_bypasses_the_cpu_cache():
    """36 MB, with ends that are not aligned; test_run_copier.cc streams on any processor."""
    cache = addressed((2, 3, 9, 1 << 20), torch.uint8, "cpu", 3)[..., 1 : (1 << 20) - 6]
    view = mk.KVView(cache, "layer block token dim")
    out = mk.gather_blocks(view, [2, 0])
    assert torch.equal(out, mk.gather_blocks(view, [2, 0], engine="reference"))


AXES = st.permutations(["layer", "kv", "block", "head", "token"])


@given(src_axes=AXES, dst_axes=AXES, data=st.data())
@settings(max_examples=120, deadline=None)
def test_copies_any_axis_order_and_block_size(src_axes, dst_axes, data):
    extents = {axis: data.draw(st.integers(1, 3), axis) for axis in (*src_axes, "dim")}
    extents["kv"] = min(extents["kv"], 2)

    def view(axes, seed, block_size):
        sizes = extents | {"token": block_size}
        shape = tuple(sizes[axis] for axis in (*axes, "dim"))
        return mk.KVView(addressed(shape, torch.int16, "cpu", seed), " ".join([*axes, "dim"]))

    src_size, dst_size = (data.draw(st.integers(1, 6), name) for name in ("src", "dst"))
    src = view(src_axes, 1, src_size)
    dst, expected = view(dst_axes, 2, dst_size), view(dst_axes, 2, dst_size)
    dst_ids = data.draw(st.permutations(range(extents["block"])))
    num_tokens = data.draw(st.integers(0, dst_size * len(dst_ids)), "tokens")
    num_src, num_dst = -(-num_tokens // src_size), -(-num_tokens // dst_size)
    ids = st.integers(HOLE, extents["block"] - 1)
    src_ids = data.draw(st.lists(ids, min_size=num_src, max_size=num_src))
    dst_ids = [data.draw(st.sampled_from([i, HOLE])) for i in dst_ids[:num_dst]]
    mk.CopyPlan(src, expected).run(src_ids, dst_ids, engine="reference")
    mk.CopyPlan(src, dst).run(src_ids, dst_ids, engine="host")
    assert torch.equal(snapshot(dst), snapshot(expected))
