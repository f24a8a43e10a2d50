"""Eviction policies, and the part shared by those that look at every object of a pool.

``lfu`` ranks by uses, ``length_aware`` by recomputation saved per byte: by a value that ages. An
object of value v that was last used t uses of the pool ago is worth ``v * 2 ** (-t / h)``, where h
is ``half_life`` uses for each object that the pool has. The ratio of two such worths does not
change as long as neither object is used, so they are compared by ``recency + h * log2(v)``: recency
alone is LRU, and each doubling of the value stands for h uses. (LRFU, Lee et al., IEEE ToC 2001,
ages each use by itself; here all age from the last one, for which an entry needs one counter.)

The pool counts the uses, in its entries, so a process that evicts knows the uses of all processes.
They start from zero when an object is stored again.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import Evicted, ObjectPool, PoolObjects

from ..checks import check_positive

EvictionPolicy = Callable[[ObjectPool, int], Evicted]

HARD = 2  # of PoolObjects.retention
NEVER = np.iinfo(np.int64).max


def pool_bytes(pool: ObjectPool, num_bytes: np.ndarray) -> np.ndarray:
    """Space in the pool of objects of these sizes, ``[n]`` int64."""
    units = -(-np.maximum(num_bytes, 1).astype(np.int64) // pool.alignment)
    return units * pool.alignment


def check_eviction(policy: EvictionPolicy) -> None:
    """Refuse a value that is not a policy."""
    if not callable(policy):
        raise InvalidArgument(f"Store: eviction must be a function, as lru is, got {policy!r}")


def evict_in_order(
    pool: ObjectPool, objects: PoolObjects, rank: np.ndarray, num_bytes: int, num_objects: int = 0
) -> Evicted:
    """Evict objects by rank until there is enough; "soft" ones after all others.

    Args:
        pool: where they are.
        objects: ``pool.objects()``, or some of them.
        rank: ``[n]``, the lowest is evicted first; among equals the least recently used.
        num_bytes: minimum number of bytes to evict.
        num_objects: minimum number of objects to evict.

    Returns:
        What was evicted: less than wanted if there was no more. Objects that are being read and
        "hard" ones stay.
    """
    order = np.lexsort([objects.recency, rank, objects.retention])
    order = order[objects.retention[order] < HARD]
    ends = np.cumsum(pool_bytes(pool, objects.num_bytes[order]))
    removed, freed, begin = [np.empty((0, 2), np.uint64)], 0, 0
    while begin < len(order) and (freed < num_bytes or sum(map(len, removed)) < num_objects):
        before = ends[begin - 1] if begin else 0
        end = int(np.searchsorted(ends, before + num_bytes - freed)) + 1
        end = max(end, begin + num_objects - sum(map(len, removed)))
        evicted = pool.evict_keys(objects.keys[order[begin:end]])
        removed.append(evicted.keys)
        freed += evicted.num_bytes
        begin = end
    if freed < num_bytes:
        pool.reap()  # what dead processes were reading can be evicted next time
    return Evicted(np.concatenate(removed), freed)


def lru(pool: ObjectPool, num_bytes: int) -> Evicted:
    """Evict the least recently used, as the paper does (FAST'25, section 3.2)."""
    return pool.evict(num_bytes, "lru")


def sieve(pool: ObjectPool, num_bytes: int) -> Evicted:
    """Evict what was not used since the hand last passed it (Zhang et al., NSDI 2024)."""
    return pool.evict(num_bytes, "sieve")


def largest_first(pool: ObjectPool, num_bytes: int) -> Evicted:
    """Evict the largest objects, among equally large ones the least recently used; "soft" last."""
    objects = pool.objects()
    return evict_in_order(pool, objects, -objects.num_bytes.astype(np.int64), num_bytes)


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


def belady(keys: Sequence[int] | np.ndarray, capacity: int) -> np.ndarray:
    """Return which accesses hit under optimal eviction, where all objects have one size.

    An object that is needed again later than all those present is not stored at all. For
    measurements only: it needs to know the future.

    Args:
        keys: ``[n]`` integers, in the order of access; one that is not found is stored.
        capacity: how many objects there can be.

    Returns:
        ``[n]`` bool.

    Raises:
        InvalidArgument: capacity is negative.

    Source: Belady, A study of replacement algorithms (IBM Systems Journal, 1966).
    """
    if capacity < 0:
        raise InvalidArgument(f"belady: capacity must be at least 0, got {capacity!r}")
    accesses = np.asarray(keys).tolist()
    coming = next_uses(accesses)
    found = np.zeros(len(accesses), bool)
    held: dict[int, int] = {}  # the next use of each
    latest: list[tuple[int, int]] = []  # a heap of (-next use, key), some of them outdated
    for i, key in enumerate(accesses):
        found[i] = held.pop(key, None) is not None
        if coming[i] == NEVER:
            continue
        held[key] = coming[i]
        heapq.heappush(latest, (-coming[i], key))
        if len(held) > capacity:
            while held.get(latest[0][1]) != -latest[0][0]:
                heapq.heappop(latest)
            del held[heapq.heappop(latest)[1]]
    return found


def next_uses(accesses: list[int]) -> list[int]:
    """Time of the next access to each; ``NEVER`` if there is none."""
    coming: list[int] = []
    seen: dict[int, int] = {}
    for i in range(len(accesses) - 1, -1, -1):
        coming.append(seen.get(accesses[i], NEVER))
        seen[accesses[i]] = i
    return coming[::-1]
