"""Whom to ask for an object, one after the other."""

import random
from collections.abc import Sequence

from ..directory import Member


class Candidates:
    """Members whose pools may have an object: those of one host first, the others in any order.

    Args:
        pools: who serves the pools that may have it, a list for each of them.
        host: whose pools are asked first.
    """

    def __init__(self, pools: Sequence[Sequence[Member]], host: str):
        self._by_pool = [list(served_by) for served_by in pools if served_by]
        for served_by in self._by_pool:
            if len(served_by) > 1:  # most often there is one, of which this is the most work
                random.shuffle(served_by)
        if len(self._by_pool) > 1:
            random.shuffle(self._by_pool)
            self._by_pool.sort(key=lambda served_by: served_by[0].host != host)

    def best(self) -> Member | None:
        """Who is asked next; None: there is nobody left."""
        return self._by_pool[0][0] if self._by_pool else None

    def drop_member(self) -> None:
        """The best one cannot be asked; others may serve its pool."""
        del self._by_pool[0][0]
        if not self._by_pool[0]:
            del self._by_pool[0]

    def drop_pool(self) -> None:
        """The best one has told what holds for its pool."""
        del self._by_pool[0]
