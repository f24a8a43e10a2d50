"""The calls of a store over all hosts whose nodes share a directory."""

from .cluster_store import ClusterStore
from .hot_keys import HotKeys

__all__ = ["ClusterStore", "HotKeys"]
