"""paged_attention beside torch's attention: SDPA, SDPA with a mask, flex_attention (compiled).

Ours reads a paged cache through a block table, in blocks of 16. The baselines get what they like
best, made before they are timed: keys and values gathered, packed, and repeated for the heads that
share them; a bool mask; a BlockMask. GFLOP/s counts the pairs that the mask lets see each other,
4 * dim each; the peak is that of torch.mm in this dtype, measured in this run. Of requests side by
side SDPA takes one after the other, and flex_attention all at once, by a mask of documents.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from harness import Case, arguments
from table import report
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import mooncake_kernels as mk

HEADS, KV_HEADS, DIM, BLOCK_SIZE = 8, 2, 128, 16
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
Sees = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class Workload:
    """A mask, and how flex_attention is told it: from positions, as its users write it."""

    name: str
    rule: mk.mask.Rule
    q_lens: list[int]
    kv_lens: list[int]
    sees: Sees
    positions: list[int] | None = None


def workloads(n: int) -> list[Workload]:
    """Return the cases, of about n keys."""
    causal = mk.mask.causal()
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

    def in_window(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k <= q) & ((k > q - window) | (k < sinks))

    def with_images(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k <= q) | ((image_of[q] >= 0) & (image_of[q] == image_of[k]))

    def of_items(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        is_same_item = (item_of[q] >= 0) & (item_of[q] == item_of[k])
        return (k <= q) & ((item_of[k] == -1) | is_same_item)

    def before(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return k <= q

    sliding = (causal & mk.mask.sliding_window(window)) | mk.mask.sink(sinks)
    return [
        Workload("causal prompt", causal, [n], [n], before),
        Workload("causal chunk", causal, [n // 8], [n], before),
        Workload("window and sinks", sliding, [n], [n], in_window),
        Workload("image spans", causal | mk.mask.spans(images), [n], [n], with_images),
        Workload("multi-item", mk.mask.items(prefix, cuts), [n], [n], of_items),
        Workload("selected rows", causal, [n // 8], [n], before, selected),
        Workload("8 decodes and a chunk", causal, [1] * 8 + [n // 8], [n // 2] * 9, before),
        Workload("decode", causal, [1], [4 * n], before),
    ]


def case(work: Workload, dtype: torch.dtype, peak: float, compiled: Callable) -> Case:
    batch = mk.ChunkBatch(work.q_lens, work.kv_lens, work.positions)
    rows = mk.mask.rows(work.rule, batch)
    counts = [-(-kv_len // BLOCK_SIZE) for kv_len in work.kv_lens]
    ids = torch.randperm(sum(counts)).int().split(counts)
    table = torch.nn.utils.rnn.pad_sequence(list(ids), batch_first=True)
    k_cache, v_cache = torch.randn(2, sum(counts), BLOCK_SIZE, KV_HEADS, DIM).to(dtype)
    q = torch.randn(batch.num_q, HEADS, DIM).to(dtype)
    masks = rows.dense()
    gathered = [
        [c[blocks.long()].flatten(0, 1)[:kv_len].transpose(0, 1) for c in (k_cache, v_cache)]
        for blocks, kv_len in zip(ids, work.kv_lens, strict=True)
    ]
    repeated = [[t.repeat_interleave(HEADS // KV_HEADS, 0) for t in pair] for pair in gathered]
    queries = [part.transpose(0, 1).contiguous() for part in q.split(work.q_lens)]
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def ours() -> torch.Tensor:
        return mk.paged_attention(q, k_cache, v_cache, table, rows)[0]

    def masked() -> torch.Tensor:
        outs = [
            sdpa(part[None], *(t[None] for t in pair), attn_mask=mask)[0]
            for part, pair, mask in zip(queries, repeated, masks, strict=True)
        ]
        return torch.cat(outs, 1).transpose(0, 1)

    def causal() -> torch.Tensor:
        return sdpa(queries[0][None], *(t[None] for t in repeated[0]), is_causal=True)[0]

    baselines = {"sdpa_mask": masked, "flex": by_flex(work, batch, q, repeated, compiled)}
    if work.name == "causal prompt":
        baselines = {"sdpa_causal": causal, **baselines}

    def check() -> None:
        expected = baselines["sdpa_mask"]()
        atol = TOLERANCE[dtype]
        for result in (ours(), baselines["flex"]()):
            torch.testing.assert_close(result, expected, rtol=atol, atol=atol)

    pairs = sum(int(mask.sum()) for mask in masks)
    name = f"{work.name}, {str(dtype).removeprefix('torch.')}"
    return Case(
        name, ours, baselines, check, num_flops=4 * pairs * HEADS * DIM, peak=peak,
        fields={"q_lens": work.q_lens, "kv_lens": work.kv_lens},
    )  # fmt: skip


def by_flex(
    work: Workload,
    batch: mk.ChunkBatch,
    q: torch.Tensor,
    repeated: list[list[torch.Tensor]],
    compiled: Callable,
) -> Callable:
    """Return flex_attention over all requests at once, its BlockMask made beforehand."""
    position = batch.query_positions().long()
    request = batch.request_of()
    key_position = torch.cat([torch.arange(kv_len) for kv_len in work.kv_lens])
    key_request = torch.repeat_interleave(batch.kv_lens)

    def mask_mod(b, h, i, j):
        if batch.num_requests == 1:
            return work.sees(position[i], j)
        return (request[i] == key_request[j]) & work.sees(position[i], key_position[j])

    num_keys = sum(work.kv_lens)
    block_mask = create_block_mask(mask_mod, None, None, batch.num_q, num_keys, device="cpu")
    keys, values = (torch.cat([pair[i] for pair in repeated], 1)[None] for i in range(2))
    heads_first = q.transpose(0, 1)[None].contiguous()
    return lambda: compiled(heads_first, keys, values, block_mask=block_mask)[0].transpose(0, 1)


def measured_peak(dtype: torch.dtype) -> float:
    """Return GFLOP/s of the fastest of some matrix products."""
    n = 1024
    a, b = torch.randn(2, n, n).to(dtype)
    taken = []
    for _ in range(12):
        start = time.perf_counter()
        torch.mm(a, b)
        taken.append(time.perf_counter() - start)
    return 2 * n**3 / min(taken) / 1e9


def all_cases(quick: bool):
    n, dtypes = (256, [torch.float32]) if quick else (2048, list(TOLERANCE))
    torch._dynamo.config.cache_size_limit = 64
    compiled = torch.compile(flex_attention, dynamic=False)
    with torch.no_grad():
        for dtype in dtypes:
            peak = measured_peak(dtype)
            for work in workloads(n):
                yield case(work, dtype, peak, compiled)


if __name__ == "__main__":
    options = arguments(__doc__)
    report("attention", all_cases(options.quick), options)
