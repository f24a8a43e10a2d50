"""Masks for torch's ``scaled_dot_product_attention``, and as an additive bias."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ..errors import InvalidArgument, shown

if TYPE_CHECKING:
    from .mask_rows import MaskRows
    from .request_rows import RequestRows


BIAS_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class SdpaMask(NamedTuple):
    """Two arguments of ``scaled_dot_product_attention``; pass them by ``**mask._asdict()``."""

    attn_mask: torch.Tensor | None
    is_causal: bool


def to_sdpa(rows: MaskRows) -> list[SdpaMask]:
    """Return the arguments of SDPA for each request: the cheapest ones that are exact.

    In this order, for a request of ``q_len`` queries and ``kv_len`` keys::

        every query sees every key                      None, False
        query i sees keys 0 to i                        None, True
        query i sees keys 0 to kv_len - q_len + i       causal_lower_right(q_len, kv_len), False
        otherwise                                       bool [q_len, kv_len], False

    SDPA's flag is aligned at the top left, chunked prefill at the bottom right: only
    ``torch.nn.attention.bias`` has a form for the latter. Verified against torch 2.13. The host
    determines the case: on CUDA this waits for the rows.

    Returns:
        An ``SdpaMask`` per request. Where a bool mask lets a query see nothing, SDPA gives 0.
    """
    return [_sdpa_mask(request) for request in rows.requests()]


def _sdpa_mask(rows: RequestRows) -> SdpaMask:
    ends, q_len, kv_len = rows.prefix_ends(), rows.q_len, rows.kv_len
    if ends is not None:
        up_to_itself = torch.arange(1, q_len + 1, device=ends.device)
        if bool((ends == kv_len).all()):
            return SdpaMask(None, False)
        if torch.equal(ends, up_to_itself):
            return SdpaMask(None, True)
        if torch.equal(ends, up_to_itself + kv_len - q_len):
            from torch.nn.attention.bias import causal_lower_right  # takes a second to import

            return SdpaMask(causal_lower_right(q_len, kv_len), False)
    return SdpaMask(rows.dense(), False)


def to_bias(rows: MaskRows, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return each request's mask as a bias to add to its scores.

    ``bias[i, k] = 0.0 if query i sees key k else -inf``.

    Args:
        rows: the mask.
        dtype: float16, bfloat16, float32 or float64.

    Returns:
        ``[q_len, kv_len]`` per request, on the rows' device.

    Raises:
        InvalidArgument: another dtype.
    """
    if not isinstance(dtype, torch.dtype) or dtype not in BIAS_DTYPES:
        raise InvalidArgument(f"to_bias: dtype must be one of {BIAS_DTYPES}, got {shown(dtype)}")
    biases = []
    for mask in rows.dense():
        bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
        biases.append(bias.masked_fill_(~mask, -torch.inf))
    return biases
