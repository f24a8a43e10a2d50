"""The code of docs/kernels/engines.md does what it says, on CPU tensors of the engines' shapes."""

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
