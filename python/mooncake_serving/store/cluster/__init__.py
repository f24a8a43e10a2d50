"""The calls of a store, over all hosts whose nodes share a directory."""

from .cluster_put import ClusterPut
from .cluster_store import ClusterStore
from .hot_keys import HotKeys

__all__ = ["ClusterPut", "ClusterStore", "HotKeys"]
