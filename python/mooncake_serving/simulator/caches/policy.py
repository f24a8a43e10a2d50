"""What an eviction policy is told and asked."""

from collections.abc import Hashable
from typing import Protocol

Key = Hashable


class Policy(Protocol):
    """The order in which blocks leave a cache; it knows every block that the cache holds."""

    def add(self, key: Key, position: int) -> None:
        """Take note of a new block, the ``position``-th of its prompt."""

    def use(self, key: Key, position: int) -> None:
        """Take note that a prompt has this block, which is held."""

    def evict(self) -> Key:
        """Choose a block, forget it and return it."""

    def discard(self, key: Key) -> None:
        """Forget a block that has gone for another reason."""
