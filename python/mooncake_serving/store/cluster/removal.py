"""How objects are removed from all pools, so that they do not come back."""

from collections.abc import Callable

import numpy as np

from mooncake_kernels.errors import TransferError, Unavailable

from ..directory import Holders
from ..node import Node

MAX_ROUNDS = 8  # against somebody who puts what is removed again and again


class Removal:
    """One removal of n objects.

    Holders drop them first, and only then does the directory: whatever fails in between, the
    directory says too much, which a holder sees by itself, and never too little, which would let an
    object that is said to be nowhere come back. Who copies one meanwhile drops it when the
    directory knows of no other any more; what had been published before is found here, by another
    round.

    Args:
        node: of the remover, whose pool is the first.
        keys: ``[n, 2]``.
        remove_from: removes ``[k, 2]`` objects from another pool, by its name: ``[k]`` bool, which
            were there.

    Attributes:
        removed: ``[n]`` bool, which were anywhere.
    """

    def __init__(
        self, node: Node, keys: np.ndarray, remove_from: Callable[[str, np.ndarray], np.ndarray]
    ):
        self._node = node
        self._keys = keys
        self._remove_from = remove_from
        self._unreached: dict[str, str] = {}  # pools, and why
        self._kept: list[tuple[str, np.ndarray]] = []  # what these were said to have
        self.removed = np.zeros(len(keys), bool)

    def run(self) -> None:
        """Do it.

        Raises:
            Unavailable: the directory, or a node that has some, does not answer.
        """
        left = np.arange(len(self._keys))
        self._remove_here(left)
        pools = self._node.listing.holders(self._keys)
        for _ in range(MAX_ROUNDS):
            self._remove_there(left, pools)
            told = self._node.listing.withdraw_all(self._keys[left])
            self._node.locations.forget(self._keys[left])
            again = [not self._is_done(*names) for names in zip(pools, told, strict=True)]
            left = left[again]
            if not len(left):
                break
            pools = [names for names, is_left in zip(told, again, strict=True) if is_left]
            self._remove_here(left)
        for pool, keys in self._kept:
            self._node.listing.publish_for(pool, keys)
        if self._unreached:
            reasons = "; ".join(self._unreached.values())
            raise Unavailable(f"remove: it is not removed everywhere: {reasons}")

    def _remove_here(self, indices: np.ndarray) -> None:
        if self._node.store is not None:
            for i in indices.tolist():
                first, second = self._keys[i].tolist()
                self.removed[i] |= self._node.store.remove_key((first, second))

    def _remove_there(self, indices: np.ndarray, pools: Holders) -> None:
        names = {name for names in pools for name in names} - {self._node.pool_name}
        for pool in sorted(names):
            held = indices[[pool in names for names in pools]]
            try:
                if pool not in self._unreached:
                    self.removed[held] |= self._remove_from(pool, self._keys[held])
            except (TransferError, Unavailable) as error:
                self._unreached[pool] = str(error)
            if pool in self._unreached:
                self._kept.append((pool, self._keys[held]))

    def _is_done(self, asked: tuple[str, ...], told: tuple[str, ...]) -> bool:
        """Whether an object is nowhere, by those who were said to have it before it was dropped
        there, and after: of two, one may have had a copy from the other meanwhile.
        """
        return len(told) <= 1 and set(told) <= set(asked)
