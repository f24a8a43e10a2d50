"""Masks: the attention rule of a mixed batch as a few integers per query."""

from .batch import ChunkBatch
from .block_map import BlockMap
from .build import rows
from .builder import MaskBuilder
from .from_dense import rows_from_dense
from .from_flashmask import rows_from_flashmask
from .from_flex import rows_from_flex
from .from_packed import rows_from_packed
from .mask_rows import MaskRows
from .packed import PackedMask, packed
from .rule import Rule
from .rules import (
    causal,
    chunked_local,
    documents,
    full,
    items,
    per_request,
    prefix_lm,
    sink,
    sliding_window,
    spans,
    tree,
)
from .to_flash_attn4 import FlashAttn4Blocks
from .to_flashinfer import FlashInferBlocks
from .to_flashmask import FlashMaskColumns
from .to_sdpa import SdpaMask
from .to_xformers import XformersBias

__all__ = [
    "BlockMap",
    "ChunkBatch",
    "FlashAttn4Blocks",
    "FlashInferBlocks",
    "FlashMaskColumns",
    "MaskBuilder",
    "MaskRows",
    "PackedMask",
    "Rule",
    "SdpaMask",
    "XformersBias",
    "causal",
    "chunked_local",
    "documents",
    "full",
    "items",
    "packed",
    "per_request",
    "prefix_lm",
    "rows",
    "rows_from_dense",
    "rows_from_flashmask",
    "rows_from_flex",
    "rows_from_packed",
    "sink",
    "sliding_window",
    "spans",
    "tree",
]
