"""The disk as a tiered store sees it."""

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mooncake_kernels.errors import Unavailable
from mooncake_kernels.pool import Key, PutResult

from ..ssd import SsdTier

ABSENT = -1  # of SsdTier.get_into_each


class DiskSide:
    """A tier without the objects whose removal it could not record yet. Thread-safe.

    The calls are those of ``SsdTier``. What is condemned is hidden from them at once, and is
    removed by the next ``retry`` that the disk takes.

    Args:
        tier: the disk.
    """

    def __init__(self, tier: SsdTier):
        self._tier = tier
        self._condemned: set[Key] = set()
        self._lock = threading.Lock()  # of the above

    @property
    def max_object_bytes(self) -> int:
        return self._tier.max_object_bytes

    def condemn(self, keys: Iterable[Key]) -> None:
        """Hide objects, to be removed by ``retry``."""
        with self._lock:
            self._condemned.update(keys)

    def retry(self) -> None:
        """Remove what is condemned, as far as the disk can record it now."""
        with self._lock:
            condemned = list(self._condemned)
        try:
            for key in condemned:
                self.remove(key)
        except Unavailable:  # the tier has logged it
            pass

    def contains_each(self, keys: np.ndarray) -> np.ndarray:
        return self._tier.contains_each(keys) & ~self._hides(keys)

    def num_bytes_each(self, keys: np.ndarray) -> np.ndarray:
        return np.where(self._hides(keys), ABSENT, self._tier.num_bytes_each(keys))

    def get_into_each(self, keys: np.ndarray, buffers: Sequence[Any]) -> np.ndarray:
        sizes = np.full(len(keys), ABSENT, np.int64)
        seen = np.flatnonzero(~self._hides(keys))
        sizes[seen] = self._tier.get_into_each(keys[seen], [buffers[i] for i in seen.tolist()])
        return sizes

    def keys(self) -> np.ndarray:
        keys = self._tier.keys()
        return keys[~self._hides(keys)]

    def put_each(self, keys: Sequence[Key], values: Sequence[Any]) -> list[PutResult]:
        """Store objects; ``FULL`` also where an older one of that key could not be removed yet."""
        is_hidden = self._hides(np.array(keys, np.uint64).reshape(-1, 2)).tolist()
        seen = [i for i, hidden in enumerate(is_hidden) if not hidden]
        results = [PutResult.FULL] * len(keys)
        stored = self._tier.put_each([keys[i] for i in seen], [values[i] for i in seen])
        for i, result in zip(seen, stored, strict=True):
            results[i] = result
        return results

    def remove(self, key: Key) -> bool:
        was_hidden = key in self._condemned
        was_there = self._tier.remove(key)
        with self._lock:
            self._condemned.discard(key)
        return was_there and not was_hidden

    def remove_all(self) -> None:
        self._tier.remove_all()
        with self._lock:
            self._condemned.clear()

    def _hides(self, keys: np.ndarray) -> np.ndarray:
        """Which of ``[n, 2]`` keys are condemned: ``[n]`` bool."""
        with self._lock:
            if not self._condemned:
                return np.zeros(len(keys), bool)
            return np.array([tuple(key) in self._condemned for key in keys.tolist()], bool)
