"""Stores of many hosts as one: a node takes part, and ``ClusterStore`` has the calls of a store."""

from .cluster_store import ClusterStore
from .destinations import BufferDestination, BytesDestination, Destination, Outcome
from .hot_keys import HotKeys
from .node import Node
from .put import ClusterPut

__all__ = [
    "BufferDestination",
    "BytesDestination",
    "ClusterPut",
    "ClusterStore",
    "Destination",
    "HotKeys",
    "Node",
    "Outcome",
]
