"""Convert a dense mask to rows, or refuse it."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .._arguments import as_instance
from ..errors import InvalidArgument, shown
from .batch import ChunkBatch
from .mask_rows import MaskRows
from .request_rows import TAIL_BITS


class _Runs(NamedTuple):
    """The runs of keys that rows see, in ascending order; int64 ``[num_runs]``."""

    row: torch.Tensor
    rank: torch.Tensor  # 0 for the first run of a row
    begin: torch.Tensor
    end: torch.Tensor


def rows_from_dense(masks: Sequence[torch.Tensor], batch: ChunkBatch | None = None) -> MaskRows:
    """Return the rows that see what dense masks say: the inverse of ``MaskRows.dense``.

    The first two runs of keys that a query sees become its intervals, the others tail bits. A
    request's 64 tail bits begin at its first query, like those of a tree of drafts, or at its first
    tail key if they do not fit there.

    Args:
        masks: bool ``[q_len, kv_len]`` per request, True where a query sees a key.
        batch: whose masks these are; None for the last ``q_len`` of ``kv_len`` positions each.

    Raises:
        InvalidArgument: a mask has another type or shape, or a row does not fit two intervals and
            64 bits: the first one is named.

    On CUDA this waits for the masks.
    """
    op = "rows_from_dense"
    if batch is None:
        _check_masks(op, masks)
        batch = batch_of(masks)
    as_instance(op, "batch", batch, ChunkBatch, "a ChunkBatch")
    _check_masks(op, masks, list(zip(batch.q_lens_list, batch.kv_lens_list, strict=True)))
    return build_rows(op, masks, batch)


def batch_of(masks: Sequence[torch.Tensor]) -> ChunkBatch:
    """Return the batch whose queries are the last of their requests."""
    device = masks[0].device if len(masks) else None
    return ChunkBatch([len(m) for m in masks], [m.shape[1] for m in masks], device=device)


def build_rows(op: str, masks: Sequence[torch.Tensor], batch: ChunkBatch) -> MaskRows:
    """Implement ``rows_from_dense`` for masks that match the batch; errors name ``op``."""
    intervals = torch.zeros(batch.num_q, 4, dtype=torch.int32, device=batch.device)
    tail_bits = torch.zeros(batch.num_q, dtype=torch.int64, device=batch.device)
    tail_base = batch.kv_lens.clone()
    first_row = 0
    for request, mask in enumerate(masks):
        q_len, kv_len = mask.shape
        runs = _runs_of(mask.to(batch.device))
        rows, last = slice(first_row, first_row + q_len), runs.rank >= 2
        for rank in range(2):
            row, _, begin, end = (column[runs.rank == rank] for column in runs)
            pair = torch.stack([begin, end], dim=1).to(torch.int32)
            intervals[rows][row, 2 * rank : 2 * rank + 2] = pair
        if bool(last.any()):
            tail = _Runs(*(column[last] for column in runs))
            base = _tail_base(op, request, tail, preferred=kv_len - q_len)
            tail_base[request] = base
            tail_bits[rows].index_add_(0, tail.row, _bits(tail.begin - base, tail.end - base))
        first_row += q_len
    return MaskRows(batch, intervals, tail_bits, tail_base)


def _runs_of(mask: torch.Tensor) -> _Runs:
    edges = torch.nn.functional.pad(mask.to(torch.int8), (1, 1)).diff(dim=1)
    row, begin = (edges > 0).nonzero().unbind(1)
    _, end = (edges < 0).nonzero().unbind(1)
    num_runs = torch.bincount(row, minlength=len(mask))
    first_run = num_runs.cumsum(0) - num_runs
    return _Runs(row, torch.arange(len(row), device=row.device) - first_run[row], begin, end)


def _tail_base(op: str, request: int, tail: _Runs, preferred: int) -> int:
    """Return the base at which 64 bits hold all of the tail."""
    lowest = (tail.end - TAIL_BITS).clamp(min=0).cummax(0).values
    highest = tail.begin.cummin(0).values
    bad = (lowest > highest).nonzero()
    if bad.numel():
        row = int(tail.row[bad[0, 0]])
        raise InvalidArgument(
            f"{op}: the mask of request {request} must have rows of at most two runs of keys, but "
            f"for {TAIL_BITS} positions that all its rows share, got row {row}, whose third run "
            f"is at {int(tail.begin[tail.row == row][0])} and whose last ends at "
            f"{int(tail.end[tail.row == row][-1])}"
        )
    return preferred if int(lowest[-1]) <= preferred <= int(highest[-1]) else int(highest[-1])


def _bits(begin: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
    """Return int64 with the bits from begin up to end set, modulo 2**64."""
    below_end = torch.where(end < TAIL_BITS, torch.ones_like(end) << end.clamp(max=63), 0)
    return below_end - (torch.ones_like(begin) << begin)


def _check_masks(
    op: str, masks: Sequence[torch.Tensor], shapes: list[tuple[int, int]] | None = None
) -> None:
    if not isinstance(masks, Sequence):
        raise InvalidArgument(f"{op}: masks must be a list of tensors, got {shown(masks)}")
    if shapes is not None and len(masks) != len(shapes):
        raise InvalidArgument(
            f"{op}: masks must be one a request ({len(shapes)}), got {len(masks)}"
        )
    for index, mask in enumerate(masks):
        as_instance(op, f"masks[{index}]", mask, torch.Tensor, "a tensor")
        wanted = f"shape {shapes[index]}" if shapes else "two dimensions"
        fits = mask.dim() == 2 if shapes is None else tuple(mask.shape) == shapes[index]
        if mask.dtype != torch.bool or not fits:
            raise InvalidArgument(
                f"{op}: masks[{index}] must be bool of {wanted}, got {shown(mask.dtype)} of "
                f"shape {tuple(mask.shape)}"
            )
