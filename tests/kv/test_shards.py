"""Caches of one tensor-parallel size copied into those of another."""

import pytest
import torch

import mooncake_kernels as mk

from .checks import check
from .layouts import Sizes, make_view


@pytest.mark.parametrize("num_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("src_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("dst_ranks", [1, 2, 4, 8])
def test_every_rank_gets_its_heads(num_heads, src_ranks, dst_ranks):
    """Of the whole model's cache, every rank has its heads, before and after."""
    sizes = Sizes(layer=1, block=3, head=num_heads, token=2, dim=4)
    model = make_view("nhd_per_layer", sizes, dtype=torch.int16)

    packed = torch.contiguous_format

    def held(rank, num_ranks):  # by the definition: rank r has heads [r * H / n, (r + 1) * H / n)
        first = rank * num_heads // num_ranks
        return slice(first, max(first + 1, (rank + 1) * num_heads // num_ranks))

    def shard(rank, num_ranks):
        heads = held(rank, num_ranks)
        tensors = [tensor[..., heads, :].clone(memory_format=packed) for tensor in model.tensors]
        return mk.KVView(tensors, model.axes)

    for dst_rank in range(dst_ranks):
        target = shard(dst_rank, dst_ranks)
        expected = target.tensors[0].clone()
        target.tensors[0].zero_()
        for src_rank in range(src_ranks):
            heads = mk.shard_heads(num_heads, (src_rank, src_ranks), (dst_rank, dst_ranks))
            if heads is not None:
                src_heads, dst_heads = heads
                source = shard(src_rank, src_ranks)
                plan = mk.CopyPlan(source, target, src_heads=src_heads, dst_heads=dst_heads)
                plan.run([2, 0, 1], [2, 0, 1])
        assert torch.equal(target.tensors[0], expected), dst_rank


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_heads_between_any_layouts_and_block_sizes(backend, parts):
    whole = make_view("nhd_per_layer", Sizes(layer=2, head=4), device=backend.device)
    sizes = Sizes(layer=2, head=4 // parts, token=2)
    for rank in range(parts):
        src_heads, dst_heads = mk.shard_heads(4, (0, 1), (rank, parts))
        piece = make_view("hnd_per_layer", sizes, device=backend.device, seed=60)
        heads = {"src_heads": src_heads, "dst_heads": dst_heads}
        check(whole, piece, [1], [0, 6], backend, **heads)
        check(whole, piece, [1, 9], [0, 13], backend, method="run_slots", **heads)
        heads = {"src_heads": dst_heads, "dst_heads": src_heads}
        check(piece, whole, [0, 6], [2], backend, **heads)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, (0, 3), (0, 1)), "src must have a number of ranks that divides 8 heads .*, got 3"),
        ((8, (0, 1), (0, 12)), "dst must have a number of ranks .*, got 12"),
        ((8, (2, 2), (0, 1)), r"src must have a rank in \[0, 2\), got 2"),
        ((8, (0, 1), (-1, 2)), r"dst must have a rank in \[0, 2\), got -1"),
        ((8, (0, 0), (0, 1)), r"src must have a rank in \[0, 0\), got 0"),
        ((0, (0, 1), (0, 1)), "num_heads must be an integer >= 1, got 0"),
        ((2.5, (0, 1), (0, 1)), "num_heads must be an integer >= 1, got 2.5"),
        ((8, 1, (0, 1)), r"src must be \(rank, number of ranks\), got 1"),
        ((8, (0, 1, 2), (0, 1)), r"src must be \(rank, number of ranks\)"),
        ((8, (0.5, 1), (0, 1)), r"src must be \(rank, number of ranks\)"),
    ],
)
def test_shard_heads_rejects_bad_arguments(arguments, message):
    with pytest.raises(mk.InvalidArgument, match=f"shard_heads: {message}"):
        mk.shard_heads(*arguments)
