"""Who holds which block: the prefix index over all instances, and the events that keep it."""

from .events import KVEvent
from .interface import Index
from .prefix_index import PrefixIndex
from .sharded_index import ShardedIndex

__all__ = ["Index", "KVEvent", "PrefixIndex", "ShardedIndex"]
