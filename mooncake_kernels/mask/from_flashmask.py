"""Convert FlashMask's columns to rows."""

from collections.abc import Sequence

import torch

from .._arguments import as_bool, as_instance
from ..errors import InvalidArgument, shown
from .batch import ChunkBatch
from .from_dense import build_rows
from .mask_rows import MaskRows
from .to_flashmask import FlashMaskColumns


def rows_from_flashmask(columns: Sequence[FlashMaskColumns], batch: ChunkBatch) -> MaskRows:
    """Return the rows that see what FlashMask's columns leave: the inverse of ``to_flashmask``.

    Args:
        columns: ``startend_row_indices`` int32 ``[1, 1, kv_len, n]`` and ``causal`` of each
            request; ``n`` is 1 or 2 if causal, else 2 or 4. ``to_flashmask`` defines them.
        batch: whose masks these are.

    Raises:
        InvalidArgument: columns have another type or shape, or a row does not fit two intervals
            and 64 bits.

    It builds the dense mask.
    """
    op = "rows_from_flashmask"
    as_instance(op, "batch", batch, ChunkBatch, "a ChunkBatch")
    q_lens = batch.q_lens_list
    if not isinstance(columns, Sequence) or isinstance(columns, str):
        raise InvalidArgument(f"{op}: columns must be a list, one a request, got {shown(columns)}")
    if len(columns) != len(q_lens):
        raise InvalidArgument(
            f"{op}: columns must be one a request ({len(q_lens)}), got {len(columns)}"
        )
    masks = [
        _dense(op, f"columns[{index}]", *_as_columns(op, index, columns[index]), *lens)
        for index, lens in enumerate(zip(q_lens, batch.kv_lens_list, strict=True))
    ]
    return build_rows(op, masks, batch)


def _as_columns(op: str, index: int, pair: object) -> FlashMaskColumns:
    name = f"columns[{index}]"
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise InvalidArgument(f"{op}: {name} must be FlashMaskColumns, got {shown(pair)}")
    indices = as_instance(op, f"{name}.startend_row_indices", pair[0], torch.Tensor, "a tensor")
    if indices.dtype != torch.int32:
        raise InvalidArgument(
            f"{op}: {name}.startend_row_indices must be int32, got {indices.dtype}"
        )
    return FlashMaskColumns(indices, as_bool(op, f"{name}.causal", pair[1]))


def _dense(
    op: str, name: str, indices: torch.Tensor, causal: bool, q_len: int, kv_len: int
) -> torch.Tensor:
    allowed = (1, 2) if causal else (2, 4)
    shapes = [(1, 1, kv_len, n) for n in allowed]
    if tuple(indices.shape) not in shapes:
        raise InvalidArgument(
            f"{op}: {name} must be of shape {shapes[0]} or {shapes[1]}, got {tuple(indices.shape)}"
        )
    edges = indices[0, 0].unbind(1)
    query = torch.arange(q_len, device=indices.device)[:, None]
    masked = edges[0] <= query
    if causal:
        if len(edges) == 2:
            masked &= query < edges[1]
        masked |= torch.arange(kv_len, device=indices.device) > kv_len - q_len + query
    elif len(edges) == 2:
        masked |= query < edges[1]
    else:
        masked &= query < edges[1]
        masked |= (edges[2] <= query) & (query < edges[3])
    return ~masked
