"""The code of docs/kernels/engines.md does what it says, on CPU tensors of the engines' shapes."""

import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import mooncake_kernels as mk

from .kv.layouts import PACKED_AXES, addressed
from .pages import run_page

RECIPE = (Path(__file__).parent.parent / "docs/kernels/engines.md").read_text()
DTYPE = torch.int16  # any bits, and comparable
LAYERS, PAGES, PAGE, HEADS, DIM = 3, 6, 4, 4, 8


@pytest.fixture(scope="module")
def recipe():
    """All blocks, run one after the other as one module."""
    return types.SimpleNamespace(**run_page("kernels/engines", {}))


def tensors(shape, count=LAYERS, seed=1):
    return [addressed(shape, DTYPE, "cpu", seed + i) for i in range(count)]


def sglang_pool(seed):
    return [tensors((PAGES * PAGE, HEADS, DIM), seed=seed + 10 * kv) for kv in (0, 1)]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)])
def test_vllm_layers_in_any_layout(recipe, order):
    """[block, head, token, content], its memory in the order of HND, of NHD, of heads first."""
    sizes = (PAGES, HEADS, PAGE, 2 * DIM)
    inverse = sorted(range(4), key=lambda axis: order[axis])
    caches = {
        f"layer.{i}": t.permute(inverse)
        for i, t in enumerate(tensors(tuple(sizes[axis] for axis in order)))
    }
    assert next(iter(caches.values())).shape == sizes
    view = recipe.view_of_vllm(caches, DIM)
    assert (view.num_blocks, view.block_size, view.num_layers) == (PAGES, PAGE, LAYERS)
    packed = mk.gather_blocks(view, [4, 1], axes=PACKED_AXES)
    for i, cache in enumerate(caches.values()):
        k, v = cache.split(DIM, dim=-1)
        assert torch.equal(packed[:, i, 0], k[[4, 1]]) and torch.equal(packed[:, i, 1], v[[4, 1]])
    mk.scatter_blocks(packed, [0, 5], view, axes=PACKED_AXES)
    assert all(torch.equal(cache[[0, 5]], cache[[4, 1]]) for cache in caches.values())


def test_vllm_layers_that_share_a_cache(recipe):
    caches = dict(enumerate(tensors((PAGES, HEADS, PAGE, 2 * DIM))))
    view = recipe.view_of_vllm(caches | {"shares": caches[1]}, DIM)
    assert view.num_layers == LAYERS
    mk.scatter_blocks(mk.gather_blocks(view, [4]), [0], view)


def test_vllm_mla_cache(recipe):
    caches = dict(enumerate(tensors((PAGES, PAGE, 576))))
    packed = mk.gather_blocks(recipe.view_of_vllm(caches, 576), [3])
    assert all(torch.equal(packed[0, i, 0, 0], cache[3]) for i, cache in caches.items())


@pytest.mark.parametrize(
    ("shape", "unflatten", "axes"),
    [
        ((2, PAGES, PAGE, HEADS, DIM), None, "kv block token head dim"),
        ((PAGES, 2, PAGE, HEADS, DIM), None, "block kv token head dim"),
        ((2, LAYERS, PAGES * PAGE, HEADS, DIM), 2, "kv layer block token head dim"),
        ((2, PAGES * PAGE, LAYERS, HEADS, DIM), 1, "kv block token layer head dim"),
        ((2, PAGES, LAYERS, PAGE, HEADS, DIM), None, "kv block layer token head dim"),
        ((2, PAGES, HEADS, PAGE, LAYERS, DIM), None, "kv block head token layer dim"),
    ],
)
def test_remaining_rows_of_the_layout_table(shape, unflatten, axes):
    assert (
        f"`{'' if unflatten is None else f'unflatten({unflatten}, (-1, page_size))`, `'}" in RECIPE
    )
    assert f'"{axes}"' in RECIPE
    tensor = addressed(shape, DTYPE, "cpu", 3)
    tensor = tensor if unflatten is None else tensor.unflatten(unflatten, (-1, PAGE))
    view = mk.KVView(tensor if "layer" in axes else [tensor] * LAYERS, axes)
    assert (view.num_blocks, view.block_size, view.num_layers) == (PAGES, PAGE, LAYERS)
    index = {"kv": 1, "layer": 2, "block": 4, "head": 3, "token": 1}
    row = tensor[tuple(index[axis] for axis in axes.split()[:-1])]
    assert torch.equal(mk.gather_blocks(view, [4], axes=PACKED_AXES)[0, 2, 1, 3, 1], row)


def test_the_hook_copies_and_falls_back(recipe, monkeypatch):
    worker = types.ModuleType("vllm.v1.kv_offload.cpu.gpu_worker")
    theirs = []
    worker._select_swap_blocks_fn = lambda groups, gpu_to_cpu: lambda *a, **k: theirs.append((a, k))
    parents = ["vllm", "vllm.v1", "vllm.v1.kv_offload", "vllm.v1.kv_offload.cpu"]
    for name in parents:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[parents[-1]].gpu_worker = worker
    monkeypatch.setitem(sys.modules, worker.__name__, worker)
    recipe.use_copy_batch()
    copy = worker._select_swap_blocks_fn([[]], gpu_to_cpu=True)
    src, dst = (t.view(torch.uint8).flatten() for t in tensors((PAGES, 32), count=2))
    arrays = [torch.tensor(x) for x in ([src.data_ptr()], [dst.data_ptr() + 64], [128])]
    copy(*arrays, is_src_access_order_any=True)
    assert torch.equal(dst[64:192], src[:128]) and not theirs
    arrays[2] = torch.tensor([-1])
    copy(*arrays)
    assert theirs == [(tuple(arrays), {"is_src_access_order_any": False})]


def test_sglang_pages_are_addressed_by_slots(recipe):
    k, v = sglang_pool(1)
    view = recipe.view_of_sglang(k, v, PAGE)
    other_k, other_v = sglang_pool(100)
    other = recipe.view_of_sglang(other_k, other_v, PAGE)
    mk.CopyPlan(view, other).run_slots([5, 22], [0, 9])
    for ours, copied in ((k, other_k), (v, other_v)):
        assert all(torch.equal(b[[0, 9]], a[[5, 22]]) for a, b in zip(ours, copied, strict=True))


def test_sglang_staging_matches(recipe):
    k, v = sglang_pool(1)
    pages, heads = [5, 1, 2], slice(1, 3)
    slots = (torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)).flatten()
    expected = torch.cat([t[slots, heads].flatten() for t in [*k, *v]]).view(torch.uint8)
    staging = torch.zeros(expected.numel() + 64, dtype=torch.uint8)
    pool = recipe.view_of_sglang(k, v, PAGE)
    assert recipe.gather_to_staging(pool, pages, staging, 1, 2) == expected.numel()
    assert torch.equal(staging[: expected.numel()], expected) and not staging[-64:].any()
    other_k, other_v = sglang_pool(100)
    untouched = [t.clone() for t in other_k + other_v]
    other = recipe.view_of_sglang(other_k, other_v, PAGE)
    recipe.scatter_from_staging(staging, other, [0, 4, 3], 2, 2)
    slots_there = (torch.tensor([0, 4, 3])[:, None] * PAGE + torch.arange(PAGE)).flatten()
    for source, target, before in zip([*k, *v], [*other_k, *other_v], untouched, strict=True):
        before[slots_there, 2:4] = source[slots, heads]
        assert torch.equal(target, before)


def test_sglang_host_pool_matches(recipe):
    k, v = sglang_pool(1)
    host = addressed((2, 5, LAYERS, PAGE, HEADS, DIM), DTYPE, "cpu", 50)
    expected = host.clone()
    for kv, side in enumerate((k, v)):
        for layer, tensor in enumerate(side):
            expected[kv, [3, 0], layer] = tensor.view(PAGES, PAGE, HEADS, DIM)[[2, 5]]
    indices = torch.tensor([*range(8, 12), *range(20, 24)], dtype=torch.int32)
    host_indices = torch.tensor([*range(12, 16), *range(4)])
    recipe.backup_from_device_all_layer(k + v, host, indices, host_indices, PAGE)
    assert torch.equal(host, expected)
    before = [t.clone() for t in k + v]
    for tensor in k + v:
        tensor[8:12] = 0
    recipe.load_to_device_all_layer(k + v, host, indices, host_indices, PAGE)
    assert all(torch.equal(a, b) for a, b in zip(k + v, before, strict=True))


def test_request_moves_to_another_tensor_parallel_size(recipe):
    """Two prefill ranks hold two heads each, one decode rank all four."""
    whole = mk.KVView(tensors((2, PAGES, PAGE, HEADS, DIM)), "kv block token head dim")
    decode = mk.KVView(torch.zeros(PAGES, LAYERS, 2, HEADS, PAGE, DIM, dtype=DTYPE),
                       "block layer kv head token dim")  # fmt: skip
    staging, arrived = (torch.zeros(1 << 16, dtype=torch.uint8) for _ in range(2))
    ready = mk.LayerStream(1, timeout_s=20)

    def send(buffer, offset, num_bytes):
        arrived[offset : offset + num_bytes] = buffer[offset : offset + num_bytes]

    for rank in range(2):
        heads = slice(2 * rank, 2 * rank + 2)
        mine = mk.KVView([t[..., heads, :].contiguous() for t in whole.tensors], whole.axes)
        of_rank = (mine, rank, 2, HEADS)
        header = recipe.send_request(*of_rank, [4, 1], staging, ready, rank + 1, send)
        recipe.receive_request(decode, 0, 1, HEADS, header, arrived, [0, 3])
    assert torch.equal(
        mk.gather_blocks(decode, [0, 3]), mk.gather_blocks(whole, [4, 1], axes=PACKED_AXES)
    )


def test_layers_are_loaded_and_saved_during_the_pass(recipe):
    """The pass adds 1 to each layer once it is loaded; what is saved has it."""
    host, pool, saved = (
        mk.KVView(tensors((PAGES, PAGE, DIM), seed=seed), "block token dim") for seed in (1, 50, 90)
    )
    loads, saves = (mk.LayerStream(LAYERS, timeout_s=20) for _ in range(2))
    loads.begin_waits()
    saves.begin_signals()
    ids = ([2, 5], [0, 3], 1)
    back = (mk.CopyPlan(pool, saved), *ids[1::-1], 1)
    with ThreadPoolExecutor(2) as threads:
        jobs = [
            threads.submit(recipe.save_layers, saves, *back),
            threads.submit(recipe.load_layers, loads, mk.CopyPlan(host, pool), *ids),
        ]
        for layer, cache in enumerate(pool.tensors):
            recipe.attention_in_turn(loads, saves, layer, cache.add_, torch.ones((), dtype=DTYPE))
        for job in jobs:
            job.result(timeout=20)
    for before, after in zip(host.tensors, saved.tensors, strict=True):
        assert torch.equal(after[[2, 5]], before[[2, 5]] + 1)
    loads.check()
