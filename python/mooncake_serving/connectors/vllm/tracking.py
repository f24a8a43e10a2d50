"""Which blocks of which requests are loaded and saved at a step: the scheduler's part.

Plain data in, plain data out: nothing of vLLM is imported.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

KEY_BYTES = 8  # of a block's hash, which has 32


@dataclass(frozen=True)
class Blocks:
    """Consecutive blocks of a prompt.

    Attributes:
        keys: their names in the store.
        ids: where they are in the engine's cache.
        position: how many blocks of the prompt come before them.
    """

    keys: list[int]
    ids: list[int]
    position: int


@dataclass
class _Tracked:
    hashes: Sequence[bytes]  # of all full blocks of tokens so far: it grows
    ids: list[int] = field(default_factory=list)
    num_saved: int = 0  # blocks at the head that were put into the store, or came from it


def keys_of(hashes: Sequence[bytes]) -> list[int]:
    """Return the keys of blocks, from the hashes that vLLM chains along a prompt."""
    return [int.from_bytes(name[:KEY_BYTES], "little") for name in hashes]


class Tracker:
    """The requests that are being served.

    ::

        tracker.add("r", hashes)
        tracker.load("r", first=2, ids=[7, 8])  # of its blocks, the store has 2 and 3
        tracker.extend("r", [5, 6, 7, 8, 9])  # where its blocks are, in their order
        tracker.skip("r", 4)
        tracker.compute("r", 5)  # this step fills a fifth one
        loads, saves = tracker.take()

    Attributes:
        saves: whether blocks are saved at all.
    """

    def __init__(self, *, saves: bool):
        self.saves = saves
        self._requests: dict[str, _Tracked] = {}
        self._loads: list[Blocks] = []
        self._saves: list[Blocks] = []

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: str, hashes: Sequence[bytes]) -> None:
        """Track a request from its beginning, also one that was preempted and comes back."""
        self._requests[request] = _Tracked(hashes)

    def load(self, request: str, first: int, ids: Sequence[int]) -> None:
        """Have blocks loaded from the store before the next step computes."""
        hashes = self._requests[request].hashes[first : first + len(ids)]
        self._loads.append(Blocks(keys_of(hashes), list(ids), first))

    def extend(self, request: str, ids: Sequence[int]) -> None:
        """Record more of its blocks."""
        self._requests[request].ids += ids

    def forget_blocks(self, request: str) -> None:
        """Forget its blocks, which were given to others: it has only those that follow."""
        self._requests[request].ids.clear()

    def knows(self, request: str) -> bool:
        return request in self._requests

    def skip(self, request: str, num_blocks: int) -> None:
        """Skip blocks at its head that the store or this engine had: they are not computed here."""
        tracked = self._requests[request]
        tracked.num_saved = max(tracked.num_saved, num_blocks)

    def compute(self, request: str, num_blocks: int) -> None:
        """Record how many of its blocks this step makes full; the new ones are saved after it."""
        tracked = self._requests[request]
        first, end = tracked.num_saved, min(num_blocks, len(tracked.hashes), len(tracked.ids))
        if self.saves and first < end:
            keys = keys_of(tracked.hashes[first:end])
            self._saves.append(Blocks(keys, tracked.ids[first:end], first))
            tracked.num_saved = end

    def remove(self, request: str) -> None:
        """Forget a request that is over; unknown ones are ignored."""
        self._requests.pop(request, None)

    def forget_all(self) -> None:
        """Save nothing more of the current requests, only of those added from now on."""
        self._requests.clear()
        self._saves.clear()

    def take(self) -> tuple[list[Blocks], list[Blocks]]:
        """Return what is to be loaded before, and saved after the step, and clear both."""
        taken = self._loads, self._saves
        self._loads, self._saves = [], []
        return taken
