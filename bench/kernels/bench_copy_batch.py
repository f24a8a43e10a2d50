"""copy_batch against a loop of torch's copy_, a loop of ctypes.memmove, and one memcpy.

The loops are what a program does with a list of ranges and no operator for it: one tensor per
range, made beforehand, or one address. memcpy is one contiguous copy of as many bytes: the ceiling
of a plain copy. GB/s counts bytes read and written. On a GPU the ranges go from pinned host memory
to the device, and the baselines are copy_ of each range and of the whole.
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
    """A list of ranges of one size, in random order on both sides."""

    num_ranges: int
    size: int  # bytes
    neighbours: int = 1  # ranges in a row, each beginning where the previous one ends


SHAPES = [
    Shape(16, 4 << 10),
    Shape(1000, 4 << 10),
    Shape(100_000, 4 << 10),
    Shape(16, 64 << 10),
    Shape(1000, 64 << 10),
    Shape(10_000, 64 << 10),
    Shape(16, 1 << 20),
    Shape(500, 1 << 20),
    Shape(100_000, 4 << 10, neighbours=16),
    Shape(100_000, 656),
]
QUICK = [Shape(16, 4 << 10), Shape(1000, 4 << 10), Shape(100, 64 << 10), Shape(1000, 656)]
MAX_LOOP = 10_000  # beyond this a Python loop would measure only Python


def shuffled(shape: Shape) -> torch.Tensor:
    """Position of each range: whole rows of neighbours stay together."""
    rows = torch.randperm(shape.num_ranges // shape.neighbours)[:, None] * shape.neighbours
    return (rows + torch.arange(shape.neighbours)).flatten()


def case(shape: Shape, device: str) -> Case:
    on_gpu = device == "cuda"
    step = shape.size + (0 if shape.neighbours > 1 else 64)
    num_bytes = shape.num_ranges * step
    src = torch.randint(256, (num_bytes,), dtype=torch.uint8, pin_memory=on_gpu)
    dst = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    flat = torch.zeros(shape.num_ranges * shape.size, dtype=torch.uint8, device=device)
    src_places, dst_places = shuffled(shape) * step, shuffled(shape) * step
    src_ptrs, dst_ptrs = src.data_ptr() + src_places, dst.data_ptr() + dst_places
    sizes = torch.full_like(src_ptrs, shape.size)
    places = list(zip(src_places.tolist(), dst_places.tolist(), strict=True))
    loops = {}
    if shape.num_ranges <= MAX_LOOP:
        views = [(src[s : s + shape.size], dst[d : d + shape.size]) for s, d in places]
        addresses = list(zip(src_ptrs.tolist(), dst_ptrs.tolist(), strict=True))

        def torch_loop():
            for source, target in views:
                target.copy_(source, non_blocking=True)

        def memmove_loop():
            for source, target in addresses:
                ctypes.memmove(target, source, shape.size)

        loops["torch_loop"] = torch_loop
        if not on_gpu:
            loops["memmove_loop"] = memmove_loop

    def memcpy():
        if on_gpu:
            flat.copy_(src[: flat.numel()], non_blocking=True)
        else:
            ctypes.memmove(flat.data_ptr(), src.data_ptr(), flat.numel())

    def check():
        expected = torch.zeros_like(src)
        columns = torch.arange(shape.size)
        expected[(dst_places[:, None] + columns).flatten()] = src[
            (src_places[:, None] + columns).flatten()
        ]
        mk.copy_batch(src_ptrs, dst_ptrs, sizes)
        assert torch.equal(dst.cpu(), expected), "copy_batch is wrong: not timed"

    rows = f", in rows of {shape.neighbours}" if shape.neighbours > 1 else ""
    size = f"{shape.size >> 10} KiB" if shape.size >= 1024 else f"{shape.size} bytes"
    return Case(
        f"{shape.num_ranges} ranges of {size}{rows}",
        lambda: mk.copy_batch(src_ptrs, dst_ptrs, sizes),
        {**loops, "memcpy": memcpy},
        check,
        2 * flat.numel(),
    )


if __name__ == "__main__":
    options = arguments(__doc__)
    shapes = QUICK if options.quick else SHAPES
    report("copy_batch", [case(shape, options.device) for shape in shapes], options)
