"""Eviction by a rank: LFU, length-aware LFU, and Belady's optimum, which knows the future."""

import heapq
from collections.abc import Sequence
from itertools import count
from typing import Any

from .policy import Key


class _Ranked:
    """Evict the block of the lowest rank. A heap with stale entries, dropped as they come up."""

    def __init__(self) -> None:
        self._ranks: dict[Key, tuple[Any, int]] = {}
        self._heap: list[tuple[tuple[Any, int], Key]] = []
        self._age = count()  # ties: the block whose rank was set first

    def _set(self, key: Key, rank: Any) -> None:
        entry = self._ranks[key] = (rank, next(self._age))
        heapq.heappush(self._heap, (entry, key))
        if len(self._heap) > 64 and len(self._heap) > 4 * len(self._ranks):
            self._heap = [(rank, key) for key, rank in self._ranks.items()]
            heapq.heapify(self._heap)

    def evict(self) -> Key:
        while True:
            entry, key = heapq.heappop(self._heap)
            if self._ranks.get(key) == entry:
                del self._ranks[key]
                return key

    def discard(self, key: Key) -> None:
        del self._ranks[key]


class Lfu(_Ranked):
    """Evict what was used least often since it was stored; among equals the least recently used."""

    def add(self, key: Key, position: int) -> None:
        self._set(key, 1)

    def use(self, key: Key, position: int) -> None:
        self._set(key, self._ranks[key][0] + 1)


class LengthAware(_Ranked):
    """LFU that, among blocks used equally often, evicts the one latest in its prompt.

    Source: Mooncake (arXiv:2407.00079), section 4, Table 1. The paper gives the preference, not a
    formula: count first, then position, is our interpretation.
    """

    def add(self, key: Key, position: int) -> None:
        self._set(key, (1, -position))

    def use(self, key: Key, position: int) -> None:
        self._set(key, (self._ranks[key][0][0] + 1, -position))


class Belady(_Ranked):
    """Evict what is needed again latest; in a prompt the last block, as it needs the ones before.

    Args:
        prompts: the keys of every prompt of the replay, in its order.

    ``begin()`` must be called before each prompt of the replay. Not an exact optimum: a block also
    needs those before it, which the rule only takes into account among blocks of one prompt.
    """

    def __init__(self, prompts: Sequence[Sequence[Key]]):
        super().__init__()
        self._next: list[list[float]] = []
        upcoming: dict[Key, int] = {}
        for index in range(len(prompts) - 1, -1, -1):
            self._next.append([upcoming.get(key, float("inf")) for key in prompts[index]])
            upcoming.update(dict.fromkeys(prompts[index], index))
        self._next.reverse()
        self._prompt = -1

    def begin(self) -> None:
        """Advance to the next prompt of the replay."""
        self._prompt += 1

    def add(self, key: Key, position: int) -> None:
        self._set(key, (-self._next[self._prompt][position], -position))

    use = add
