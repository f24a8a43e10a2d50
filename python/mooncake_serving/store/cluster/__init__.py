"""Stores of many hosts as one: a node takes part, and ``ClusterStore`` has the calls of a store."""

from .cluster_store import ClusterStore
from .hot_keys import HotKeys
from .node import Node
from .put import ClusterPut

__all__ = ["ClusterPut", "ClusterStore", "HotKeys", "Node"]
