"""The disk as a tiered store sees it."""

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mooncake_kernels.errors import TransferError, Unavailable
from mooncake_kernels.pool import Key, PinnedObject, PutResult, checksum_of

from ..ssd import SsdTier

ABSENT = -1  # of SsdTier.get_into_each
MIN_FORGOTTEN = 1024  # ids at a time


class DiskSide:
    """A tier without the objects whose removal it could not record yet. Thread-safe.

    The calls are those of ``SsdTier``. What is condemned is hidden from them at once, and is
    removed by the next ``retry`` that the disk takes.

    It also knows which objects of the pool are what the disk has under their keys. Others that it
    has, too, may be new ones: another process removed the old one from the pool, where it could.

    Args:
        tier: the disk.
    """

    def __init__(self, tier: SsdTier):
        self._tier = tier
        self._condemned: set[Key] = set()
        self._same: set[int] = set()  # ids in the pool of what the disk has; also of what is gone
        self._lock = threading.Lock()  # of the above
        self._removing = threading.Lock()  # so that none removes what was put after a removal

    @property
    def max_object_bytes(self) -> int:
        return self._tier.max_object_bytes

    def condemn(self, keys: Iterable[Key]) -> None:
        """Hide objects, to be removed by ``retry``."""
        with self._lock:
            self._condemned.update(keys)

    def retry(self) -> None:
        """Remove what is condemned, as far as the disk can record it now."""
        with self._removing:
            with self._lock:
                condemned = list(self._condemned)
            try:
                for key in condemned:
                    self._remove(key)
            except Unavailable:  # the tier has logged it
                pass

    def note_same(self, ids: Iterable[int]) -> None:
        """Record that these objects of the pool are what the disk has, if it has their keys."""
        with self._lock:
            self._same.update(ids)

    def are_same(self, ids: np.ndarray) -> np.ndarray:
        """For which of ``[n]`` objects of the pool this is known: ``[n]`` bool."""
        with self._lock:
            return np.array([object_id in self._same for object_id in ids.tolist()], bool)

    def forget_gone(self, ids: np.ndarray) -> None:
        """Forget all but these, the objects of the pool, if there are many others."""
        with self._lock:
            if len(self._same) > 2 * len(ids) + MIN_FORGOTTEN:
                self._same.intersection_update(ids.tolist())

    def is_same(self, key: Key, pinned: PinnedObject) -> bool:
        """Whether the disk has this object of the pool: it is read and compared.

        False where it cannot be read.
        """
        words = np.array([key], np.uint64)
        if self.num_bytes_each(words)[0] != pinned.num_bytes:
            return False
        found = np.empty(pinned.num_bytes, np.uint8)
        try:
            if self.get_into_each(words, [found])[0] != pinned.num_bytes:
                return False
        except TransferError:
            return False
        if pinned.checksum is None:
            return bool(np.array_equal(found, np.frombuffer(pinned.view, np.uint8)))
        return checksum_of(found) == pinned.checksum  # even if it is damaged in the pool

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
        with self._removing:
            return self._remove(key)

    def _remove(self, key: Key) -> bool:
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
