"""Masks of a chunk: rows and block map against create_block_mask, packed bits against packbits.

ours, of a block map: mask.rows and block_map (128 x 128, counts, ranges, and both lists of tiles),
starting from the lengths. create_block_mask is torch's, for the same rule and tiles, eager and (not
with --quick) compiled; its result is checked to be the same. Eager it takes 10 bytes a pair, 21 GB
for 16,384 x 131,072: it is left out where half of the free memory is less.

ours, of bits: mask.rows and packed(). packbits is the dense mask and numpy's packbits, as
FlashInfer's segment_packbits does it; on a GPU torch does it, and, where FlashInfer is installed
(written after its 0.7.2, never run), also its own packbits and, below 2**31 pairs because its
offsets are int32, segment_packbits, which its plan calls. Next to the times stands the peak memory
of a call, results included: on a GPU what torch has allocated, else the kernel's high-water mark of
this process, but at least the bytes of its results, since reused memory does not show there.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib and baselines

import mooncake_kernels as mk
from lib.harness import Case, LeftOut, arguments
from lib.table import report

SHAPES = [(2048, 32768), (16384, 131072)]
QUICK_SHAPES = [(512, 4096), (1024, 16384)]
MOST_BITS = 1 << 29  # on the CPU
DENSE_BYTES = 8  # a pair: the dense mask as bool, temporaries, and products for the sums
EAGER_BYTES = 10  # a pair: as bool, and as int64 for the sums
BLOCK = 128
WINDOW, SINK, DOCUMENT = 4096, 4, 8192
compiled_block_mask = torch.compile(create_block_mask)
Predicate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def rules(q_len: int, kv_len: int) -> dict[str, tuple[mk.mask.Rule, Predicate]]:
    """Return each rule, and the same for create_block_mask: of a query's row and a key."""
    first = kv_len - q_len
    cuts = list(range(0, kv_len, DOCUMENT))

    def window_and_sink(row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        position = row + first
        return (key <= position) & ((key > position - WINDOW) | (key < SINK))

    def documents(row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        position = row + first
        return (key <= position) & (key // DOCUMENT == position // DOCUMENT)

    causal, window = mk.mask.causal(), mk.mask.sliding_window(WINDOW)
    return {
        "causal": (causal, lambda row, key: key <= row + first),
        "window 4096, sink 4": ((causal & window) | mk.mask.sink(SINK), window_and_sink),
        "documents of 8192": (causal & mk.mask.documents(cuts), documents),
    }


def our_map(rule: mk.mask.Rule, q_len: int, kv_len: int, device: str) -> mk.mask.BlockMap:
    """Make rows, map and lists."""
    batch = mk.ChunkBatch([q_len], [kv_len], device=device)
    block_map = mk.mask.rows(rule, batch).block_map(BLOCK, BLOCK)
    assert block_map.partial_indices is not None and block_map.full_indices is not None
    return block_map


def torch_map(
    sees: Predicate, q_len: int, kv_len: int, device: str, *, compiled: bool = False
) -> BlockMask:
    """Make torch's; compiled, it is one fused loop without a dense mask."""

    def mask_mod(b: Any, h: Any, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return sees(row, key)

    make = compiled_block_mask if compiled else create_block_mask
    return make(mask_mod, None, None, q_len, kv_len, device=device, BLOCK_SIZE=BLOCK)


def dense(sees: Predicate, q_len: int, kv_len: int, device: str) -> torch.Tensor:
    """Make the mask itself."""
    rows, keys = torch.arange(q_len, device=device), torch.arange(kv_len, device=device)
    return sees(rows[:, None], keys[None])


def packbits(sees: Predicate, q_len: int, kv_len: int, device: str) -> torch.Tensor:
    """Make bits of a dense mask."""
    flat = dense(sees, q_len, kv_len, device).reshape(-1)
    if device == "cpu":
        return torch.from_numpy(np.packbits(flat.numpy(), bitorder="little"))
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=device)
    return (flat.view(-1, 8) * weights).sum(-1, dtype=torch.uint8)


def packers(
    sees: Predicate, q_len: int, kv_len: int, device: str
) -> dict[str, Callable[[], torch.Tensor]]:
    """Return the baselines that make bits of a dense mask; the mask is made in the same call."""
    baselines = {"packbits": lambda: packbits(sees, q_len, kv_len, device)}
    if device == "cpu":
        return baselines  # FlashInfer's are kernels
    try:
        quantization = importlib.import_module("flashinfer.quantization")
    except ImportError:
        return baselines

    def by_flashinfer() -> torch.Tensor:
        return quantization.packbits(dense(sees, q_len, kv_len, device).view(-1), bitorder="little")

    def by_segments() -> torch.Tensor:
        flat = dense(sees, q_len, kv_len, device).view(-1)
        indptr = torch.tensor([0, q_len * kv_len], dtype=torch.int32, device=device)
        return quantization.segment_packbits(flat, indptr, bitorder="little")[0]

    baselines["flashinfer"] = by_flashinfer
    if q_len * kv_len < 1 << 31:
        baselines["flashinfer_segments"] = by_segments
    return baselines


def peak_bytes(call: Callable[[], Any], device: str) -> int:
    """Return the peak of a call, in memory that this process did not have before."""
    call()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
    before = status_bytes("VmRSS")
    result = call()
    del result
    return max(status_bytes("VmHWM") - before, 0)


def free_bytes(device: str) -> int:
    """Return how much memory is available without swapping."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")


def status_bytes(name: str) -> int:
    """Return a size from /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


def map_bytes(block_map: mk.mask.BlockMap) -> int:
    """Return the bytes of a map and its rows."""
    rows = block_map.rows
    tensors = [rows.intervals, rows.tail_bits, rows.tail_base, block_map.ranges]
    tensors += [block_map.num_partial, block_map.num_full, block_map.cu_q_blocks]
    tensors += [block_map.partial_indices, block_map.full_indices]
    return sum(tensor.nbytes for tensor in tensors)


def torch_bytes(block_mask: BlockMask) -> int:
    """Return the bytes of a BlockMask."""
    return sum(part.nbytes for part in block_mask.as_tuple() if isinstance(part, torch.Tensor))


def check_map(ours: mk.mask.BlockMap, theirs: BlockMask) -> None:
    """Compare all tiles."""
    assert theirs.full_kv_num_blocks is not None and theirs.full_kv_indices is not None
    for kind, counts, indices in (
        ("partial", theirs.kv_num_blocks, theirs.kv_indices),
        ("full", theirs.full_kv_num_blocks, theirs.full_kv_indices),
    ):
        assert torch.equal(ours.count(kind), counts[0, 0]), f"{kind}: wrong, not timed"
        listed = ours.indices(kind)
        columns = torch.arange(listed.shape[1], device=listed.device)
        inside = columns < ours.count(kind)[:, None]
        assert torch.equal(listed[inside], indices[0, 0, :, : listed.shape[1]][inside])


def baselines_of(
    sees: Predicate, q_len: int, kv_len: int, device: str, compiled: bool
) -> dict[str, Callable[[], BlockMask]]:
    """Return torch's ways that fit into memory."""
    baselines = {}
    if EAGER_BYTES * q_len * kv_len < free_bytes(device) / 2:
        baselines["create_block_mask"] = lambda: torch_map(sees, q_len, kv_len, device)
    if compiled:
        baselines["compiled"] = lambda: torch_map(sees, q_len, kv_len, device, compiled=True)
    return baselines


def map_case(name: str, q_len: int, kv_len: int, device: str, compiled: bool) -> Case | LeftOut:
    rule, sees = rules(q_len, kv_len)[name]
    title = f"map {q_len} x {kv_len}, {name}"

    def ours() -> mk.mask.BlockMap:
        return our_map(rule, q_len, kv_len, device)

    def check() -> None:
        for call in baselines.values():
            check_map(ours(), call())

    baselines = baselines_of(sees, q_len, kv_len, device, compiled)
    if not baselines:
        return LeftOut(title, "too little memory for create_block_mask")
    result_bytes = map_bytes(ours())
    own = max(peak_bytes(ours, device), result_bytes)
    fields: dict[str, Any] = {"q_len": q_len, "kv_len": kv_len, "bytes": result_bytes}
    fields["peak_bytes"] = own
    for baseline, call in baselines.items():
        fields[f"peak_bytes_{baseline}"] = max(peak_bytes(call, device), torch_bytes(call()))
        fields[f"x_peak_{baseline}"] = fields[f"peak_bytes_{baseline}"] / own
    return Case(title, ours, dict(baselines), check, fields=fields)


def bits_case(name: str, q_len: int, kv_len: int, device: str) -> Case | LeftOut:
    rule, sees = rules(q_len, kv_len)[name]
    title = f"bits {q_len} x {kv_len}, {name}"
    if device == "cpu" and q_len * kv_len > MOST_BITS:
        return LeftOut(title, "a dense mask of that many pairs takes the CPU too long")
    if DENSE_BYTES * q_len * kv_len > free_bytes(device) / 2:
        return LeftOut(title, "too little memory for a dense mask")

    def ours() -> mk.mask.PackedMask:
        return mk.mask.rows(rule, mk.ChunkBatch([q_len], [kv_len], device=device)).packed()

    def check() -> None:
        for side, call in baselines.items():
            assert torch.equal(ours().packed, call()), f"{side}: wrong, not timed"

    baselines = packers(sees, q_len, kv_len, device)
    own = max(peak_bytes(ours, device), q_len * kv_len // 8)
    fields: dict[str, Any] = {"q_len": q_len, "kv_len": kv_len, "peak_bytes": own}
    for side, call in baselines.items():
        fields[f"peak_bytes_{side}"] = peak_bytes(call, device)
        fields[f"x_peak_{side}"] = fields[f"peak_bytes_{side}"] / own
    return Case(title, ours, dict(baselines), check, fields=fields)


def cases(options: argparse.Namespace) -> Iterator[Case | LeftOut]:
    for q_len, kv_len in QUICK_SHAPES if options.quick else SHAPES:
        for name in rules(q_len, kv_len):
            yield map_case(name, q_len, kv_len, options.device, compiled=not options.quick)
        yield bits_case("causal", q_len, kv_len, options.device)


if __name__ == "__main__":
    options = arguments(__doc__)
    report("mask", cases(options), options)
