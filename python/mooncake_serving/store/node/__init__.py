"""A process that takes part in a store over several hosts: what it answers, and what it asks."""

from .node import Node

__all__ = ["Node"]
