"""One node's part of the KV store: DRAM, and SSD behind it."""

from collections.abc import Callable, Sequence

from .caches import BlockCache, Key, make_policy
from .events import Clock


class Disk:
    """Reads of one node's SSD, or of all SSDs of a group: in sequence, in the order of requests.

    Writes take no time: they can wait until there are no reads.

    Args:
        clock: the simulation's.
        bytes_per_s: of reading.
    """

    def __init__(self, clock: Clock, bytes_per_s: float):
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    def read_s(self, num_bytes: float) -> float:
        """Return how long a read requested now would take; zero bytes take no time."""
        if not num_bytes:
            return 0.0
        wait_s = max(self._free_at_s - self._clock.now, 0.0)
        return wait_s + num_bytes / self._bytes_per_s

    def read(self, num_bytes: float) -> float:
        """Read, and return how long it takes; a read completes even if no longer needed."""
        seconds = self.read_s(num_bytes)
        self._free_at_s = max(self._free_at_s, self._clock.now + seconds)
        return seconds

    def reset(self) -> None:
        """Cancel all reads: the node has failed."""
        self._free_at_s = 0.0


class NodeStore:
    """Blocks in DRAM; blocks evicted from it go to SSD, if there is one, and from there are lost.

    Args:
        dram_blocks: capacity; None for no limit.
        ssd_blocks: capacity; 0 for no SSD.
        policy: of either tier, by name.
        lost: called with the keys that are in neither tier any more.
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
        """Count the leading keys that are here, and how many of them only the SSD has."""
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
        """Put a prompt's blocks into DRAM, as the most recently used ones."""
        evicted = self.dram.insert(keys)
        if self.ssd.capacity_blocks:
            evicted = [key for key in self.ssd.insert(evicted) if key not in self.dram]
        if evicted and self._lost is not None:
            self._lost(evicted)

    def clear(self) -> None:
        """Lose everything, as a failed machine does, without a report."""
        self.dram.clear()
        self.ssd.clear()
