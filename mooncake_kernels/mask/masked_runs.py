"""For each key, runs of queries that do not see it: a mask by columns instead of rows."""

from typing import NamedTuple

import torch

from .request_rows import TAIL_BITS, RequestRows


class MaskedRuns(NamedTuple):
    """The queries that do not see each key of a request: int64 ``[kv_len]`` each.

    Where a key has no run, its begins and ends are ``q_len``. If any key has more than two, only
    ``num_runs`` is meaningful.
    """

    num_runs: torch.Tensor
    first_begin: torch.Tensor
    first_end: torch.Tensor
    last_begin: torch.Tensor
    last_end: torch.Tensor


class _Edges(NamedTuple):
    """At each query, the keys in ``[lo, hi)`` start to be masked, or stop."""

    query: torch.Tensor
    lo: torch.Tensor
    hi: torch.Tensor


def masked_runs(rows: RequestRows, *, below_diagonal: bool = False) -> MaskedRuns | None:
    """Find the runs in about ``q_len + kv_len`` steps, from the changes between queries.

    Args:
        rows: one request's rows.
        below_diagonal: leave all pairs with ``key > kv_len - q_len + query`` out of the runs;
            returns None if one of those is seen.
    """
    seen = _intervals(rows, below_diagonal)
    if seen is None:
        return None
    # Before the first query and after the last all keys count as seen, so every run has two ends.
    whole = seen.new_tensor([[[0, rows.kv_len]]])
    all_seen = torch.cat([whole, whole.new_zeros(1, seen.shape[1] - 1, 2)], dim=1)
    before, after = torch.cat([all_seen, seen]), torch.cat([seen, all_seen])
    begins, ends = _difference(before, after), _difference(after, before)
    if bool(rows.tail_bits.any()):
        begins, ends = (
            _with_tail(edges, rows, below_diagonal, s) for edges, s in ((begins, 1), (ends, -1))
        )
    return _runs(begins, ends, rows.q_len, rows.kv_len)


def _intervals(rows: RequestRows, below_diagonal: bool) -> torch.Tensor | None:
    """Return what each query sees without tail bits, int64 ``[q_len, 2 or 3, (lo, hi)]``."""
    seen = rows.intervals.to(torch.int64).view(-1, 2, 2)
    if not below_diagonal:
        return seen
    above = rows.kv_len - rows.q_len + 1 + torch.arange(rows.q_len, device=seen.device)
    if bool((seen[:, :, 1] > above[:, None]).any()):
        return None
    bit = torch.arange(TAIL_BITS, device=seen.device)
    is_set = ((rows.tail_bits[:, None] >> bit) & 1).bool()
    if bool((is_set & (rows.tail_base + bit >= above[:, None])).any()):
        return None
    rest = torch.stack([above, torch.full_like(above, rows.kv_len)], dim=1)
    return torch.cat([seen, rest[:, None]], dim=1)


def _difference(left: torch.Tensor, right: torch.Tensor) -> _Edges:
    """Return the keys in the intervals of ``left`` but not of ``right``, row by row."""
    points = torch.cat([left.flatten(1), right.flatten(1)], dim=1).sort(dim=1).values
    lo, hi = points[:, :-1], points[:, 1:]
    is_piece = (lo < hi) & _contains(left, lo) & ~_contains(right, lo)
    query, piece = is_piece.nonzero().unbind(1)
    return _Edges(query, lo[query, piece], hi[query, piece])


def _contains(intervals: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    lo, hi = intervals[:, None].unbind(3)
    return ((lo <= key[..., None]) & (key[..., None] < hi)).any(2)


def _with_tail(edges: _Edges, rows: RequestRows, below_diagonal: bool, sign: int) -> _Edges:
    """Replace the edges of the keys that tail bits cover, which are found one by one."""
    base = int(rows.tail_base)
    top = min(base + TAIL_BITS, rows.kv_len)
    masked = ~rows.dense(base, top - base)
    if below_diagonal:
        masked = torch.tril(masked, rows.kv_len - rows.q_len - base)
    steps = torch.nn.functional.pad(masked.to(torch.int8), (0, 0, 1, 1)).diff(dim=0)
    query, key = (steps == sign).nonzero().unbind(1)
    pieces = [
        _Edges(edges.query, edges.lo, edges.hi.clamp(max=base)),
        _Edges(edges.query, edges.lo.clamp(min=top), edges.hi),
        _Edges(query, base + key, base + key + 1),
    ]
    joined = _Edges(*(torch.cat(columns) for columns in zip(*pieces, strict=True)))
    kept = joined.lo < joined.hi
    order = joined.query[kept].argsort(stable=True)
    return _Edges(*(column[kept][order] for column in joined))


def _runs(begins: _Edges, ends: _Edges, q_len: int, kv_len: int) -> MaskedRuns:
    num_runs = begins.query.new_zeros(kv_len + 1)
    num_runs.index_add_(0, begins.lo, torch.ones_like(begins.lo))
    num_runs.index_add_(0, begins.hi, -torch.ones_like(begins.hi))
    num_runs = num_runs.cumsum(0)[:kv_len]
    # [begin or end, first or last run, key]
    sides = torch.full((2, 2, kv_len), q_len, device=num_runs.device)
    if not bool((num_runs > 2).any()):
        first = num_runs.cumsum(0) - num_runs
        there = num_runs > 0
        for side, edges in zip(sides, (begins, ends), strict=True):
            queries = _by_key(edges)
            side[0, there] = queries[first[there]]
            side[1, there] = queries[(first + num_runs - 1)[there]]
    return MaskedRuns(num_runs, *sides.transpose(0, 1).reshape(4, kv_len))


def _by_key(edges: _Edges) -> torch.Tensor:
    """Return the queries of all edges, key by key, ascending."""
    sizes = edges.hi - edges.lo
    query = edges.query.repeat_interleave(sizes)
    shift = (edges.lo - (sizes.cumsum(0) - sizes)).repeat_interleave(sizes)
    key = shift + torch.arange(len(query), device=query.device)
    return query[key.argsort(stable=True)]
