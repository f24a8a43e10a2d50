"""xFormers' bias classes, for the masks that they can express."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .._arguments import as_instance, as_integer
from ..errors import InvalidArgument, Unavailable

if TYPE_CHECKING:
    from .mask_rows import MaskRows

MODULES = ("mslk.attention.fmha.attn_bias", "xformers.ops.fmha.attn_bias")  # the same classes
FULL, CAUSAL, WINDOW = "full", "causal", "window"
PACKED_KEYS = {
    FULL: "BlockDiagonalMask",
    CAUSAL: "BlockDiagonalCausalFromBottomRightMask",
    WINDOW: "BlockDiagonalCausalLocalAttentionFromBottomRightMask",
}
PADDED_KEYS = {
    FULL: "BlockDiagonalPaddedKeysMask",
    CAUSAL: "BlockDiagonalCausalWithOffsetPaddedKeysMask",
    WINDOW: "BlockDiagonalCausalLocalAttentionPaddedKeysMask",
}
PAGED_KEYS = {
    FULL: "PagedBlockDiagonalPaddedKeysMask",
    CAUSAL: "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask",
}


@dataclass(frozen=True)
class XformersBias:
    """The name of an ``attn_bias`` class, and the arguments that make it this mask.

    Attributes:
        class_name: the class.
        arguments: by name: ``q_seqlen`` and ``kv_seqlen``; where the class has them,
            ``kv_padding``, ``window_size``, ``block_tables``, ``page_size``.
    """

    class_name: str
    arguments: dict[str, Any]

    def build(self) -> Any:
        """Make the object, of mslk's class or xFormers'.

        Raises:
            Unavailable: neither can be imported; with the import error's text.
        """
        module = _import_attn_bias(self.class_name)
        if self.class_name == PACKED_KEYS[WINDOW]:  # has no constructor of its own
            lengths = {name: self.arguments[name] for name in ("q_seqlen", "kv_seqlen")}
            full = module.BlockDiagonalMask.from_seqlens(**lengths)
            return full.make_local_attention_from_bottomright(
                window_size=self.arguments["window_size"]
            )
        of_class = getattr(module, self.class_name)
        has_window = "window_size" in self.arguments
        make = of_class.from_seqlens_local if has_window else of_class.from_seqlens
        return make(**self.arguments)


def to_xformers(
    rows: MaskRows,
    *,
    kv_padding: int | None = None,
    block_tables: torch.Tensor | None = None,
    page_size: int | None = None,
) -> XformersBias:
    """Return the bias that equals this mask, for ``memory_efficient_attention``.

    There are classes for batches in which query ``i`` of every request sees, with
    ``last = kv_len - q_len + i``: all keys; or keys 0 to ``last`` (chunked prefill, decodes); or
    the ``window`` keys up to ``last``. Queries are consecutive. Keys are, too, or each request's
    have ``kv_padding`` slots, or they are in pages (without a window). Verified against xFormers
    0.0.35, ``xformers/ops/fmha/attn_bias.py``; later ones take the classes from mslk.

    Args:
        rows: the mask.
        kv_padding: slots of each request's keys, of which the first ``kv_len`` are used.
        block_tables: int32 ``[num_requests, max_pages]``: where a request's pages are.
        page_size: tokens per page.

    Raises:
        InvalidArgument: no class expresses this mask: a row that none allows is named.

    On CUDA this waits for the rows.
    """
    batch = rows.batch
    arguments: dict[str, Any] = {
        "q_seqlen": batch.q_lens_list,
        "kv_seqlen": batch.kv_lens_list,
    }
    names = PACKED_KEYS
    if kv_padding is not None:
        longest, names = max(arguments["kv_seqlen"], default=0), PADDED_KEYS
        arguments["kv_padding"] = as_integer(
            "to_xformers", "kv_padding", kv_padding, longest, 2**31
        )
    if block_tables is not None or page_size is not None:
        if block_tables is None or page_size is None or kv_padding is not None:
            raise InvalidArgument(
                "to_xformers: block_tables must come with page_size and without kv_padding, got "
                f"block_tables={block_tables}, page_size={page_size}, kv_padding={kv_padding}"
            )
        names = PAGED_KEYS
        arguments |= _as_pages(block_tables, page_size, batch.kv_lens_list)
    kind, window = _kind(rows, tuple(names))
    if kind == WINDOW:
        arguments["window_size"] = window
    return XformersBias(names[kind], arguments)


def _as_pages(block_tables: torch.Tensor, page_size: int, kv_lens: Sequence[int]) -> dict[str, Any]:
    as_instance("to_xformers", "block_tables", block_tables, torch.Tensor, "a tensor")
    page_size = as_integer("to_xformers", "page_size", page_size, 1, 2**31)
    shape = (len(kv_lens), -(-max(kv_lens, default=0) // page_size))
    is_table = block_tables.dim() == 2 and block_tables.dtype == torch.int32
    if not is_table or block_tables.shape[0] != shape[0] or block_tables.shape[1] < shape[1]:
        raise InvalidArgument(
            f"to_xformers: block_tables must be int32 {list(shape)} or wider, got "
            f"{block_tables.dtype} of shape {tuple(block_tables.shape)}"
        )
    return {"block_tables": block_tables, "page_size": page_size}


def _kind(rows: MaskRows, allowed: tuple[str, ...]) -> tuple[str, int]:
    """Return the kind of all rows, and the window, if they have one."""
    batch = rows.batch
    request = batch.request_of()
    shift = (batch.kv_lens - batch.q_lens - batch.cu_q[:-1])[request]
    end = shift + torch.arange(1, batch.num_q + 1, device=batch.device)  # the key after the last
    lo, hi, _, second = rows.intervals[: batch.num_q].unbind(1)
    is_one = (rows.tail_bits[: batch.num_q] == 0) & (second == 0)
    cut = (lo > 0).nonzero()
    window = int(end[cut[0, 0]] - lo[cut[0, 0]]) if cut.numel() else 0
    is_kind = {
        CAUSAL: is_one & (lo == 0) & (hi == end),
        FULL: is_one & (lo == 0) & (hi == batch.kv_lens[request]),
        WINDOW: is_one & (lo == (end - window).clamp(min=0)) & (hi == end) & (window > 0),
    }
    first_bad = {}
    for kind in (kind for kind in is_kind if kind in allowed):
        bad = (~is_kind[kind]).nonzero()
        if not bad.numel():
            return kind, window
        first_bad[kind] = int(bad[0])
    row = max(first_bad.values())
    raise InvalidArgument(
        f"to_xformers: rows must all be one of {allowed} ({CAUSAL} and {WINDOW} to the key "
        f"kv_len - q_len + i), got row {row}, of request {int(request[row])}, with intervals "
        f"{rows.intervals[row].tolist()} and tail bits {int(rows.tail_bits[row]):#x}"
    )


def _import_attn_bias(class_name: str) -> Any:
    reasons = []
    for name in MODULES:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            reasons.append(str(error))
    raise Unavailable(f"to_xformers: {class_name} needs mslk or xFormers: {'; '.join(reasons)}")
