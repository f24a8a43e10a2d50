"""The specification of masks: each rule as a predicate, and the rows of a dense mask."""

from collections.abc import Callable
from typing import Any

import torch

from ..mask.batch import ChunkBatch
from ..mask.rule import Both, Either, Leaf, Op, Rule

TAIL_BITS = 64
Tensor = torch.Tensor


def _causal(position: Tensor, key: Tensor, kv_len: int) -> Tensor:
    return key <= position


def _full(position: Tensor, key: Tensor, kv_len: int) -> Tensor:
    return (key >= 0) & (position >= 0)


def _sliding_window(position: Tensor, key: Tensor, kv_len: int, window: int) -> Tensor:
    return key > position - window


def _chunked_local(position: Tensor, key: Tensor, kv_len: int, chunk: int) -> Tensor:
    return key // chunk == position // chunk


def _sink(position: Tensor, key: Tensor, kv_len: int, num_keys: int) -> Tensor:
    return (key < num_keys) & (key <= position)


def _prefix_lm(position: Tensor, key: Tensor, kv_len: int, prefix: int) -> Tensor:
    return (key < prefix) | (key <= position)


def _documents(position: Tensor, key: Tensor, kv_len: int, cu: tuple[int, ...]) -> Tensor:
    begins = torch.tensor(cu, device=position.device)
    document = [torch.bucketize(where, begins, right=True) for where in (position, key)]
    return document[0] == document[1]


def _spans(position: Tensor, key: Tensor, kv_len: int, table: tuple[int, ...]) -> Tensor:
    result = (key < 0) & (position < 0)
    for begin, end in zip(table[::2], table[1::2], strict=True):
        inside = [(begin <= where) & (where < end) for where in (position, key)]
        result = result | inside[0] & inside[1]
    return result


def _items(
    position: Tensor, key: Tensor, kv_len: int, prefix: int, delimiters: tuple[int, ...]
) -> Tensor:
    last = torch.full_like(position, prefix - 1)
    for delimiter in delimiters:
        last = torch.where(position >= delimiter, delimiter, last)
    return (key <= position) & ((position < prefix) | (key < prefix) | (key > last))


def _tree(position: Tensor, key: Tensor, kv_len: int, parents: tuple[int, ...]) -> Tensor:
    base = kv_len - len(parents)
    result = (key < base) & (position >= base) | (key <= position) & (position < base)
    for draft in range(len(parents)):
        seen = draft
        while seen >= 0:
            result = result | (position == base + draft) & (key == base + seen)
            seen = parents[seen]
    return result


SEES: dict[Op, Callable[..., Tensor]] = {
    Op.CAUSAL: _causal,
    Op.FULL: _full,
    Op.SLIDING_WINDOW: _sliding_window,
    Op.CHUNKED_LOCAL: _chunked_local,
    Op.SINK: _sink,
    Op.PREFIX_LM: _prefix_lm,
    Op.DOCUMENTS: _documents,
    Op.SPANS: _spans,
    Op.ITEMS: _items,
    Op.TREE: _tree,
}


def sees(rule: Rule, request: int, kv_len: int, position: Tensor, key: Tensor) -> Tensor:
    """Evaluate a rule's predicate; ``position`` and ``key`` are int64 and broadcast."""
    rule = rule.of(request)
    if isinstance(rule, Both | Either):
        left, right = (sees(r, request, kv_len, position, key) for r in (rule.left, rule.right))
        return left & right if isinstance(rule, Both) else left | right
    assert isinstance(rule, Leaf)
    parameters: list[Any] = [parameter.of(request) for parameter in rule.parameters]
    return SEES[rule.op](position, key, kv_len, *parameters)


def dense(rule: Rule, batch: ChunkBatch) -> list[Tensor]:
    """Return the mask per request as bool ``[q_len, kv_len]``, on the CPU."""
    positions = batch.query_positions().cpu().to(torch.int64).split(batch.q_lens.tolist())
    return [
        sees(rule, b, kv_len, positions[b][:, None], torch.arange(kv_len, device="cpu")[None])
        for b, kv_len in enumerate(batch.kv_lens.tolist())
    ]


def rows(rule: Rule, batch: ChunkBatch, tail_base: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result of ``mask.rows``: intervals and tail bits; a row that does not fit has
    intervals of -1.

    The first two runs of keys that a row sees are its intervals, the others its tail bits.
    """
    pairs = [
        rows_of_dense(mask, base)
        for mask, base in zip(dense(rule, batch), tail_base.tolist(), strict=True)
    ]
    intervals = [torch.zeros(0, 4, dtype=torch.int32, device="cpu"), *(first for first, _ in pairs)]
    tails = [torch.zeros(0, dtype=torch.int64, device="cpu"), *(second for _, second in pairs)]
    return torch.cat(intervals).to(batch.device), torch.cat(tails).to(batch.device)


def rows_of_dense(mask: Tensor, tail_base: int) -> tuple[Tensor, Tensor]:
    """Return the rows of one request's mask, bool ``[q_len, kv_len]``."""
    intervals = torch.zeros(len(mask), 4, dtype=torch.int32, device="cpu")
    tails = torch.zeros(len(mask), dtype=torch.int64, device="cpu")
    none = torch.zeros(1, device=mask.device)
    for row, line in enumerate(mask):
        edges = torch.diff(line.to(torch.int8), prepend=none, append=none)
        runs = list(
            zip((edges > 0).nonzero().flatten(), (edges < 0).nonzero().flatten(), strict=True)
        )
        for index, (begin, end) in enumerate(runs[:2]):
            intervals[row, 2 * index], intervals[row, 2 * index + 1] = begin, end
        if any(begin < tail_base for begin, _ in runs[2:]):
            intervals[row], tails[row] = -1, 0
            continue
        bits = sum(
            1 << (key - tail_base) for begin, end in runs[2:] for key in range(int(begin), int(end))
        )
        tails[row] = bits - (1 << TAIL_BITS) if bits >> (TAIL_BITS - 1) else bits
    return intervals, tails


def packed_bits(mask: Tensor) -> Tensor:
    """Return a request's mask as bytes, lowest bit first; see ``PackedMask``."""
    flat = mask.cpu().flatten().to(torch.uint8)
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % 8)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8, device="cpu")).sum(1, dtype=torch.uint8)
