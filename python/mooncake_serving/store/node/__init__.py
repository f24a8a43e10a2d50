"""A process that takes part in a store over several hosts: its requests and its answers."""

from .node import Node

__all__ = ["Node"]
