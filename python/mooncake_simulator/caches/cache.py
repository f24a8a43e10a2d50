"""A cache of KV blocks of one tier: a capacity, a policy, and the longest cached prefix."""

from collections.abc import Sequence

from .policy import Key, Policy


class BlockCache:
    """A set of at most ``capacity_blocks`` blocks.

    Args:
        capacity_blocks: how many it holds; None for no limit.
        policy: what is evicted first.

    Example:
        >>> cache = BlockCache(2, Lru())
        >>> cache.insert(["a", "b"]), cache.match(["a", "b", "c"])
        ([], 2)
        >>> cache.insert(["a", "c"])
        ['b']
    """

    def __init__(self, capacity_blocks: int | None, policy: Policy):
        self.capacity_blocks = capacity_blocks
        self._policy = policy
        self._held: set[Key] = set()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: Key) -> bool:
        return key in self._held

    def match(self, keys: Sequence[Key]) -> int:
        """Count the leading keys that are held; does not count as a use."""
        held = self._held
        for index, key in enumerate(keys):
            if key not in held:
                return index
        return len(keys)

    def insert(self, keys: Sequence[Key]) -> list[Key]:
        """Use the keys that are held, store the others; return the evicted ones.

        for position, key in enumerate(keys): use it, or evict one if there is no room and add it

        A prompt longer than the cache evicts its own first blocks: a block evicted and stored again
        in the same call is not returned, a block stored and evicted in it is.
        """
        held, policy = self._held, self._policy
        limit = float("inf") if self.capacity_blocks is None else self.capacity_blocks
        if limit == 0:
            return list(keys)
        evicted: dict[Key, None] = {}
        for position, key in enumerate(keys):
            if key in held:
                policy.use(key, position)
                continue
            if len(held) >= limit:
                victim = policy.evict()
                held.discard(victim)
                evicted[victim] = None
            policy.add(key, position)
            held.add(key)
            evicted.pop(key, None)
        return list(evicted)

    def discard(self, key: Key) -> None:
        """Drop one block, if it is held."""
        if key in self._held:
            self._held.discard(key)
            self._policy.discard(key)

    def clear(self) -> list[Key]:
        """Drop everything, as a failed machine does; return what it was."""
        lost = list(self._held)
        for key in lost:
            self._policy.discard(key)
        self._held.clear()
        return lost

    def keys(self) -> list[Key]:
        """The keys that are held, in no particular order."""
        return list(self._held)
