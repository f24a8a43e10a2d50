"""What a directory was told that a pool has."""

import threading

import numpy as np

SPREAD = np.uint64(0x9E3779B97F4A7C15)


class Told:
    """Keys that a directory was told of, and was not told later that they are gone. Thread-safe.

    What is noted is only kept, and folded in when somebody takes all: puts shall not wait for it.
    """

    def __init__(self) -> None:
        self._keys = np.empty((0, 2), np.uint64)
        self._noted: list[tuple[np.ndarray, bool]] = []
        self._lock = threading.Lock()

    def note(self, keys: np.ndarray, *, is_there: bool) -> None:
        """Note that the directory is told that ``[n, 2]`` keys are there, or are not."""
        if len(keys):
            with self._lock:
                self._noted.append((keys, is_there))

    def take(self) -> np.ndarray:
        """Return all, ``[n, 2]``; from here on is noted what comes on top of what is ``put``."""
        with self._lock:
            noted, self._noted = self._noted, []
        if noted:
            keys = np.concatenate([keys for keys, _ in noted])
            is_there = np.repeat([there for _, there in noted], [len(keys) for keys, _ in noted])
            _, ends = np.unique(fingerprints(keys)[::-1], return_index=True)
            last = len(keys) - 1 - ends  # of what was noted of a key the last holds
            kept = self._keys[~are_in(self._keys, keys)]
            self._keys = np.concatenate([kept, keys[last[is_there[last]]]])
        return self._keys

    def put(self, keys: np.ndarray) -> None:
        """Say what the directory had been told in all when it was taken, and by who took it."""
        self._keys = keys


def are_in(keys: np.ndarray, others: np.ndarray) -> np.ndarray:
    """``[n]`` bool: which of ``[n, 2]`` keys are among others."""
    return np.isin(fingerprints(keys), fingerprints(others))


def fingerprints(keys: np.ndarray) -> np.ndarray:
    """A word of each key: the same hash is in many scopes, and both words are random bits."""
    return keys[:, 0] ^ (keys[:, 1] * SPREAD)
