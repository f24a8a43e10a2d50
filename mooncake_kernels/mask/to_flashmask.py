"""Columns of FlashMask: for each key, which queries do not see it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ..errors import InvalidArgument
from .masked_runs import masked_runs

if TYPE_CHECKING:
    from .mask_rows import MaskRows
    from .request_rows import RequestRows


class FlashMaskColumns(NamedTuple):
    """Two arguments of Paddle's ``flashmask_attention``, for one request."""

    startend_row_indices: torch.Tensor  # int32 [1, 1, kv_len, 1, 2 or 4]
    causal: bool


def to_flashmask(rows: MaskRows) -> list[FlashMaskColumns]:
    """Return each request's mask by columns, with the fewest numbers per key that are exact.

    Query ``i`` does not see key ``k`` if, with ``c = startend_row_indices[0, 0, k]``::

        causal, 1 column     k > kv_len - q_len + i  or  c[0] <= i
        causal, 2 columns    k > kv_len - q_len + i  or  c[0] <= i < c[1]
        2 columns            c[0] <= i  or  i < c[1]
        4 columns            c[0] <= i < c[1]  or  c[2] <= i < c[3]

    Verified against PaddlePaddle's documentation of ``flashmask_attention`` (as of 3.3) and the
    dense form that its tests compare with, where causal is aligned at the bottom right. On CUDA
    this waits for the rows.

    Returns:
        ``FlashMaskColumns`` per request; stack those of equal kind and lengths for a batch.

    Raises:
        InvalidArgument: more than two runs of queries do not see a key: the first is named.

    Source: FlashMask (arXiv:2410.01359), section 4.1.
    """
    return [_columns(index, request) for index, request in enumerate(rows.requests())]


def _columns(index: int, rows: RequestRows) -> FlashMaskColumns:
    below = masked_runs(rows, below_diagonal=True)
    if below is not None and bool((below.num_runs <= 1).all()):
        is_suffix = bool((below.last_end == rows.q_len).all())
        return _packed([below.last_begin, below.last_end][: 1 if is_suffix else 2], causal=True)
    runs = masked_runs(rows)
    assert runs is not None
    too_many = (runs.num_runs > 2).nonzero()
    if too_many.numel():
        key = int(too_many[0])
        raise InvalidArgument(
            "to_flashmask: rows must leave out each key in at most two runs of queries, got key "
            f"{key} of request {index}, which {int(runs.num_runs[key])} runs do not see"
        )
    starts_at_0 = runs.first_begin == 0
    has_upper = (runs.num_runs == 2) | (runs.num_runs == 1) & starts_at_0
    has_lower = (runs.num_runs == 2) | (runs.num_runs == 1) & ~starts_at_0
    upper = [torch.where(has_upper, edge, 0) for edge in (runs.first_begin, runs.first_end)]
    lower = [torch.where(has_lower, edge, rows.q_len) for edge in (runs.last_begin, runs.last_end)]
    if not bool(upper[0].any()) and bool((lower[1] == rows.q_len).all()):
        return _packed([lower[0], upper[1]], causal=False)
    return _packed([*lower, *upper], causal=False)


def _packed(columns: list[torch.Tensor], *, causal: bool) -> FlashMaskColumns:
    return FlashMaskColumns(torch.stack(columns, dim=1).to(torch.int32)[None, None], causal)
