"""The half of ``Store`` that finds and reads objects, and removes those that it finds damaged."""

import random
from collections.abc import Sequence, Sized
from typing import Any

import numpy as np

from mooncake_kernels.buffers import Buffer, as_buffer
from mooncake_kernels.errors import ChecksumError, InvalidArgument, Unavailable
from mooncake_kernels.pool import Key, ObjectPool, PinnedObject

from .keyspace import Keyspace, StoreKey, StoreKeys, check_keys

ABSENT, DAMAGED = -1, -4  # of ObjectPool.get_into_each


class StoreReader:
    """The operations that do not put anything.

    Attributes:
        pool: where the objects are.
        keyspace: how callers' keys become keys of the pool.
    """

    def __init__(self, pool: ObjectPool, keyspace: Keyspace, verify: float):
        self.pool = pool
        self.keyspace = keyspace
        self._verify = verify

    def get(self, key: StoreKey) -> bytes | None:
        """Return a copy of an object; None if there is none.

        Raises:
            ChecksumError: it was verified and is damaged; it was removed.
        """
        pinned = self._view("get", key)
        if pinned is None:
            return None
        with pinned:
            return pinned.to_bytes()

    def view(self, key: StoreKey) -> PinnedObject | None:
        """Return an object in place, without a copy; None if there is none.

        Raises:
            ChecksumError: as in ``get``.
        """
        return self._view("view", key)

    def _view(self, op: str, key: StoreKey) -> PinnedObject | None:
        words = self.keyspace.key(key, op)
        pinned = self.pin_key(words)
        if pinned is not None and self._verifies():
            try:
                pinned.verify()
            except ChecksumError:
                pinned.close()
                self.remove_damaged(words)
                raise
        return pinned

    def pin_key(self, key: Key) -> PinnedObject | None:
        """Do the same with a key of the pool, of any namespace; nothing is verified."""
        return self.pool.pin(key)

    def get_into(self, key: StoreKey, *buffers: Any, offset: int | None = None) -> int | None:
        """Copy an object, or the part of it from ``offset`` on, see ``ObjectPool.get_into``.

        A part that is verified costs a look at the whole object: for many of one, see ``view``.

        Raises:
            ChecksumError: as in ``get``; for what buffers hold then see ``ObjectPool.get_into``.
        """
        words = self.keyspace.key(key, "get_into")
        try:
            return self.pool.get_into(words, *buffers, offset=offset, verify=self._verifies())
        except ChecksumError:
            self.remove_damaged(words)
            raise

    def get_each(self, keys: StoreKeys) -> list[bytes | None]:
        """Return copies of many objects, see ``get_into_each``."""
        self.keyspace.keys(keys, "get_each")
        return [self.get(key) for key in reversed(list(keys))][::-1]

    def get_into_each(self, keys: StoreKeys, buffers: Sequence[Any]) -> np.ndarray:
        """Copy many objects, each into its buffer, in one call.

        They are read from the last to the first, so that the tail of a prefix is the least recently
        used: LRU evicts it before the head, without which the tail is useless.

        Args:
            keys: n of them.
            buffers: n of packed, writable memory, each at least as large as its object.

        Returns:
            ``[n]`` int64: sizes of the objects; -1 where there is none, -2 where the buffer is too
            small, -4 where the object was verified and damaged; it was removed.

        Raises:
            InvalidArgument: an argument is wrong; nothing was copied.
        """
        check_pairs("get_into_each", "buffers", keys, buffers)
        key_array = self.keyspace.keys(keys, "get_into_each")[::-1]
        verify = self._verifies()
        held = list(buffers)
        try:
            sizes = self.pool.get_into_each(key_array, held[::-1], verify=verify)
        except InvalidArgument:  # it has counted them from the last on
            as_writable("get_into_each", held)
            raise
        for first, second in key_array[sizes == DAMAGED].tolist():
            self.remove_damaged((first, second))
        return sizes[::-1]

    def num_bytes(self, key: StoreKey) -> int | None:
        """Size of an object, which is not compared with its checksum; None if there is none."""
        pinned = self.pool.pin(self.keyspace.key(key, "num_bytes"))
        if pinned is None:
            return None
        with pinned:
            return pinned.num_bytes

    def exists(self, key: StoreKey) -> bool:
        return self.pool.contains(self.keyspace.key(key, "exists"))

    def exists_each(self, keys: StoreKeys) -> np.ndarray:
        """Return which of n keys are there: ``[n]`` bool."""
        return self.has_keys(self.keyspace.keys(keys, "exists_each"))

    def match_prefix(self, keys: StoreKeys) -> int:
        """Count the leading keys that are there, up to the first that is not; one call, no lock."""
        return self.match_keys(self.keyspace.keys(keys, "match_prefix"))

    def remove(self, key: StoreKey) -> bool:
        """Remove an object; current readers keep it. Returns whether it was there.

        If another process has a disk behind the pool, a ``TieredStore``, it removes the object from
        there; whether it was only there is not known here.
        """
        return self.remove_key(self.keyspace.key(key, "remove"))

    def remove_each(self, keys: StoreKeys) -> np.ndarray:
        """Remove n objects, see ``remove``: ``[n]`` bool, which were there."""
        return self.remove_keys(self.keyspace.keys(keys, "remove_each"))

    # The same with keys of the pool, ``[n, 2]`` uint64, of any namespace.

    def has_keys(self, keys: np.ndarray, *, or_written: bool = False) -> np.ndarray:
        return self.pool.contains_each(keys, or_written=or_written)

    def match_keys(self, keys: np.ndarray) -> int:
        return self.pool.match_prefix(keys)

    def read_starts(self, keys: np.ndarray, num_bytes: int) -> list[bytes]:
        """The first bytes of objects, none where there is none. Does not count as a use; they are
        not compared with a checksum.
        """
        starts = [b""] * len(keys)
        for i, (first, second) in enumerate(keys.tolist()):
            if (pinned := self.pool.pin((first, second), touch=False)) is not None:
                with pinned:
                    starts[i] = bytes(pinned.view[:num_bytes])
        return starts

    def get_headed(
        self,
        keys: np.ndarray,
        heads: Sequence[bytes],
        addresses: np.ndarray,
        sizes: np.ndarray,
        *,
        free: tuple[int, int],
    ) -> np.ndarray:
        """Copy what follows the heads of objects in the pool, see ``ObjectPool.get_headed``, in the
        order of ``get_into_each``. Damaged ones stay: the calls that raise an error remove them.
        """
        return self.pool.get_headed(
            keys[::-1],
            heads[::-1],
            addresses[::-1],
            sizes[::-1],
            free=free,
            verify=self._verifies(),
        )[::-1]

    def remove_key(self, key: Key) -> bool:
        return self.pool.remove(key)

    def remove_keys(self, keys: np.ndarray) -> np.ndarray:
        return self.pool.remove_each(keys)

    def remove_exactly(self, key: Key, object_id: int) -> bool:
        """Remove an object, unless its key has one of another id by now, see ``ids_of``."""
        return self.pool.remove_exactly(key, object_id)

    def remove_damaged(self, key: Key) -> None:
        """Remove an object that was damaged when it was read.

        One that is whole stays: by now others may have removed the damaged one, and put it again.
        """
        [object_id] = self.pool.ids_of([key]).tolist()  # first: what is verified may be a later one
        try:
            pinned = self.pool.pin(key, touch=False)
        except Unavailable:  # this process has as many pins as it can: the next reader removes it
            return
        if pinned is not None:
            with pinned:
                if is_whole(pinned):
                    return
            self.pool.remove_exactly(key, object_id)

    def ids_of(self, keys: np.ndarray) -> np.ndarray:
        """``[n]`` uint64: an id of each object, 0 where there is none. An object that is put again
        under a key gets another one.
        """
        return self.pool.ids_of(keys)

    def list_objects(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys and ids of all objects, of all namespaces."""
        objects = self.pool.objects()
        return objects.keys, objects.ids

    def _verifies(self) -> bool:
        return self._verify == 1 or (self._verify > 0 and random.random() < self._verify)


def is_whole(pinned: PinnedObject) -> bool:
    """Whether a pinned object is what its checksum says."""
    try:
        pinned.verify()
    except ChecksumError:
        return False
    return True


def as_writable(op: str, buffers: Sequence[Any]) -> list[Buffer]:
    """Describe memory; refuse what nothing can be copied to, in the pool's words."""
    described = []
    for i, buffer in enumerate(buffers):
        memory = buffer
        if type(memory) is not Buffer:  # it is when others have called this before
            memory = as_buffer(buffer, argument=f"{op}: buffers[{i}]")
        if not memory.writable:
            raise InvalidArgument(f"{op}: buffers[{i}] must be writable, got read-only memory")
        described.append(memory)
    return described


def check_pairs(op: str, argument: str, keys: StoreKeys, others: Sequence[Any]) -> None:
    """Refuse keys and their values if their numbers differ."""
    check_keys(op, keys)
    if not isinstance(others, Sized):
        raise InvalidArgument(f"{op}: {argument} must be as many as keys, got {others!r:.80}")
    if len(keys) != len(others):
        raise InvalidArgument(
            f"{op}: {argument} must be as many as keys, got {len(others)} and {len(keys)}"
        )
