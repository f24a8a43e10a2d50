"""What a copy pays for its transforms: fp8, RoPE, checksums.

Each is a CopyPlan of an NHD cache, into NHD and into HND. Baselines: plain, a CopyPlan between the
same two layouts that moves as many bytes, read and written, without a transform (0.9x: the
transform takes a ninth longer); torch, the same result layer by layer, where torch has the
operations. GB/s counts bytes read and written. Verifying checksums reads the blocks once more,
which is not counted.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib and baselines

import mooncake_kernels as mk
from baselines.kv_by_torch import FLOAT, FP8, HND, SCALE, THETA, ByTorch, Transform
from lib.harness import Case, arguments
from lib.table import report

NHD = "kv block token head dim"
TOKENS, HEADS, DIM, SHIFT = 16, 8, 128, 1000
TRANSFORMS = [
    Transform("bf16 to fp8", dst=FP8),
    Transform("fp8 to bf16", src=FP8),
    Transform("RoPE", rope=True),
    Transform("checksum", checksum=True),
    Transform("checksum, verified too", checksum=True, verify=True),
    Transform("bf16 to fp8, RoPE and checksum", dst=FP8, rope=True, checksum=True),
]
TOLERANCE = {FLOAT: (2**-7, 1e-5), FP8: (2**-3, 2**-9)}  # a step of each, where keys were turned


class Caches:
    """Two caches of one tensor a layer, and the ids of a copy from one to the other."""

    def __init__(self, dtypes, dst_axes: str, dim: int, sizes: tuple[int, int], device: str):
        num_layers, self.num_blocks = sizes
        self.dst_axes, pool = dst_axes, 2 * self.num_blocks
        inner = [TOKENS, HEADS]
        src_shape = (2, pool, *inner, dim)
        dst_shape = (2, pool, *(inner[::-1] if dst_axes == HND else inner), dim)
        layers = range(num_layers)
        self.src = [torch.randn(src_shape, device=device).to(dtypes[0]) for _ in layers]
        self.dst = [torch.zeros(dst_shape, device=device, dtype=dtypes[1]) for _ in layers]
        self.ids = [torch.randperm(pool, device=device)[: self.num_blocks] for _ in range(2)]
        self.views = mk.KVView(self.src, NHD), mk.KVView(self.dst, dst_axes)
        elements = num_layers * 2 * self.num_blocks * TOKENS * HEADS * dim
        self.num_bytes = elements * sum(dtype.itemsize for dtype in dtypes)


Sizes = tuple[int, int]  # layers and blocks to copy


def plain(transform: Transform, dst_axes: str, sizes: Sizes, device: str) -> Callable:
    """Return a copy of as many bytes; if one side is half as wide, both get the mean width."""
    row_bytes = DIM * (transform.src.itemsize + transform.dst.itemsize) // 2
    caches = Caches((torch.uint8, torch.uint8), dst_axes, row_bytes, sizes, device)
    plan = mk.CopyPlan(*caches.views)
    return lambda: plan.run(*caches.ids)


def case(transform: Transform, dst_axes: str, sizes: Sizes, device: str) -> Case:
    caches = Caches((transform.src, transform.dst), dst_axes, DIM, sizes, device)
    src_positions, dst_positions = torch.randint(SHIFT, (2, sizes[1]), device=device)
    plan = mk.CopyPlan(
        *caches.views,
        convert=mk.Fp8(SCALE) if transform.converts else None,
        rope=mk.Rope(THETA) if transform.rope else None,
        checksum=transform.checksum,
    )
    options = {}
    if transform.rope:
        options = {"src_positions": src_positions, "dst_positions": dst_positions}
    if transform.verify:
        options["checksums"] = mk.checksum_blocks(caches.views[0], caches.ids[0])
    theirs = ByTorch(transform, caches.src, caches.dst, dst_axes, caches.ids,
                     dst_positions - src_positions)  # fmt: skip

    def check() -> None:
        theirs()
        expected = [tensor.clone() for tensor in caches.dst]
        for tensor in caches.dst:
            tensor.zero_()
        sums = plan.run(*caches.ids, **options)
        wide, near = TOLERANCE[transform.dst] if transform.rope else (0.0, 0.0)
        for ours, other in zip(caches.dst, expected, strict=True):
            torch.testing.assert_close(ours.float(), other.float(), rtol=wide, atol=near)
        if transform.checksum:
            again = mk.checksum_blocks(caches.views[1], caches.ids[1])
            assert torch.equal(sums, again), "the sums are wrong: not timed"

    layout = "NHD to HND" if dst_axes == HND else "NHD to NHD"
    baselines = {"plain": plain(transform, dst_axes, sizes, device)}
    if not transform.checksum:
        baselines["torch"] = theirs
    return Case(
        f"{transform.name}, {layout}", lambda: plan.run(*caches.ids, **options), baselines, check,
        caches.num_bytes, fields={"transform": transform.name, "layout": layout},
    )  # fmt: skip


if __name__ == "__main__":
    options = arguments(__doc__)
    num_layers = 32 if options.device == "cuda" else 8  # a call outlasts its launch
    sizes = (2, 32) if options.quick else (num_layers, 256)
    cases = (
        case(transform, axes, sizes, options.device)
        for transform in TRANSFORMS for axes in (NHD, HND)
    )  # fmt: skip
    report("kv_transforms", cases, options)
