"""Policies by a value that ages: ``lfu`` by uses, ``length_aware`` by recomputation saved per byte.

An object of value v that was last used t uses of the pool ago is worth ``v * 2 ** (-t / h)``, where
h is ``half_life`` uses for each object that the pool has. The ratio of two such worths does not
change as long as neither object is used, so they are compared by ``recency + h * log2(v)``: recency
alone is LRU, and each doubling of the value stands for h uses. (LRFU, Lee et al., IEEE ToC 2001,
ages each use by itself; here all age from the last one, for which an entry needs one counter.)

The pool counts the uses, in its entries, so a process that evicts knows the uses of all processes.
They start from zero when an object is stored again.
"""

from dataclasses import dataclass

import numpy as np

from mooncake_kernels.pool import Evicted, ObjectPool, PoolObjects

from ..checks import check_positive
from .policy import evict_in_order


def aged(objects: PoolObjects, value: np.ndarray, half_life: float) -> np.ndarray:
    """Rank objects by an aging value, ``[n]`` and above 0: ``[n]`` float64."""
    return objects.recency + half_life * len(value) * np.log2(value)


@dataclass(frozen=True)
class Lfu:
    """Evict the least often used, where uses age (see the module).

    Attributes:
        half_life: in uses of the pool, for each object that it has. Near 0 it is LRU; if it were
            infinite, objects once popular would never be evicted.
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
    """Evict what saves the least recomputation per byte, by its position in the prompt.

    for each object: value = uses * cost(position) * reach(position) / num_bytes, which ages

    ``cost = 1 + position / attention`` is the cost of computing it: each token attends to all
    before it. ``reach = 1 / (1 + position / depth)`` is how likely a prompt with the same beginning
    gets this far; otherwise the object is useless: so the tail of a prompt is evicted before its
    head.

    Attributes:
        half_life: as in ``Lfu``.
        depth: the position, in objects, that half of the prompts with the same beginning reach.
        attention: the position, in objects, beyond which attention is more than half of the work:
            for a dense model about ``parameters / (2 * layers * hidden size)`` tokens. Infinite by
            default: counting it in keeps tails and lowers the hit rate.

    Sources: frequency * cost / size is GreedyDual-Size-Frequency (Cherkasova, HPL-98-69), Marconi
    (MLSys 2025) takes FLOPs saved for each byte as the cost; evicting late parts of a prompt first
    is Mooncake's LengthAwareCache (arXiv:2407.00079, table 1), which has no formula.
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
