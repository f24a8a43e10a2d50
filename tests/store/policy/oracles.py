"""Policies by their definitions, one object at a time, and the best possible one."""

import math
from collections import OrderedDict
from dataclasses import dataclass
from functools import cache


class LruOracle(OrderedDict):
    """Keys, least recently used first."""

    def use(self, key: int) -> None:
        self.move_to_end(key)

    def evict(self) -> int:
        return self.popitem(last=False)[0]


@dataclass
class Known:
    value: float  # of one use
    uses: int
    last: int


class AgedOracle:
    """Objects worth ``uses * value``, of which half is left after ``half_life`` uses each."""

    def __init__(self, half_life: float):
        self.half_life = half_life
        self.known: dict[int, Known] = {}
        self.clock = 0

    def add(self, key: int, value: float = 1.0) -> None:
        self.clock += 1
        self.known[key] = Known(value, 1, self.clock)

    def use(self, key: int) -> None:
        self.clock += 1
        known = self.known[key]
        known.uses, known.last = known.uses + 1, self.clock

    def evict(self, victim: int) -> bool:
        """Take it out; return whether nothing else was worth less, except for rounding."""
        halving = self.half_life * len(self.known)
        worth = {
            key: math.log2(known.uses * known.value * 2 ** -((self.clock - known.last) / halving))
            for key, known in self.known.items()
        }
        del self.known[victim]
        return worth[victim] <= min(worth.values()) + 1e-9


def most_hits(accesses: list[int], capacity: int) -> int:
    """Try every choice of what to keep."""

    @cache
    def best(at: int, held: frozenset[int]) -> int:
        if at == len(accesses):
            return 0
        key = accesses[at]
        if key in held:
            return 1 + best(at + 1, held)
        choices = [held]
        if len(held) < capacity:
            choices.append(held | {key})
        choices += [held - {victim} | {key} for victim in held]
        return max(best(at + 1, choice) for choice in choices)

    return best(0, frozenset())
