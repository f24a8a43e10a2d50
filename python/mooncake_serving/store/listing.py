"""What a node tells the directory of its pool, and asks it: any number of keys at a time."""

import logging
import threading
from collections.abc import Iterator

import numpy as np

from mooncake_kernels.errors import Unavailable
from mooncake_kernels.pool import ObjectPool

from .directory import MAX_KEYS, Claim, Directory, Holders

logger = logging.getLogger(__name__)


class Listing:
    """A pool's entries in a directory. Thread-safe. Keys are ``[n, 2]`` uint64.

    What could not be told because the directory is away is told by ``publish_all``.

    Args:
        directory: to be told and asked.
        member: name of the node, whose claims are its own.
        pool_name: what the directory calls the pool; "" for none.
        pool: what it has; None for none.

    Attributes:
        is_stale: whether the directory may not have all that was told.
    """

    def __init__(self, directory: Directory, member: str, pool_name: str, pool: ObjectPool | None):
        self._directory = directory
        self._member = member
        self._pool_name = pool_name
        self._pool = pool
        self._all = threading.Lock()
        self.is_stale = False

    def claim(self, keys: np.ndarray, ttl_s: float) -> np.ndarray:
        """Ask to write objects that are not in the pool: ``[n]`` of ``Claim``.

        Raises:
            Unavailable: the directory is away; nothing is claimed for longer than ``ttl_s``.
        """
        claims = self._claim(keys, ttl_s)
        listed = np.flatnonzero(claims == Claim.EXISTS)
        ours = [self._pool_name in pools for pools in self.holders(keys[listed])]
        if any(ours):  # they went, and nobody told
            self.withdraw(keys[listed[ours]])
            claims[listed[ours]] = self._claim(keys[listed[ours]], ttl_s)
        return claims

    def abandon(self, keys: np.ndarray) -> None:
        """End claims without objects; if that cannot be told, they run out."""
        try:
            for part in _parts(keys):
                self._directory.abandon(self._member, part)
        except Unavailable as error:
            logger.warning("claims stay until they run out: %s", error)

    def publish(self, keys: np.ndarray) -> None:
        """Say that the pool has objects; later, if the directory is away."""
        try:
            for part in _parts(keys):
                self._directory.publish(self._pool_name, part)
        except Unavailable as error:
            self._tell_later(error)

    def withdraw(self, keys: np.ndarray, pool_name: str | None = None) -> None:
        """Say that this pool, or another, does not have objects; later, if the directory is away.

        Another process may have put them back meanwhile: then they are published again.
        """
        try:
            for part in _parts(keys):
                self._directory.withdraw(pool_name or self._pool_name, part)
        except Unavailable as error:
            self._tell_later(error)
        if pool_name in (None, self._pool_name) and self._pool is not None:
            self.publish(keys[self._pool.contains_each(keys)])

    def publish_all(self) -> None:
        """Make what the directory says of the pool true.

        Raises:
            Unavailable: the directory is away.
        """
        if self._pool is None:
            return
        with self._all:
            self.is_stale = False  # from here on others are told what changes
            try:
                listed = self._listed()
                present = self._pool.objects().keys
                gone = listed[~_are_in(listed, present)]
                for part in _parts(present[~_are_in(present, listed)]):
                    self._directory.publish(self._pool_name, part)
                if len(gone):
                    self.withdraw(gone)
            except BaseException:
                self.is_stale = True
                raise

    def holders(self, keys: np.ndarray) -> list[list[str]]:
        """For each key, the names of living pools that have it.

        Raises:
            Unavailable: the directory is away.
        """
        found: list[list[str]] = []
        for part in _parts(keys):
            holders: Holders = self._directory.holders(part)
            found.extend(holders.of(i) for i in range(len(part)))
        return found

    def match_prefix(self, keys: np.ndarray) -> int:
        """Count the first keys that any living pool has.

        Raises:
            Unavailable: the directory is away.
        """
        count = 0
        for part in _parts(keys):
            found = self._directory.match_prefix(part)
            count += found
            if found < len(part):
                break
        return count

    def _claim(self, keys: np.ndarray, ttl_s: float) -> np.ndarray:
        claims = [self._directory.claim(self._member, part, ttl_s) for part in _parts(keys)]
        return np.concatenate(claims) if claims else np.empty(0, np.int8)

    def _listed(self) -> np.ndarray:
        parts, cursor = [np.empty((0, 2), np.uint64)], 0
        while True:
            cursor, keys = self._directory.keys_of(self._pool_name, cursor)
            parts.append(keys)
            if cursor == 0:
                return np.concatenate(parts)

    def _tell_later(self, error: Unavailable) -> None:
        self.is_stale = True
        logger.warning("the directory is told later: %s", error)


def _parts(keys: np.ndarray) -> Iterator[np.ndarray]:
    for first in range(0, len(keys), MAX_KEYS):
        yield keys[first : first + MAX_KEYS]


def _are_in(keys: np.ndarray, others: np.ndarray) -> np.ndarray:
    known = set(_words(others))
    return np.array([key in known for key in _words(keys)], bool)


def _words(keys: np.ndarray) -> list[bytes]:
    return np.ascontiguousarray(keys, np.uint64).view("V16").reshape(-1).tolist()
