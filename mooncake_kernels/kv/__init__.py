"""Paged KV movement: blocks of one cache into blocks of another, whatever the two layouts.

The axes of a cache are named, never guessed from shapes: two layouts can have the same shape and
mean different things. A ``CopyPlan`` is made once for a pair of caches and run many times; a run
costs host work in the number of blocks, not in blocks x layers x heads.

On the CPU copies run on torch's threads, which do not survive a ``fork()``: as after any parallel
torch call, a child that is forked later must not copy. Autograd does not see a copy.
"""

from ..transforms import Fp8, Rope
from .batch import copy_batch
from .blocks import checksum_blocks, gather_blocks, scatter_blocks
from .copy_plan import CopyPlan
from .layer_stream import LayerStream
from .pack_header import PackHeader
from .packing import Packer
from .select import shard_heads
from .view import KVView

__all__ = [
    "CopyPlan",
    "Fp8",
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
]
