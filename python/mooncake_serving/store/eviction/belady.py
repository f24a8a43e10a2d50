"""The upper bound of all policies: evict what is needed again latest, by looking ahead."""

import heapq
from collections.abc import Sequence

import numpy as np

from mooncake_kernels.errors import InvalidArgument

NEVER = np.iinfo(np.int64).max


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
