"""A random step of an engine: a batch, its mask, and a paged cache whose other blocks are NaN."""

from dataclasses import dataclass, replace
from typing import Any

import torch

import mooncake_kernels as mk

LAYOUTS = ("block token head dim", "block head token dim", "head block token dim")


@dataclass
class Step:
    """The arguments of a call of paged_attention, and its expected result."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    rows: mk.MaskRows
    axes: str
    options: dict[str, Any]

    def run(self, engine: str = "auto") -> tuple[torch.Tensor, torch.Tensor]:
        return mk.paged_attention(
            *(self.q, self.k_cache, self.v_cache, self.block_table, self.rows),
            axes=self.axes, engine=engine, **self.options,
        )  # fmt: skip

    def to(self, device: str) -> "Step":
        batch = self.rows.batch
        moved = mk.ChunkBatch(batch.q_lens.to(device), batch.kv_lens.to(device), batch.positions)
        rows = replace(
            self.rows, batch=moved, intervals=self.rows.intervals.to(device),
            tail_bits=self.rows.tail_bits.to(device), tail_base=self.rows.tail_base.to(device),
        )  # fmt: skip
        names = ("q", "k_cache", "v_cache", "block_table")
        tensors = {name: getattr(self, name).to(device) for name in names}
        options = {
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in self.options.items()
        }
        return replace(self, rows=rows, options=options, **tensors)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out and lse in float64, from matrices."""
        order = [self.axes.split().index(axis) for axis in LAYOUTS[0].split()]
        k, v = (
            cache.double().permute(order) * torch.as_tensor(self.options.get(name, 1.0)).double()
            .reshape(-1, 1)
            for cache, name in ((self.k_cache, "k_scale"), (self.v_cache, "v_scale"))
        )  # fmt: skip
        scale = self.options.get("scale") or self.q.shape[2] ** -0.5
        outs, lses = [], []
        starts = self.rows.batch.cu_q.tolist()
        for b, seen in enumerate(self.rows.dense()):
            queries = self.q[starts[b] : starts[b + 1]].double().transpose(0, 1)
            keys, values = (self._of_request(cache, b, seen.shape[1]) for cache in (k, v))
            scores = (scale * queries @ keys.transpose(1, 2)).masked_fill(~seen, -torch.inf)
            lses.append(torch.logsumexp(scores, -1).transpose(0, 1))
            weights = torch.nan_to_num(torch.softmax(scores, -1), nan=0.0)
            outs.append((weights @ values).transpose(0, 1))
        return torch.cat(outs), torch.cat(lses)

    def _of_request(self, cache: torch.Tensor, b: int, kv_len: int) -> torch.Tensor:
        """Return [heads of q, key, dim]; poisoned values count as 0."""
        blocks = self.block_table[b].clamp(0, cache.shape[0] - 1).long()
        rows = cache[blocks].flatten(0, 1)[:kv_len].nan_to_num(nan=0.0)
        return rows.transpose(0, 1).repeat_interleave(self.q.shape[1] // rows.shape[1], 0)


def make_step(
    rows: mk.MaskRows,
    *,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (64, 64),
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    axes: str = LAYOUTS[0],
    seed: int = 0,
    **options: Any,
) -> Step:
    """Make queries and caches; blocks that no query sees, or that have no owner, hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    batch = rows.batch
    num_blocks = [-(-kv_len // block_size) for kv_len in batch.kv_lens.tolist()]
    ids = torch.randperm(sum(num_blocks) + 2, generator=generator)
    poisoned = torch.ones(len(ids), dtype=torch.bool)
    table = torch.full((batch.num_requests, max(num_blocks, default=0) + 1), -7, dtype=torch.int32)
    first = 0
    for b, (count, seen) in enumerate(zip(num_blocks, rows.dense(), strict=True)):
        own = ids[first : first + count]
        table[b, :count] = own.int()
        keys = torch.zeros(count * block_size, dtype=torch.bool)
        keys[: seen.shape[1]] = seen.any(0)
        poisoned[own] = ~keys.view(count, block_size).any(1)
        first += count
    q = torch.randn(batch.num_q, heads[0], dims[0], generator=generator).to(dtype)
    caches = []
    for dim in dims:
        cache = torch.randn(len(ids), block_size, heads[1], dim, generator=generator)
        cache[poisoned] = torch.nan
        names = axes.split()
        shape = [dict(zip(LAYOUTS[0].split(), cache.shape, strict=True))[name] for name in names]
        out = torch.empty(shape, dtype=cache_dtype or dtype)
        out.permute([names.index(axis) for axis in LAYOUTS[0].split()]).copy_(cache)
        caches.append(out)
    return Step(q, *caches, table, rows, axes, options)


def torch_error(step: Step) -> float:
    """Return the largest error of torch's own attention on the same numbers, in q's dtype."""
    expected, _ = step.expected()
    worst = 0.0
    starts = step.rows.batch.cu_q.tolist()
    for b, seen in enumerate(step.rows.dense()):
        if not seen.any():
            continue
        order = [step.axes.split().index(axis) for axis in LAYOUTS[0].split()]
        k, v = (
            step._of_request(cache.permute(order).to(step.q.dtype), b, seen.shape[1])
            for cache in (step.k_cache, step.v_cache)
        )
        q = step.q[starts[b] : starts[b + 1]].transpose(0, 1)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        difference = out.transpose(0, 1).double() - expected[starts[b] : starts[b + 1]]
        worst = max(worst, float(difference.abs().nan_to_num(0.0).max()))
    return worst


TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}


def check(step: Step, engine: Any, *, loose: float = 1.0) -> None:
    """Run, and compare with float64: error at most twice torch's, or what the dtype allows."""
    out, lse = step.to(engine.device).run(engine.engine)
    expected, expected_lse = step.expected()
    out, lse = out.cpu(), lse.cpu()
    assert out.dtype == step.q.dtype and lse.dtype == torch.float32
    assert torch.equal(lse == -torch.inf, expected_lse == -torch.inf)
    assert not out[expected_lse == -torch.inf].any()
    if out.numel() == 0:
        return
    allowed = loose * max(2 * torch_error(step), TOLERANCE[step.q.dtype])
    assert (out.double() - expected).abs().max().item() <= allowed
    finite = expected_lse > -torch.inf
    torch.testing.assert_close(
        lse[finite].double(), expected_lse[finite], rtol=1e-5, atol=loose * 2e-5
    )
