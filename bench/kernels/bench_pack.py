"""Blocks into one buffer and back: gather and scatter, Packer with and without checksums.

Three layouts of a cache of 16 layers x 64 blocks of 16 tokens, 8 heads of 128 bfloat16: NHD and
HND with a tensor a layer, NHD with keys and values in tensors of their own. Baselines: memcpy, one
contiguous copy of as many bytes; transposed (of gather), the same with the axes of a packed block
in another order than the cache's. GB/s counts bytes read and written once; verifying checksums
reads them once more, which is not counted.
"""

import ctypes
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib and baselines

import mooncake_kernels as mk
from lib.harness import Case, arguments
from lib.table import report

TOKENS, HEADS, DIM = 16, 8, 128
LAYOUTS = {
    "NHD": ("kv block token head dim", "layer kv head token dim"),
    "HND": ("kv block head token dim", "layer kv token head dim"),
    "NHD, k and v apart": ("block token head dim", "layer kv head token dim"),
}


def view_of(axes: str, num_layers: int, num_blocks: int, device: str) -> mk.KVView:
    sizes = {"kv": 2, "block": num_blocks, "token": TOKENS, "head": HEADS, "dim": DIM}
    shape = [sizes[axis] for axis in axes.split()]

    def layers() -> list[torch.Tensor]:
        return [torch.randn(shape, device=device).bfloat16() for _ in range(num_layers)]

    return mk.KVView(layers() if "kv" in axes else [layers(), layers()], axes)


def cases(name: str, num_layers: int, num_blocks: int, device: str) -> list[Case]:
    axes, other_axes = LAYOUTS[name]
    view = view_of(axes, num_layers, 2 * num_blocks, device)
    ids = torch.randperm(2 * num_blocks, device=device)[:num_blocks]
    packed, flat = (mk.gather_blocks(view, ids) for _ in range(2))
    other = mk.gather_blocks(view, ids, axes=other_axes)

    def memcpy() -> None:
        if device == "cpu":
            ctypes.memmove(flat.data_ptr(), packed.data_ptr(), packed.nbytes)
        else:
            flat.copy_(packed)

    def case(what: str, ours, baselines, undo=lambda: None) -> Case:
        def check() -> None:
            undo()
            ours()
            assert torch.equal(mk.gather_blocks(view, ids), packed), f"{what} is wrong: not timed"

        return Case(f"{what}, {name}", ours, baselines, check, 2 * packed.nbytes)

    def forget() -> None:
        mk.scatter_blocks(torch.zeros_like(packed), ids, view)

    transposed = {"transposed": lambda: mk.gather_blocks(view, ids, out=other, axes=other_axes)}
    found = [
        case(
            "gather", lambda: mk.gather_blocks(view, ids, out=flat), transposed | {"memcpy": memcpy}
        ),
        case("scatter", lambda: mk.scatter_blocks(packed, ids, view), {"memcpy": memcpy}, forget),
    ]
    for checksum in (False, True):
        packer = mk.Packer(view, checksum=checksum)
        staging = torch.zeros(packer.header(num_blocks).num_bytes, dtype=torch.uint8, device=device)
        header = packer.pack(ids, staging)
        suffix = " with checksums" if checksum else ""
        to, out_of = ((f"{way}{suffix}") for way in ("pack", "unpack"))
        pack = lambda p=packer, s=staging: p.pack(ids, s)  # noqa: E731
        unpack = lambda p=packer, s=staging, h=header: p.unpack(h, s, ids)  # noqa: E731
        found += [case(to, pack, {"memcpy": memcpy}),
                  case(out_of, unpack, {"memcpy": memcpy}, forget)]  # fmt: skip
    return found


if __name__ == "__main__":
    options = arguments(__doc__)
    sizes = (2, 8) if options.quick else (16, 64)
    names = ["NHD"] if options.quick else LAYOUTS
    report("pack", [one for name in names for one in cases(name, *sizes, options.device)], options)
