"""Attention of a mixed batch over a paged KV cache, under the rows of a mask."""

from typing import Any, Literal

import torch

from .. import _library
from .._arguments import as_float32, as_instance, as_one_of
from .._tensors import check_stored, refuse_gradients
from ..errors import InvalidArgument
from ..mask import MaskRows
from ..mask.request_rows import refuse_unfit
from ..reference import attention as reference
from ..transforms import FLOATS
from .caches import AXES, Caches

Engine = Literal["auto", "host", "triton", "reference"]
ENGINES = ("auto", "host", "triton", "reference")
OP = "paged_attention"
MOST_KEYS = (1 << 31) - 128  # of a request, in Triton: where its tiles and its tail end is an int32


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    rows: MaskRows,
    scale: float | None = None,
    *,
    axes: str = AXES,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    engine: Engine = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend, for each query of a batch, to the keys of its request that it sees.

    Equivalent to, where ``key(b, n) = block_table[b, n // block_size], n % block_size``::

        for row, b in enumerate(rows.batch.request_of()):
            for head in range(num_heads):
                kv_head = head // (num_heads // num_kv_heads)
                seen = [n for n in range(kv_lens[b]) if rows.dense()[b] sees n]
                scores = [scale * q[row, head] @ k_cache[key(b, n)][kv_head] for n in seen]
                lse[row, head] = log(sum(exp(scores)))
                if lse[row, head] > -inf:
                    weights = exp(scores - lse[row, head])
                    out[row, head] = sum(weights * [v_cache[key(b, n)][kv_head] for n in seen])

    A query that sees nothing, or only scores of -inf, has ``out`` 0 and ``lse`` -inf. Keys that no
    query sees are not read in tiles that none of its neighbours sees. Sums are kept in float32. On
    the CPU the bits of a row depend only on its query, mask and keys: not on the batch, on how the
    prompt was chunked, on threads, or on the layout of the cache; except that an infinite or NaN
    value that one query of a chunk sees may turn the others' outputs to NaN, as in torch's SDPA.
    (FlashAttention-2, section 3.1; split over the keys as in Flash-Decoding.)

    Args:
        q: ``[num_q, heads, dim]``, float32, float16 or bfloat16, rows as in ``rows.batch``, dim
            packed.
        k_cache: ``[block, token, kv_head, dim]`` or as ``axes`` says, strided except for dim; of
            q's dtype, another one of the three, or fp8. ``heads`` must be a multiple of
            ``kv_head``.
        v_cache: the same except for dim, which may differ (MLA: ``k_cache[..., :512]``).
        block_table: int32 ``[num_requests, max_blocks]``, the blocks of each request in order.
            Entries whose keys no query sees may have any value.
        rows: what each query sees. On a GPU, one of a ``MaskBuilder`` that did not fit sees
            nothing; on the CPU it is refused.
        scale: of the scores, a float32; None for ``dim ** -0.5``.
        axes: the order of the caches' axes, an order of "block token head dim", or without "head"
            (MLA); "block head token dim" is FlashInfer's HND.
        k_scale: the value of 1.0 in ``k_cache``: a number, or float ``[kv_head]``; None for 1.
            Positive and finite, which is not checked of a tensor on a GPU.
        v_scale: the same for ``v_cache``.
        engine: "host" (the CPU's vectors); "triton" (a GPU; on the CPU in its interpreter);
            "reference" (float64); "auto" by the device.

    Returns:
        ``out`` ``[num_q, heads, v_dim]`` of q's dtype, and ``lse`` ``[num_q, heads]``, float32,
        natural logarithms. On CUDA both are queued on the current stream. There is no backward:
        outside ``torch.no_grad()``, tensors that require grad are refused, and always those with a
        forward tangent.

    Raises:
        InvalidArgument: an argument is not as above, or a block that is seen is not in the cache
            or not in the table. On CUDA its keys count as not seen, and a later call raises. In
            Triton also a request of more than ``2**31 - 128`` keys, and more heads or queries than
            CUDA's grids hold.
        Unavailable: the named engine is not available.
    """
    as_one_of(OP, "engine", engine, ENGINES)
    as_instance(OP, "rows", rows, MaskRows, "a MaskRows")
    caches = Caches.of(OP, k_cache, v_cache, axes, (k_scale, v_scale))
    _check_q(q, caches, rows)
    scales = {"k_scale": caches.k_scale, "v_scale": caches.v_scale}
    refuse_gradients(OP, q=q, k_cache=k_cache, v_cache=v_cache, **scales)
    _check_table(block_table, caches, rows)
    num_q = rows.batch.num_q  # a MaskBuilder's rows may have spare ones
    arguments = (
        *(q, caches.k, caches.v, block_table.contiguous()),
        *(
            rows.intervals[:num_q],
            rows.tail_bits[:num_q],
            rows.tail_base,
            rows.batch.cu_q,
            rows.batch.kv_lens,
        ),
        *(_as_scale(scale, q.shape[2]), caches.k_scale, caches.v_scale),
    )
    if engine == "auto":
        engine = "host" if q.device.type == "cpu" else "triton"
        _library.log_choice(f"attention on {q.device.type}", engine)
    if engine != "host":  # which looks itself
        refuse_unfit(OP, rows.intervals[:num_q])
    if engine == "reference":
        out, lse = reference.paged_attention(*arguments)
        return out.to(q.dtype), lse.float()
    if engine == "triton":
        _check_room(block_table, caches, rows)
        return _library.triton_module(OP, "attention", q.device).paged_attention(*arguments)
    _library.require_engine("host", q.device.type, OP)
    return _library.call(_library.paged_attention, *arguments)


def _check_q(q: torch.Tensor, caches: Caches, rows: MaskRows) -> None:
    as_instance(OP, "q", q, torch.Tensor, "a tensor")
    check_stored(f"{OP}: q", q)
    num_q, dim, num_kv_heads = rows.batch.num_q, caches.k.shape[3], caches.k.shape[2]
    if q.dtype not in FLOATS:
        raise InvalidArgument(f"{OP}: q must be float32, float16 or bfloat16, got {q.dtype}")
    if q.dim() != 3 or q.shape[0] != num_q or q.shape[2] != dim:
        raise InvalidArgument(
            f"{OP}: q must be [{num_q}, heads, {dim}], as rows and k_cache say, got shape "
            f"{tuple(q.shape)}"
        )
    if q.shape[1] == 0 or q.shape[1] % num_kv_heads:
        raise InvalidArgument(
            f"{OP}: q must have a multiple of the {num_kv_heads} heads of k_cache, got {q.shape[1]}"
        )
    if dim > 1 and q.stride(2) != 1:
        raise InvalidArgument(
            f"{OP}: q must have its dims packed (stride 1), got stride {q.stride(2)}"
        )
    for name, tensor in (("k_cache", caches.k), ("rows", rows.intervals)):
        if tensor.device != q.device:
            raise InvalidArgument(
                f"{OP}: {name} must be on the device of q, {q.device}, got {tensor.device}"
            )


def _check_table(block_table: torch.Tensor, caches: Caches, rows: MaskRows) -> None:
    as_instance(OP, "block_table", block_table, torch.Tensor, "a tensor")
    num_requests = rows.batch.num_requests
    if block_table.dtype != torch.int32 or block_table.device != caches.k.device:
        raise InvalidArgument(
            f"{OP}: block_table must be int32 on {caches.k.device}, got {block_table.dtype} on "
            f"{block_table.device}"
        )
    if block_table.dim() != 2 or block_table.shape[0] != num_requests:
        raise InvalidArgument(
            f"{OP}: block_table must be [{num_requests}, max_blocks], got shape "
            f"{tuple(block_table.shape)}"
        )


def _check_room(block_table: torch.Tensor, caches: Caches, rows: MaskRows) -> None:
    """Refuse a table that is too short or a request too long, before a device reads lengths.

    Not for a graph that is being captured: it may be replayed with shorter requests only.
    """
    if torch.compiler.is_compiling() or (
        block_table.is_cuda and torch.cuda.is_current_stream_capturing()
    ):
        return
    max_blocks, block_size = block_table.shape[1], caches.k.shape[1]
    kv_lens = rows.batch.kv_lens_list
    if (longest := max(kv_lens, default=0)) > max_blocks * block_size:
        raise InvalidArgument(
            f"{OP}: block_table must have blocks for {longest} keys of request "
            f"{kv_lens.index(longest)}, got {max_blocks} blocks of {block_size}"
        )
    if longest > MOST_KEYS:
        raise InvalidArgument(
            f"{OP}: rows must have requests of at most {MOST_KEYS} keys for engine triton, got "
            f"{longest} of request {kv_lens.index(longest)}"
        )


def _as_scale(scale: Any, dim: int) -> float:
    if scale is None:
        return float(dim**-0.5)
    return as_float32(OP, "scale", scale)
