"""Policies by a value that ages: ``lfu`` by uses, ``length_aware`` by what a byte saves.

An object of value v that was last used t uses of the pool ago is worth ``v * 2 ** (-t / h)``, where
h is ``half_life`` uses for each object that the pool has. By how much two of them differ does not
change as long as neither is used, so that they are compared by ``recency + h * log2(v)``: recency
alone is LRU, and each doubling of the value stands for h uses. (LRFU, Lee et al., IEEE ToC 2001,
ages each use by itself; here all age from the last one, for which an entry needs one counter.)

The uses are counted by the pool, in its entries: whoever evicts knows those of all processes. They
begin anew when an object is stored again.
"""

from dataclasses import dataclass

import numpy as np

from mooncake_kernels.pool import Evicted, ObjectPool, PoolObjects

from ..checks import check_positive
from .policy import evict_in_order


def aged(objects: PoolObjects, value: np.ndarray, half_life: float) -> np.ndarray:
    """Rank objects by a value, ``[n]`` and above 0, that ages: ``[n]`` float64."""
    return objects.recency + half_life * len(value) * np.log2(value)


@dataclass(frozen=True)
class Lfu:
    """Evict what was used least often, where uses age (see the module).

    Attributes:
        half_life: in uses of the pool, for each object that it has. Near 0 it is LRU; if it were
            infinite, what was popular once would never go.
    """

    half_life: float = 1.0

    def __post_init__(self) -> None:
        check_positive("Lfu", "half_life", self.half_life)

    def __call__(self, pool: ObjectPool, num_bytes: int) -> Evicted:
        objects = pool.objects()
        rank = aged(objects, objects.uses.astype(np.float64), self.half_life)
        return evict_in_order(pool, objects, rank, num_bytes)


@dataclass(frozen=True)
class LengthAware:
    """Evict what saves least recomputing for each of its bytes, by its place in the prompt.

    for each object: value = uses * cost(position) * reach(position) / num_bytes, which ages

    ``cost = 1 + position / attention`` is what it takes to compute it: each token attends to all
    before it. ``reach = 1 / (1 + position / depth)`` is how likely a prompt that begins like this
    one comes so far, without which it is of no use: so the tail of a prompt goes before its head.

    Attributes:
        half_life: as in ``Lfu``.
        depth: the position that half of the prompts which begin alike reach, in objects.
        attention: the position from which on attention is more than half of the work, in objects:
            for a dense model about ``parameters / (2 * layers * hidden size)`` tokens. Infinite by
            default: counting it in keeps tails and lowers the hit rate.

    Sources: frequency * cost / size is GreedyDual-Size-Frequency (Cherkasova, HPL-98-69), Marconi
    (MLSys 2025) takes FLOPs saved for each byte as the cost; that what is late in a prompt goes
    first is Mooncake's LengthAwareCache (arXiv:2407.00079, table 1), which has no formula.
    """

    half_life: float = 1.0
    depth: float = 256.0
    attention: float = np.inf

    def __post_init__(self) -> None:
        check_positive("LengthAware", "half_life", self.half_life)
        check_positive("LengthAware", "depth", self.depth, may_be_infinite=True)
        check_positive("LengthAware", "attention", self.attention, may_be_infinite=True)

    def __call__(self, pool: ObjectPool, num_bytes: int) -> Evicted:
        objects = pool.objects()
        position = objects.position.astype(np.float64)
        cost, reach = 1 + position / self.attention, 1 / (1 + position / self.depth)
        value = objects.uses * cost * reach / np.maximum(objects.num_bytes, 1)
        return evict_in_order(pool, objects, aged(objects, value, self.half_life), num_bytes)


lfu = Lfu()
length_aware = LengthAware()
