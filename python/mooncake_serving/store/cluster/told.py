"""Which objects of a pool were published to a directory."""

import threading
from typing import NamedTuple

import numpy as np

from ..keyspace import are_in, fingerprints


class Objects(NamedTuple):
    """Objects of a pool.

    Attributes:
        keys: ``[n, 2]``.
        ids: ``[n]``, see ``Store.ids_of``; 0: the object does not exist any more.
    """

    keys: np.ndarray
    ids: np.ndarray

    def at(self, chosen: np.ndarray) -> "Objects":
        """Those that ``[n]`` bool selects, or indices."""
        return Objects(self.keys[chosen], self.ids[chosen])

    def without(self, keys: np.ndarray) -> "Objects":
        """Those with other keys."""
        return self.at(~are_in(self.keys, keys)) if len(keys) else self


class PublishedSet:
    """Objects that were published to a directory, and not withdrawn later. Thread-safe.

    Updates are only appended, and merged when ``all`` is called, so that puts do not wait for it.

    Args:
        objects: the initial ones.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._recorded: list[Objects] = []
        self._lock = threading.Lock()

    def record(self, objects: Objects) -> None:
        """Record what was published under some keys."""
        if len(objects.keys):
            with self._lock:
                self._recorded.append(objects)

    def all(self) -> Objects:
        """Return all; for one thread at a time."""
        with self._lock:
            recorded, self._recorded = self._recorded, []
        if recorded:
            keys = np.concatenate([objects.keys for objects in recorded])
            ids = np.concatenate([objects.ids for objects in recorded])
            _, ends = np.unique(fingerprints(keys)[::-1], return_index=True)
            last = len(keys) - 1 - ends  # the last update of a key counts
            last = last[ids[last] != 0]
            others = self._objects.without(keys)
            self._objects = Objects(
                np.concatenate([others.keys, keys[last]]), np.concatenate([others.ids, ids[last]])
            )
        return self._objects
