"""The disk as a tiered store sees it."""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from mooncake_kernels.errors import TransferError, Unavailable
from mooncake_kernels.pool import Key, ObjectPool, PinnedObject, PutResult, checksum_of

from ..keyspace import fingerprints
from ..ssd import SsdTier

ABSENT = -1  # of SsdTier.get_into_each
MIN_FORGOTTEN = 1024  # ids at a time


class DiskView:
    """A tier without the objects whose removal it could not record yet. Thread-safe.

    The calls are those of ``SsdTier``. What is condemned is hidden from them at once, and is
    removed by the next ``retry`` that the disk takes. So is what other processes removed from the
    pool: each call first learns of that. Only a ``retry`` that the disk takes has the pool forget
    it, so that the next process learns of it if this one dies.

    It also knows which objects of the pool are what the disk has under their keys, and so the ids
    of objects, which they keep when they move. Others that it has, too, may be new ones: another
    process evicted the old one from the pool, and put another.

    Args:
        tier: the disk.
        pool: which it is behind.
    """

    def __init__(self, tier: SsdTier, pool: ObjectPool):
        self._tier, self._pool = tier, pool
        self._learnt = pool.keep_removals()  # the number of the first removal that is not
        self._tried = self._learnt  # the same, at the last retry
        self._condemned: set[Key] = set()
        self._all_condemned = False
        # For ids in the pool of what the disk has, the object's id; also of what is gone.
        self._same: dict[int, int] = {}
        self._ids: dict[Key, int] = {}  # of what was written here; also of what is gone
        self._lock = threading.Lock()  # of the above
        self._removing = threading.Lock()  # so that none removes what was put after a removal

    @property
    def max_object_bytes(self) -> int:
        return self._tier.max_object_bytes

    @property
    def room_bytes(self) -> int:
        return self._tier.room_bytes

    def condemn(self, keys: Iterable[Key]) -> None:
        """Hide objects, to be removed by ``retry``."""
        with self._lock:
            self._condemned.update(keys)

    def retry(self) -> None:
        """Remove what is condemned, as far as the disk can record it now."""
        with self._removing:
            with self._lock:
                self._learn()
                condemned, all_condemned = list(self._condemned), self._all_condemned
                learnt = self._tried = self._learnt
            try:
                if all_condemned:
                    self._remove_all()
                for key in () if all_condemned else condemned:
                    self._remove(key)
            except Unavailable:  # the tier has logged it
                return
            if not self._pool.closed:
                self._pool.forget_removals(learnt)

    def retry_at_once(self) -> None:
        """Do so, in a single write if the disk has nothing else."""
        with self._removing:  # so that nothing is written in between
            if not len(self.keys()):
                with self._lock:
                    self._all_condemned = True
        self.retry()

    def retry_new(self) -> None:
        """Do so if something was removed elsewhere since the last time."""
        if not self._pool.closed and self._pool.removals_end != self._tried:
            self.retry()

    def note_promoted(self, key: Key, in_pool: int) -> None:
        """Record that an object of the pool, by its id, is what the disk has."""
        with self._lock:
            self._same[in_pool] = self._id(key)

    def ids_of(self, keys: np.ndarray, in_pool: np.ndarray) -> np.ndarray:
        """Ids of objects, ``[n]``, of which the pool has those whose ids there are not 0; 0 where
        the disk does not have them either.
        """
        # Without the lock, for which everybody would wait: there may be millions.
        same, known = self._same, self._ids
        ids = np.array([same.get(there, there) for there in in_pool.tolist()], np.uint64)
        others = np.flatnonzero(in_pool == 0)
        others = others[self.contains_each(keys[others])]
        ids[others] = [
            known.get((first, second), unknown)
            for (first, second), unknown in zip(
                keys[others].tolist(), _ids_of_keys(keys[others]), strict=True
            )
        ]
        return ids

    def are_same(self, ids: np.ndarray) -> np.ndarray:
        """For which of ``[n]`` objects of the pool this is known: ``[n]`` bool."""
        with self._lock:
            return np.array([object_id in self._same for object_id in ids.tolist()], bool)

    def forget_gone(self) -> None:
        """Forget what is not in the pool any more, or on the disk, if there is much of it."""
        ids = None
        if len(self._same) > 2 * self._pool.stats().num_ready + MIN_FORGOTTEN:
            ids = self._pool.objects().ids
        with self._lock:
            if ids is not None:
                self._same = {i: self._same[i] for i in ids.tolist() if i in self._same}
            if len(self._ids) > 2 * self._tier.stats().num_objects + MIN_FORGOTTEN:
                keys = map(tuple, self._tier.keys().tolist())
                self._ids = {key: self._ids[key] for key in keys if key in self._ids}

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

    def positions_each(self, keys: np.ndarray) -> np.ndarray:
        return self._tier.positions_each(keys)

    def get_into_each(self, keys: np.ndarray, buffers: Sequence[Any]) -> np.ndarray:
        sizes = np.full(len(keys), ABSENT, np.int64)
        seen = np.flatnonzero(~self._hides(keys))
        sizes[seen] = self._tier.get_into_each(keys[seen], [buffers[i] for i in seen.tolist()])
        return sizes

    def read_starts(self, keys: np.ndarray, num_bytes: int) -> list[bytes]:
        starts = [b""] * len(keys)
        seen = np.flatnonzero(~self._hides(keys))
        for i, start in zip(
            seen.tolist(), self._tier.read_starts(keys[seen], num_bytes), strict=True
        ):
            starts[i] = start
        return starts

    def keys(self) -> np.ndarray:
        keys = self._tier.keys()
        return keys[~self._hides(keys)]

    def keys_by_use(self) -> np.ndarray:
        keys = self._tier.keys_by_use()
        return keys[~self._hides(keys)]

    def put_each(
        self,
        keys: Sequence[Key],
        values: Sequence[Any],
        id_of: Callable[[Key], int],
        positions: Sequence[int] | None = None,
    ) -> list[PutResult]:
        """Store objects of the pool, whose ids there ``id_of`` tells.

        ``FULL`` also where it is 0, for what is not there any more, and where an older object of
        that key could not be removed yet.
        """
        results = [PutResult.FULL] * len(keys)
        with self._removing:  # what is removed elsewhere from here on, is removed here afterwards
            is_hidden = self._hides(np.array(keys, np.uint64).reshape(-1, 2)).tolist()
            ids = [0 if hidden else id_of(k) for k, hidden in zip(keys, is_hidden, strict=True)]
            there = [i for i, object_id in enumerate(ids) if object_id]
            stored = self._tier.put_each(
                [keys[i] for i in there],
                [values[i] for i in there],
                None if positions is None else [positions[i] for i in there],
            )
            for i, result in zip(there, stored, strict=True):
                results[i] = result
                if result is not PutResult.FULL:
                    self._note_same(keys[i], ids[i])
        return results

    def remove(self, key: Key) -> bool:
        with self._removing:
            return self._remove(key)

    def remove_each(self, keys: Sequence[Key]) -> np.ndarray:
        """Remove objects, in one write if there is room: ``[n]`` bool, which were there."""
        with self._removing:
            were_hidden = self._hides(np.array(keys, np.uint64).reshape(-1, 2))
            were_there = self._tier.remove_each(keys)
            with self._lock:
                self._condemned.difference_update(keys)
            return were_there & ~were_hidden

    def remove_exactly(self, key: Key, object_id: int) -> bool:
        """Remove an object, unless its key has one of another id by now."""
        with self._removing:
            with self._lock:
                is_it = self._id(key) == object_id
            return is_it and self._remove(key)

    def _remove(self, key: Key) -> bool:
        was_hidden = bool(self._hides(np.array([key], np.uint64))[0])
        was_there = self._tier.remove(key)
        with self._lock:
            self._condemned.discard(key)
        return was_there and not was_hidden

    def remove_all(self) -> None:
        with self._removing:
            self._remove_all()

    def _remove_all(self) -> None:
        with self._lock:
            self._learn()
        self._tier.remove_all()
        with self._lock:
            self._condemned.clear()
            self._all_condemned = False

    def _note_same(self, key: Key, in_pool: int) -> None:
        """Record that an object of the pool, by its id, is now on the disk."""
        with self._lock:
            self._ids[key] = self._same.setdefault(in_pool, in_pool)

    def _learn(self) -> None:
        """Condemn what was removed elsewhere. With the lock."""
        if self._pool.closed or self._pool.removals_end == self._learnt:
            return
        keys, end = self._pool.removals_from(self._learnt)
        if keys is None:
            self._all_condemned = True
        else:
            self._condemned.update((first, second) for first, second in keys.tolist())
        self._learnt = end

    def _id(self, key: Key) -> int:
        """Of what the disk has under this key. With the lock."""
        return self._ids.get(key) or _ids_of_keys(np.array([key], np.uint64))[0]

    def _hides(self, keys: np.ndarray) -> np.ndarray:
        """Which of ``[n, 2]`` keys are condemned: ``[n]`` bool."""
        with self._lock:
            self._learn()
            if self._all_condemned:
                return np.ones(len(keys), bool)
            if not self._condemned:
                return np.zeros(len(keys), bool)
            return np.array([tuple(key) in self._condemned for key in keys.tolist()], bool)


def _ids_of_keys(keys: np.ndarray) -> list[int]:
    """Ids of objects that were on the disk before: not 0, and the same each time."""
    ids = fingerprints(keys)
    return np.where(ids == 0, np.uint64(1), ids).tolist()
