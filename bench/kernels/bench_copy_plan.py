"""CopyPlan between caches of different layouts, against torch layer by layer.

The torch baseline is what engines do without a kernel, for each layer: index_select of the blocks,
a permute or a slice of the heads, and index_copy_ into the other cache; the intermediate rows are
allocated beforehand. memcpy is one contiguous copy of as many bytes. GB/s counts bytes read and
written.
"""

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib and baselines

import mooncake_kernels as mk
from lib.harness import Case, arguments
from lib.table import report

HEADS, DIM = 8, 128
NHD, HND = "kv block token head dim", "kv block head token dim"


@dataclass
class Job:
    """A cache of [2, block, ...] tensors, one a layer, into another."""

    name: str
    src_axes: str = NHD
    dst_axes: str = NHD
    src_tokens: int = 16
    dst_tokens: int = 16
    dst_heads: int = HEADS
    by_slot: bool = False


JOBS = [
    Job("NHD to HND", dst_axes=HND),
    Job("NHD to HND, 2 of 8 heads (TP1 to TP4)", dst_axes=HND, dst_heads=2),
    Job("NHD to NHD, 2 of 8 heads (TP1 to TP4)", dst_heads=2),
    Job("NHD to HND, blocks of 16 to blocks of 64", dst_axes=HND, dst_tokens=64),
    Job("NHD to NHD, blocks of 64 to blocks of 16", src_tokens=64),
    Job("NHD to NHD, slot by slot", by_slot=True),
]


def cache(axes: str, num_layers: int, num_tokens: int, block_size: int, heads: int, device: str):
    """Make tensors with twice as many blocks as the tokens need."""
    sizes = {"kv": 2, "block": 2 * num_tokens // block_size, "token": block_size, "head": heads}
    shape = (*(sizes[axis] for axis in axes.split()[:-1]), DIM)
    return [torch.randn(shape, device=device).to(torch.bfloat16) for _ in range(num_layers)]


def by_torch(job: Job, src, dst, src_ids, dst_ids) -> Callable[[], None]:
    """Return the copy of all layers, for blocks or for slots, through the rows of one layer."""
    first = src[0].flatten(1, 2) if job.by_slot else src[0]
    picked = first.index_select(1, src_ids)  # [2, n, token, head, dim], or [2, n, head, dim]

    def blocks():
        for a, b in zip(src, dst, strict=True):
            torch.index_select(a, 1, src_ids, out=picked)
            rows = picked.view(2, len(dst_ids), job.dst_tokens, HEADS, DIM)
            rows = rows[..., : job.dst_heads, :]
            b.index_copy_(1, dst_ids, rows.transpose(2, 3) if job.dst_axes == HND else rows)

    def slots():
        for a, b in zip(src, dst, strict=True):
            torch.index_select(a.flatten(1, 2), 1, src_ids, out=picked)
            b.flatten(1, 2).index_copy_(1, dst_ids, picked)

    return slots if job.by_slot else blocks


def case(job: Job, num_layers: int, num_tokens: int, device: str) -> Case:
    src = cache(job.src_axes, num_layers, num_tokens, job.src_tokens, HEADS, device)
    dst = cache(job.dst_axes, num_layers, num_tokens, job.dst_tokens, job.dst_heads, device)
    plan = mk.CopyPlan(
        mk.KVView(src, job.src_axes),
        mk.KVView(dst, job.dst_axes),
        src_heads=slice(0, job.dst_heads),
    )
    src_unit, dst_unit = (1, 1) if job.by_slot else (job.src_tokens, job.dst_tokens)
    src_ids = torch.randperm(2 * num_tokens // src_unit, device=device)[: num_tokens // src_unit]
    dst_ids = torch.randperm(2 * num_tokens // dst_unit, device=device)[: num_tokens // dst_unit]
    run = plan.run_slots if job.by_slot else plan.run
    theirs = by_torch(job, src, dst, src_ids, dst_ids)
    num_bytes = num_layers * 2 * num_tokens * job.dst_heads * DIM * 2
    flat = torch.ones(2, num_bytes, dtype=torch.uint8, device=device)

    def memcpy():
        if device == "cpu":
            ctypes.memmove(flat[0].data_ptr(), flat[1].data_ptr(), num_bytes)
        else:
            flat[0].copy_(flat[1])

    def check():
        theirs()
        expected = [tensor.clone() for tensor in dst]
        for tensor in dst:
            tensor.zero_()
        run(src_ids, dst_ids)
        for tensor, other in zip(dst, expected, strict=True):
            written = tensor.count_nonzero() > 0
            other[tensor == 0] = 0  # previous contents of the blocks that are not written
            assert written and torch.equal(tensor, other), "CopyPlan is wrong: not timed"

    name = f"{job.name}, {num_layers} layers x {num_tokens} tokens"
    baselines = {"torch": theirs, "memcpy": memcpy}
    return Case(name, lambda: run(src_ids, dst_ids), baselines, check, 2 * num_bytes)


def call_case(num_layers: int, num_blocks: int, device: str) -> Case:
    """The host time of a call that copies nothing: all ids are holes; torch gets no ids at all."""
    tensors = [
        [torch.zeros(2, 4, 16, 1, 8, device=device) for _ in range(num_layers)] for _ in range(2)
    ]
    plan = mk.CopyPlan(*(mk.KVView(layers, NHD) for layers in tensors))
    holes = torch.full((num_blocks,), -1, device=device)
    none = holes[:0]

    def theirs():
        for a, b in zip(*tensors, strict=True):
            b.index_copy_(1, none, a.index_select(1, none))

    def check():
        before = [tensor.clone() for tensor in tensors[1]]
        plan.run(holes, holes)
        assert all(map(torch.equal, before, tensors[1])), "a hole was copied: not timed"

    name = f"host time of a call, {num_layers} layers x {num_blocks} holes"
    return Case(name, lambda: plan.run(holes, holes), {"torch": theirs}, check, on_host=True)


if __name__ == "__main__":
    options = arguments(__doc__)
    jobs, sizes = (JOBS[:1], (2, 512)) if options.quick else (JOBS, (32, 4096))
    cases = [case(job, *sizes, options.device) for job in jobs]
    report("copy_plan", [*cases, call_case(80, 1024, options.device)], options)
