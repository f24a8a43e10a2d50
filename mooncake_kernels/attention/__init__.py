"""Attention over a paged KV cache: under masks, in parts, and writing keys and values to it."""

from .append import append_kv
from .merge import merge_attention
from .paged import paged_attention

__all__ = ["append_kv", "merge_attention", "paged_attention"]
