"""Paged KV movement: copy blocks of one cache into blocks of another, for any two layouts.

The axes of a cache are named, never guessed from shapes: two layouts can have the same shape and
different meanings. Make a ``CopyPlan`` once for a pair of caches and run it many times; a run costs
host work proportional to the number of blocks, not to blocks x layers x heads.

On the CPU, copies run on torch's threads, which do not survive a ``fork()``: as after any parallel
torch call, a child forked later must not copy. Autograd does not track copies.
"""

from ..transforms import Fp8, Rope
from .batch import copy_batch
from .blocks import checksum_blocks, gather_blocks, scatter_blocks
from .copy_plan import CopyPlan
from .groups import CacheGroup, CacheGroups
from .groups_copy import GroupsHeader, GroupsPacker, GroupsPlan
from .layer_stream import LayerStream
from .layout import shard_heads
from .pack_header import PackHeader
from .packing import Packer
from .token_shard import shard_tokens
from .view import KVView

__all__ = [
    "CacheGroup",
    "CacheGroups",
    "CopyPlan",
    "Fp8",
    "GroupsHeader",
    "GroupsPacker",
    "GroupsPlan",
    "KVView",
    "LayerStream",
    "PackHeader",
    "Packer",
    "Rope",
    "checksum_blocks",
    "copy_batch",
    "gather_blocks",
    "scatter_blocks",
    "shard_heads",
    "shard_tokens",
]
