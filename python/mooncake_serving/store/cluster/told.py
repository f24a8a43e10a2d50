"""Which objects of a pool a directory was told of."""

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


class Told:
    """Objects that were published to a directory, and not withdrawn later. Thread-safe.

    Updates are only appended, and merged when ``all`` is called, so that puts do not wait for it.

    Args:
        objects: the initial ones.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._noted: list[Objects] = []
        self._lock = threading.Lock()

    def note(self, objects: Objects) -> None:
        """Record what was published under some keys."""
        if len(objects.keys):
            with self._lock:
                self._noted.append(objects)

    def all(self) -> Objects:
        """Return all; for one thread at a time."""
        with self._lock:
            noted, self._noted = self._noted, []
        if noted:
            keys = np.concatenate([objects.keys for objects in noted])
            ids = np.concatenate([objects.ids for objects in noted])
            _, ends = np.unique(fingerprints(keys)[::-1], return_index=True)
            last = len(keys) - 1 - ends  # the last update of a key counts
            last = last[ids[last] != 0]
            kept = self._objects.without(keys)
            self._objects = Objects(
                np.concatenate([kept.keys, keys[last]]), np.concatenate([kept.ids, ids[last]])
            )
        return self._objects
