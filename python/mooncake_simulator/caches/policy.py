"""The interface of an eviction policy."""

from collections.abc import Hashable
from typing import Protocol

Key = Hashable


class Policy(Protocol):
    """The order in which blocks are evicted; it knows every block that the cache holds."""

    def add(self, key: Key, position: int) -> None:
        """Record a new block, the ``position``-th of its prompt."""

    def use(self, key: Key, position: int) -> None:
        """Record that a prompt has this block, which is held."""

    def evict(self) -> Key:
        """Choose a block, forget it and return it."""

    def discard(self, key: Key) -> None:
        """Forget a block that was removed for another reason."""
