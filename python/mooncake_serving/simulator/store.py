"""The part of the KV store that one node has: DRAM, and SSD behind it."""

from collections.abc import Callable, Sequence

from .caches import BlockCache, Key, make_policy


class NodeStore:
    """Blocks in DRAM; what leaves it goes to SSD, if there is one, and what leaves that is lost.

    Args:
        dram_blocks: capacity; None for no limit.
        ssd_blocks: capacity; 0 for no SSD.
        policy: of either tier, by name.
        lost: is called with the keys that are in neither tier any more.
    """

    def __init__(
        self,
        dram_blocks: int | None,
        *,
        ssd_blocks: int = 0,
        policy: str = "lru",
        lost: Callable[[list[Key]], None] | None = None,
    ):
        self.dram = BlockCache(dram_blocks, make_policy(policy))
        self.ssd = BlockCache(ssd_blocks, make_policy(policy))
        self._lost = lost

    def __contains__(self, key: Key) -> bool:
        return key in self.dram or key in self.ssd

    def match(self, keys: Sequence[Key]) -> tuple[int, int]:
        """Count the leading keys that are here, and of them those that only the SSD has."""
        if not self.ssd.capacity_blocks:
            return self.dram.match(keys), 0
        on_ssd = 0
        for index, key in enumerate(keys):
            if key not in self.dram:
                if key not in self.ssd:
                    return index, on_ssd
                on_ssd += 1
        return len(keys), on_ssd

    def insert(self, keys: Sequence[Key]) -> None:
        """Have a prompt's blocks in DRAM, as the ones used last."""
        evicted = self.dram.insert(keys)
        if self.ssd.capacity_blocks:
            evicted = [key for key in self.ssd.insert(evicted) if key not in self.dram]
        if evicted and self._lost is not None:
            self._lost(evicted)

    def clear(self) -> None:
        """Lose everything, as a machine that fails; nothing is told of it."""
        self.dram.clear()
        self.ssd.clear()
