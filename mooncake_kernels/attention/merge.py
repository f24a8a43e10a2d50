"""Attention over all keys, from attention over parts of them."""

from typing import Literal

import torch

from .. import _library
from .._arguments import as_instance, as_one_of
from .._tensors import check_device, check_stored, refuse_gradients
from ..errors import InvalidArgument
from ..reference import attention as reference
from ..transforms import FLOATS

MergeEngine = Literal["auto", "host", "cuda", "triton", "reference"]
ENGINES = ("auto", "host", "cuda", "triton", "reference")
OP = "merge_attention"


def merge_attention(
    outs: torch.Tensor,
    lses: torch.Tensor,
    *,
    log2: bool = False,
    engine: MergeEngine = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the attention of a batch's queries over parts of the keys into that over all of them.

    Equivalent to, for each query and head::

        lse = log(sum(exp(lses[i]) for i in range(n)))
        out = sum(exp(lses[i] - lse) * outs[i] for i in range(n) if lses[i] != -inf)

    which is exact except for rounding, for any parts: splits of the keys, a shared prefix and the
    rest, blocks held by other instances. No key may be in two of them. A query without keys in
    any part gets 0 and -inf. (Infinite-LLM, section 4.1: DistAttention.)

    Args:
        outs: ``[n, num_q, heads, dim]``, float32, float16 or bfloat16, n at least 1. Where its lse
            is -inf a part is not read.
        lses: float32 ``[n, num_q, heads]``.
        log2: logarithms are to base 2, like FlashInfer's, not natural.
        engine: "host", "cuda", "triton", "reference"; "auto" by the device.

    Returns:
        ``out`` ``[num_q, heads, dim]`` of the dtype of ``outs``, and ``lse`` ``[num_q, heads]``,
        float32, to the same base. On CUDA both are queued on the current stream. There is no
        backward: outside ``torch.no_grad()``, tensors that require grad are refused, and always
        those with a forward tangent.

    Raises:
        InvalidArgument: an argument is not as above.
        Unavailable: the named engine is not available.
    """
    as_one_of(OP, "engine", engine, ENGINES)
    as_instance(OP, "outs", outs, torch.Tensor, "a tensor")
    as_instance(OP, "lses", lses, torch.Tensor, "a tensor")
    as_instance(OP, "log2", log2, bool, "True or False")
    check_stored(f"{OP}: outs", outs)
    check_stored(f"{OP}: lses", lses)
    check_device(OP, "outs", outs)
    refuse_gradients(OP, outs=outs, lses=lses)
    if outs.dim() != 4 or outs.shape[0] == 0 or outs.dtype not in FLOATS:
        raise InvalidArgument(
            f"{OP}: outs must be float32, float16 or bfloat16 [n, num_q, heads, dim] with n >= 1, "
            f"got {outs.dtype} of shape {tuple(outs.shape)}"
        )
    if lses.dtype != torch.float32 or lses.shape != outs.shape[:3] or lses.device != outs.device:
        raise InvalidArgument(
            f"{OP}: lses must be float32 {list(outs.shape[:3])} on {outs.device}, got "
            f"{lses.dtype} of shape {tuple(lses.shape)} on {lses.device}"
        )
    if engine == "reference":
        out, lse = reference.merge_attention(outs, lses, log2)
        return out.to(outs.dtype), lse.float()
    if engine == "auto":
        engine = "host" if outs.device.type == "cpu" else "cuda" if _library.has_cuda else "triton"
        _library.log_choice(f"{OP} on {outs.device.type}", engine)
    outs, lses = outs.contiguous(), lses.contiguous()
    if engine == "triton":
        return _library.triton_module(OP, "attention_merge", outs.device).merge_attention(
            outs, lses, log2
        )
    _library.require_engine(engine, outs.device.type, OP)
    return _library.call(_library.merge_attention, outs, lses, log2)
