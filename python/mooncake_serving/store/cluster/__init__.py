"""Stores of many hosts as one: a node takes part, and ``ClusterStore`` has the calls of a store."""

from .cluster_store import ClusterStore
from .destinations import Destination, Outcome
from .hot_keys import HotKeys
from .node import Node
from .put import ClusterPut
from .reads import BufferDestination, BytesDestination

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
