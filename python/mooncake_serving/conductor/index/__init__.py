"""Which instances hold which block: the prefix index, and the events that update it."""

from .events import KVEvent
from .interface import Index
from .prefix_index import PrefixIndex
from .sharded_index import ShardedIndex

__all__ = ["Index", "KVEvent", "PrefixIndex", "ShardedIndex"]
