"""Eviction by age: LRU, FIFO, and SIEVE, which is FIFO with a second chance."""

from collections import OrderedDict

from .policy import Key


class Lru:
    """Evict the least recently used."""

    def __init__(self) -> None:
        self._keys: OrderedDict[Key, None] = OrderedDict()

    def add(self, key: Key, position: int) -> None:
        self._keys[key] = None

    def use(self, key: Key, position: int) -> None:
        self._keys.move_to_end(key)

    def evict(self) -> Key:
        return self._keys.popitem(last=False)[0]

    def discard(self, key: Key) -> None:
        del self._keys[key]


class Fifo(Lru):
    """Evict what was stored first."""

    def use(self, key: Key, position: int) -> None:
        """Do nothing: uses do not count."""


class _Node:
    __slots__ = ("key", "newer", "older", "visited")

    def __init__(self, key: Key):
        self.key = key
        self.visited = False
        self.newer: _Node | None = None
        self.older: _Node | None = None


class Sieve:
    """Move a hand from the oldest to the newest; evict the first that was not used since.

    for key at the hand, towards newer ones: visited -> clear it, else evict it and stay there

    Source: Zhang et al., SIEVE is Simpler than LRU (NSDI'24), section 3.
    """

    def __init__(self) -> None:
        self._nodes: dict[Key, _Node] = {}
        self._newest: _Node | None = None
        self._oldest: _Node | None = None
        self._hand: _Node | None = None

    def add(self, key: Key, position: int) -> None:
        node = self._nodes[key] = _Node(key)
        node.older = self._newest
        if self._newest is not None:
            self._newest.newer = node
        self._newest = node
        if self._oldest is None:
            self._oldest = node

    def use(self, key: Key, position: int) -> None:
        self._nodes[key].visited = True

    def evict(self) -> Key:
        node = self._hand or self._oldest
        assert node is not None, "evict: the cache must hold a block"
        while node.visited:
            node.visited = False
            node = node.newer or self._oldest
            assert node is not None
        self.discard(node.key)
        self._hand = node.newer  # None: restart at the oldest
        return node.key

    def discard(self, key: Key) -> None:
        node = self._nodes.pop(key)
        if self._hand is node:
            self._hand = node.newer
        if node.older is not None:
            node.older.newer = node.newer
        else:
            self._oldest = node.newer
        if node.newer is not None:
            node.newer.older = node.older
        else:
            self._newest = node.older
