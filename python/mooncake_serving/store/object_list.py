"""The objects of a pool as an ordered list, page by page."""

from dataclasses import dataclass

import numpy as np

from mooncake_kernels.pool import Key, ObjectPool, Retention

from .checks import RETENTIONS
from .keyspace import NUM_DIGITS, parse_digits


@dataclass(frozen=True)
class ListedObject:
    """An object as it was at the time of the listing.

    Attributes:
        key: of the pool.
        num_bytes: its size.
        retention: how long it stays.
        recency: the pool's clock when it was last used.
    """

    key: Key
    num_bytes: int
    retention: Retention
    recency: int


@dataclass(frozen=True)
class Page:
    """A part of a list: its objects, and the number of all objects from its first one on."""

    objects: list[ListedObject]
    num_left: int


def list_objects(
    pool: ObjectPool, *, prefix: str = "", after: Key | None = None, limit: int | None = None
) -> Page:
    """List objects by key. It looks at every object of the pool, and does not count as a use.

    Args:
        pool: whose objects.
        prefix: hexadecimal digits with which their keys begin.
        after: only keys after this one: the last key of the previous page.
        limit: how many at most; None: all.

    Raises:
        InvalidArgument: the prefix is not hexadecimal digits.
    """
    digits = parse_digits("list_objects", "prefix", prefix)
    first, last = digits.ljust(NUM_DIGITS, "0"), digits.ljust(NUM_DIGITS, "f")
    found = pool.objects()
    chosen = _at_least(found.keys, _words(first)) & ~_above(found.keys, _words(last))
    if after is not None:
        chosen &= _above(found.keys, after)
    indices = np.flatnonzero(chosen)
    order = np.lexsort([found.keys[indices, 1], found.keys[indices, 0]])
    shown = indices[order[:limit]]
    rows = zip(
        found.keys[shown].tolist(),
        found.num_bytes[shown].tolist(),
        found.retention[shown].tolist(),
        found.recency[shown].tolist(),
        strict=True,
    )
    objects = [
        ListedObject((key[0], key[1]), num_bytes, RETENTIONS[retention], recency)
        for key, num_bytes, retention, recency in rows
    ]
    return Page(objects, len(indices))


def find_object(pool: ObjectPool, key: Key) -> ListedObject | None:
    """Look up one object without using it; None if there is none."""
    if not pool.contains(key):
        return None
    digits = f"{key[0]:016x}{key[1]:016x}"
    return next(iter(list_objects(pool, prefix=digits).objects), None)


def _words(digits: str) -> Key:
    return int(digits[:16], 16), int(digits[16:], 16)


def _above(keys: np.ndarray, bound: Key) -> np.ndarray:
    high, low = np.uint64(bound[0]), np.uint64(bound[1])
    return (keys[:, 0] > high) | ((keys[:, 0] == high) & (keys[:, 1] > low))


def _at_least(keys: np.ndarray, bound: Key) -> np.ndarray:
    return _above(keys, bound) | (keys == np.array([bound], np.uint64)).all(axis=1)
