"""Attention of a mixed batch over a paged cache by torch's scaled_dot_product_attention.

The blocks of a request are first gathered into one tensor.
"""

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch.nn import functional

from .batch import Batch


@dataclass(frozen=True)
class _Group:
    """Requests with the same number of queries, attended to in one call."""

    rows: slice | torch.Tensor  # which rows of q: num_requests * q_len of them
    num_requests: int
    kv_len: int  # of each request, padding included
    block_ids: torch.Tensor  # [num_requests * num_blocks]
    mask: torch.Tensor | None = None  # bool, True attends; broadcasts to [n, heads, q, kv]
    is_causal: bool = False
    padding: torch.Tensor | None = None  # [n, kv, 1, 1] True where gathered rows are undefined


class SdpaAttention:
    """An ``Attention``. Decodes of similar length are attended to together, to save launches."""

    def __init__(self, batch: Batch) -> None:
        self._slots = (batch.slots // batch.block_size, batch.slots % batch.block_size)
        self._groups: list[_Group] = []
        decodes = defaultdict(list)
        for index, (q_len, kv_len) in enumerate(zip(batch.q_lens, batch.kv_lens, strict=True)):
            if q_len == 1:
                num_blocks = -(-kv_len // batch.block_size)
                decodes[num_blocks.bit_length()].append(index)  # at most half is padding
            else:
                self._groups.append(_one_request(batch, index))
        self._groups += [_decode_group(batch, indices) for indices in decodes.values()]

    def append(
        self, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> None:
        k_cache[self._slots], v_cache[self._slots] = k, v

    def attend(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q)
        for group in self._groups:
            k, v = (_gather(cache, group) for cache in (k_cache, v_cache))
            out[group.rows] = _attend(q[group.rows], k, v, group)
        return out


def _one_request(batch: Batch, index: int) -> _Group:
    q_len, kv_len = batch.q_lens[index], batch.kv_lens[index]
    start = batch.row_starts[index]
    rows = slice(start, start + q_len)
    table = batch.block_tables[index, : -(-kv_len // batch.block_size)]
    mask = None
    if 1 < q_len < kv_len:  # a later chunk: causal, aligned at the bottom right
        keys = torch.arange(kv_len, device=table.device)
        mask = keys <= batch.positions[rows, None]
    return _Group(rows, 1, kv_len, table, mask, is_causal=1 < q_len == kv_len)


def _decode_group(batch: Batch, indices: list[int]) -> _Group:
    device = batch.positions.device
    starts = batch.row_starts
    rows = torch.tensor([starts[index] for index in indices], device=device)
    num_blocks = max(-(-batch.kv_lens[index] // batch.block_size) for index in indices)
    tables = batch.block_tables[torch.tensor(indices, device=device), :num_blocks]
    kv_len = num_blocks * batch.block_size
    mask = torch.arange(kv_len, device=device) <= batch.positions[rows, None]
    return _Group(
        rows=rows,
        num_requests=len(indices),
        kv_len=kv_len,
        block_ids=tables.reshape(-1),
        mask=mask[:, None, None, :],
        padding=~mask[:, :, None, None],
    )


def _gather(cache: torch.Tensor, group: _Group) -> torch.Tensor:
    """Gather ``[n, kv, num_kv_heads, head_dim]``; padding becomes 0, whatever it contained."""
    blocks = cache.index_select(0, group.block_ids)
    rows = blocks.reshape(group.num_requests, -1, *cache.shape[2:])[:, : group.kv_len]
    return rows if group.padding is None else rows.masked_fill_(group.padding, 0)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: _Group) -> torch.Tensor:
    num_rows, num_heads, head_dim = q.shape
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # [n, num_kv_heads, kv, head_dim]
    n, num_kv_heads = k.shape[:2]
    if num_rows == n:  # one query each: the heads that share a KV head become its queries
        folded = q.view(n, num_kv_heads, num_heads // num_kv_heads, head_dim)
        out = functional.scaled_dot_product_attention(folded, k, v, attn_mask=group.mask)
        return out.reshape(q.shape)
    heads_first = q.view(n, num_rows // n, num_heads, head_dim).transpose(1, 2)
    out = functional.scaled_dot_product_attention(
        heads_first, k, v, attn_mask=group.mask, is_causal=group.is_causal, enable_gqa=True
    )
    return out.transpose(1, 2).reshape(q.shape)
