"""What a directory was told that a pool has."""

import threading
from typing import NamedTuple

import numpy as np

from ..keyspace import are_in, fingerprints


class Objects(NamedTuple):
    """Objects of a pool.

    Attributes:
        keys: ``[n, 2]``.
        ids: ``[n]``, see ``Store.ids_of``; 0: there is none any more.
    """

    keys: np.ndarray
    ids: np.ndarray

    def at(self, chosen: np.ndarray) -> "Objects":
        """Those that ``[n]`` bool says, or indices."""
        return Objects(self.keys[chosen], self.ids[chosen])

    def without(self, keys: np.ndarray) -> "Objects":
        """Those that have other keys."""
        return self.at(~are_in(self.keys, keys)) if len(keys) else self


class Told:
    """Objects that a directory was told of, and was not told later that they are gone. Thread-safe.

    What is noted is only kept, and folded in when somebody asks for all: puts shall not wait for
    it.

    Args:
        objects: that count as told at first.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._noted: list[Objects] = []
        self._lock = threading.Lock()

    def note(self, objects: Objects) -> None:
        """Note what the directory was told to be under some keys."""
        if len(objects.keys):
            with self._lock:
                self._noted.append(objects)

    def all(self) -> Objects:
        """Return all, to one thread at a time."""
        with self._lock:
            noted, self._noted = self._noted, []
        if noted:
            keys = np.concatenate([objects.keys for objects in noted])
            ids = np.concatenate([objects.ids for objects in noted])
            _, ends = np.unique(fingerprints(keys)[::-1], return_index=True)
            last = len(keys) - 1 - ends  # of what was noted of a key the last holds
            last = last[ids[last] != 0]
            kept = self._objects.without(keys)
            self._objects = Objects(
                np.concatenate([kept.keys, keys[last]]), np.concatenate([kept.ids, ids[last]])
            )
        return self._objects
