"""paged_attention and torch's attention; on a GPU also FlashInfer and FlashAttention-3 and 4.

Ours reads a paged cache through a block table, in blocks of 16. The baselines get their preferred
inputs, prepared before they are timed, see baselines/attention.py. GFLOP/s counts the pairs that
the mask lets see each other, 4 * dim each; the peak is that of torch.mm in this dtype, or on the
CPU in float32 if that is more, measured in this run.
A row "with its mask" includes the making of the mask, for each side that makes one:
create_block_mask (compiled on a GPU); FlashInfer's plan; ours, rows, and for FlashAttention-4 also
our lists of blocks. SDPA's dense mask is given.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib and baselines

import mooncake_kernels as mk
from baselines.attention import Job, NotHere, Ours, Sees, baselines_of
from lib.harness import Case, LeftOut, arguments, seconds
from lib.table import report

BLOCK_SIZE, DIM = 16, 128
HEADS = {"cpu": (8, 2), "cuda": (32, 8)}  # query heads, and heads of keys
KEYS = {"cpu": 2048, "cuda": 8192}
DTYPES = {"cpu": [torch.float32, torch.bfloat16], "cuda": [torch.bfloat16]}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
CAUSAL = mk.mask.causal()


@dataclass
class Workload:
    """A mask, and the same for flex_attention, from positions, as its users write it."""

    name: str
    rule: mk.mask.Rule
    q_lens: list[int]
    kv_lens: list[int]
    sees: Sees
    positions: list[int] | None = None


def workloads(n: int, device: str) -> list[Workload]:
    """Return the cases, of about n keys."""
    window, sinks = n // 8, 4
    images = [(n // 8 * i + n // 32, n // 8 * i + n // 16) for i in range(8)]
    image_of = torch.full((n,), -1)
    for i, (begin, end) in enumerate(images):
        image_of[begin:end] = i
    prefix, item = n // 4, n // 16
    cuts = list(range(prefix + item, n, item))
    item_of = (torch.arange(n) - prefix).clamp(min=-1) // item
    item_of[:prefix], item_of[cuts] = -1, -2  # a delimiter sees the prefix alone
    selected = torch.randperm(n)[: n // 8].sort().values.tolist()
    image_of, item_of = image_of.to(device), item_of.to(device)

    def in_window(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k <= q) & ((k > q - window) | (k < sinks))

    def with_images(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k <= q) | ((image_of[q] >= 0) & (image_of[q] == image_of[k]))

    def of_items(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        is_same_item = (item_of[q] >= 0) & (item_of[q] == item_of[k])
        return (k <= q) & ((item_of[k] == -1) | is_same_item)

    def before(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return k <= q

    sliding = (CAUSAL & mk.mask.sliding_window(window)) | mk.mask.sink(sinks)
    return [
        Workload("causal prompt", CAUSAL, [n], [n], before),
        Workload("causal chunk", CAUSAL, [n // 8], [n], before),
        Workload("window and sinks", sliding, [n], [n], in_window),
        Workload("image spans", CAUSAL | mk.mask.spans(images), [n], [n], with_images),
        Workload("multi-item", mk.mask.items(prefix, cuts), [n], [n], of_items),
        Workload("selected rows", CAUSAL, [n // 8], [n], before, selected),
        Workload("8 decodes and a chunk", CAUSAL, [1] * 8 + [n // 8], [n // 2] * 9, before),
        Workload("decode", CAUSAL, [1], [4 * n], before),
    ]


def job_of(work: Workload, dtype: torch.dtype, device: str) -> Job:
    heads, kv_heads = HEADS[device]
    batch = mk.ChunkBatch(work.q_lens, work.kv_lens, work.positions, device=device)
    counts = [-(-kv_len // BLOCK_SIZE) for kv_len in work.kv_lens]
    ids = torch.randperm(sum(counts)).int().split(counts)
    table = torch.nn.utils.rnn.pad_sequence(list(ids), batch_first=True).to(device)
    cache = torch.randn(2, sum(counts), BLOCK_SIZE, kv_heads, DIM, device=device).to(dtype)
    q = torch.randn(batch.num_q, heads, DIM, device=device).to(dtype)
    is_causal = work.rule is CAUSAL and work.positions is None
    return Job(work.rule, work.sees, is_causal, batch, q, (cache[0], cache[1]), table)


def cases_of(
    work: Workload, dtype: torch.dtype, peak: float, options: argparse.Namespace
) -> Iterator[Case | LeftOut]:
    """Yield a row with the masks made beforehand, and one that includes making them."""
    name = f"{work.name}, {str(dtype).removeprefix('torch.')}"
    job = job_of(work, dtype, options.device)
    kernels = {"ours": Ours(job)}
    for side, kind in baselines_of(job).items():
        try:
            kernels[side] = kind(job)
        except NotHere as why:
            yield LeftOut(f"{name}: {side}", str(why))
    made = {side: kernels[side].make() for side in kernels}
    attend = {side: (lambda s=side: kernels[s].attend(made[s])) for side in kernels}
    both = {side: (lambda s=side: kernels[s].attend(kernels[s].make())) for side in kernels}

    def check() -> None:
        atol = TOLERANCE[dtype]
        expected = attend["sdpa_mask"]()
        for call in attend.values():
            torch.testing.assert_close(call(), expected, rtol=atol, atol=atol)

    pairs = sum(int(mask.sum()) for mask in made["sdpa_mask"])
    num_flops = 4 * pairs * job.q.shape[1] * DIM
    fields = {"q_lens": work.q_lens, "kv_lens": work.kv_lens}
    for suffix, calls in (("", attend), (", with its mask", both)):
        ours, baselines = calls["ours"], {s: call for s, call in calls.items() if s != "ours"}
        yield Case(
            name + suffix, ours, baselines, check, num_flops=num_flops, peak=peak, fields=fields
        )


def measured_peak(dtype: torch.dtype, device: str) -> float:
    """Return GFLOP/s of the fastest of several matrix products.

    A processor without 16-bit products computes them in float32, and torch.mm takes a hundred times
    longer than necessary; there the peak is that of float32.
    """
    n = 1024 if device == "cpu" else 8192
    peaks = []
    for kind in {dtype, torch.float32} if device == "cpu" else {dtype}:
        a, b = torch.randn(2, n, n, device=device).to(kind)
        took_s = min(seconds(lambda a=a, b=b: torch.mm(a, b), device)[0] for _ in range(12))
        peaks.append(2 * n**3 / took_s / 1e9)
    return max(peaks)


def all_cases(options: argparse.Namespace) -> Iterator[Case | LeftOut]:
    device = options.device
    n, dtypes = (256, [torch.float32]) if options.quick else (KEYS[device], DTYPES[device])
    torch._dynamo.config.cache_size_limit = 64
    with torch.no_grad():
        for dtype in dtypes:
            peak = measured_peak(dtype, device)
            for work in workloads(n, device):
                yield from cases_of(work, dtype, peak, options)


if __name__ == "__main__":
    options = arguments(__doc__)
    report("attention", all_cases(options), options)
