"""Which node to ask for an object, one after the other."""

import random
from collections.abc import Sequence

from ..directory import Member


class Candidates:
    """Members whose pools may have an object: those of one host first, the others in any order.

    Args:
        pools: for each pool that may have it, the members that serve it.
        host: whose pools are asked first.
    """

    def __init__(self, pools: Sequence[Sequence[Member]], host: str):
        self._by_pool = [list(served_by) for served_by in pools if served_by]
        for served_by in self._by_pool:
            if len(served_by) > 1:  # usually there is one, and this would be most of the work
                random.shuffle(served_by)
        if len(self._by_pool) > 1:
            random.shuffle(self._by_pool)
            self._by_pool.sort(key=lambda served_by: served_by[0].host != host)

    def best(self) -> Member | None:
        """The member to ask next; None: none is left."""
        return self._by_pool[0][0] if self._by_pool else None

    def drop_member(self) -> None:
        """Drop the best member, which cannot be asked; others may serve its pool."""
        del self._by_pool[0][0]
        if not self._by_pool[0]:
            del self._by_pool[0]

    def drop_pool(self) -> None:
        """Drop the pool of the best member, which has answered for it."""
        del self._by_pool[0]
