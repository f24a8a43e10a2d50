"""gather_blocks and scatter_blocks against torch, layer by layer, and against one memcpy.

The torch baselines are what an engine writes without a kernel: index_select (gather) and
index_copy_ (scatter) of each layer, into preallocated tensors. They move bfloat16, the dtype of an
engine's caches. On the CPU torch's index_copy_ moves an element at a time: torch_words is the same
on the caches viewed as int64, the fastest way found for torch. memcpy is one contiguous copy of
as many bytes: the ceiling of a plain copy. GB/s counts bytes read and written.
"""

import ctypes
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib and baselines

import mooncake_kernels as mk
from lib.harness import Case, arguments
from lib.table import report


@dataclass
class Shape:
    """A cache of one model: k and v of a block are one tensor a layer, block first."""

    name: str
    num_layers: int
    num_blocks: int  # to copy
    axes: str
    block_shape: tuple[int, ...]  # of one layer
    fits: bool = False  # into the CPU cache, where the previous call has left it


AXES = "block token dim"
SHAPES = [
    Shape("32 layers x 512 blocks of 32 KiB", 32, 512, AXES, (16, 1024)),
    Shape("32 layers x 512 blocks of 4 KiB", 32, 512, AXES, (16, 128)),
    Shape("61 layers x 64 MLA blocks of 72 KiB", 61, 64, AXES, (64, 576)),
    Shape("32 layers x 4 blocks of 32 KiB, in the cache", 32, 4, AXES, (16, 1024), True),
    Shape("32 layers x 8 blocks of 32 KiB, in the cache", 32, 8, AXES, (16, 1024), True),
    # As many bytes as 32 layers x 4 blocks, in fewer of torch's calls.
    Shape("4 layers x 32 blocks of 32 KiB, in the cache", 4, 32, AXES, (16, 1024), True),
]
QUICK = [Shape("4 layers x 32 blocks of 32 KiB", 4, 32, AXES, (16, 1024))]
DTYPE = torch.bfloat16
SPARE = 2  # the pool has this many times the blocks that are copied


def cases(shape: Shape, device: str) -> list[Case]:
    num_pool = shape.num_blocks * SPARE
    pool_shape = (num_pool, *shape.block_shape)
    layers = [torch.randn(pool_shape, device=device).to(DTYPE) for _ in range(shape.num_layers)]
    view = mk.KVView(layers, shape.axes)
    ids = torch.randperm(num_pool, device=device)[: shape.num_blocks]
    packed = mk.gather_blocks(view, ids)
    rows_shape = (shape.num_blocks, *shape.block_shape)
    theirs = [torch.empty(rows_shape, dtype=DTYPE, device=device) for _ in layers]
    flat = torch.empty_like(packed)
    num_bytes = 2 * packed.nbytes

    def torch_gather():
        for layer, out in zip(layers, theirs, strict=True):
            torch.index_select(layer, 0, ids, out=out)

    def torch_scatter():
        for layer, rows in zip(layers, theirs, strict=True):
            layer.index_copy_(0, ids, rows)

    def torch_words_scatter():
        for layer, rows in zip(layers, theirs, strict=True):
            layer.view(torch.int64).index_copy_(0, ids, rows.view(torch.int64))

    def memcpy():
        if device == "cpu":
            ctypes.memmove(flat.data_ptr(), packed.data_ptr(), packed.nbytes)
        else:
            flat.copy_(packed)

    def check_gather():
        torch_gather()
        ours = mk.gather_blocks(view, ids, out=packed)
        for i, rows in enumerate(theirs):
            assert torch.equal(ours[:, i, 0, 0], rows), "gather_blocks is wrong: not timed"

    def check_scatter():
        torch_gather()
        before = [layer[ids] for layer in layers]
        for scatter in (lambda: mk.scatter_blocks(packed, ids, view), torch_words_scatter):
            for layer in layers:
                layer[ids] = 0
            scatter()
            for layer, rows in zip(layers, before, strict=True):
                assert torch.equal(layer[ids], rows), "a scatter is wrong: not timed"

    return [
        Case(f"gather, {shape.name}", lambda: mk.gather_blocks(view, ids, out=packed),
             {"torch": torch_gather, "memcpy": memcpy}, check_gather, num_bytes, warm=shape.fits),
        Case(f"scatter, {shape.name}", lambda: mk.scatter_blocks(packed, ids, view),
             {"torch": torch_scatter, "torch_words": torch_words_scatter, "memcpy": memcpy},
             check_scatter, num_bytes, warm=shape.fits),
    ]  # fmt: skip


if __name__ == "__main__":
    options = arguments(__doc__)
    shapes = QUICK if options.quick else SHAPES
    report("copy_blocks", [case for s in shapes for case in cases(s, options.device)], options)
