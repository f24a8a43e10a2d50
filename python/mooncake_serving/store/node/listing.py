"""What a node tells the directory of its pool, and asks it: any number of keys at a time."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

import numpy as np

from mooncake_kernels.errors import Unavailable

from ..directory import MAX_KEYS, Directory, Holders
from ..store import Store
from .told import Told, are_in

logger = logging.getLogger(__name__)


class Listing:
    """A pool's entries in a directory. Thread-safe. Keys are ``[n, 2]`` uint64.

    What could not be told because the directory is away is told by ``publish_all``.

    Args:
        directory: to be told and asked.
        pool_name: what the directory calls the pool; "" for none.
        store: what it has; None for none.

    Attributes:
        is_stale: whether the directory may not have all that was told.
    """

    def __init__(self, directory: Directory, pool_name: str, store: Store | None):
        self._directory = directory
        self._pool_name = pool_name
        self._store = store
        self._all = threading.Lock()
        self._leaving: tuple[np.ndarray, ...] = ()
        self._arriving: tuple[np.ndarray, ...] = ()
        self._marking = threading.Lock()
        self._told = Told()
        self.is_stale = False

    def publish(self, keys: np.ndarray) -> None:
        """Say that the pool has objects; later, if the directory is away.

        What has gone since it was stored may have been withdrawn before it is published here: it is
        withdrawn again.
        """
        keys = _without_any(keys, self._leaving)
        self._told.note(keys, is_there=True)
        try:
            self._tell(keys)
        except Unavailable as error:
            self._tell_later(error)

    @contextlib.contextmanager
    def arriving(self, keys: np.ndarray) -> Iterator[None]:
        """Leave it to ``publish_copies`` to tell of objects that are copied here meanwhile."""
        with self._marking:
            self._arriving += (keys,)
        try:
            yield
        finally:
            with self._marking:
                self._arriving = _without(self._arriving, keys)

    def publish_copies(self, keys: np.ndarray) -> np.ndarray:
        """Say that the pool has copied objects from others: ``[n]`` bool, which it keeps.

        What no pool is said to have any more was removed meanwhile, and is removed here. If the
        directory is away, all is kept, and told later. It is ``arriving`` when it comes.
        """
        try:
            parts = [
                self._directory.publish_copies(self._pool_name, part) for part in in_parts(keys)
            ]
        except Unavailable as error:
            self._tell_later(error)
            return np.ones(len(keys), bool)
        is_kept = np.concatenate(parts) if parts else np.empty(0, bool)
        if self._store is not None:
            for first, second in keys[~is_kept].tolist():
                self._store.remove_key((first, second))
        self._told.note(keys[is_kept], is_there=True)
        self.withdraw(keys[is_kept & ~self.has_keys(keys)])  # it is gone again
        return is_kept

    def has_keys(self, keys: np.ndarray) -> np.ndarray:
        """Tell of objects which the pool has now: ``[n]`` bool."""
        if self._store is None:
            return np.zeros(len(keys), bool)
        return self._store.has_keys(keys)

    def publish_for(self, pool_name: str, keys: np.ndarray) -> bool:
        """Say that another pool has objects; if the directory is away, its node does so later.

        Returns:
            Whether the pool is served, as far as is known.
        """
        try:
            return all(self._directory.publish(pool_name, part) for part in in_parts(keys))
        except Unavailable as error:
            logger.warning("objects in %s are told later: %s", pool_name, error)
            return True

    def withdraw_all(self, keys: np.ndarray) -> Holders:
        """Say that no pool has objects, and which had them, for each the names of pools.

        What this pool has, as another process may have put it back, is published again.

        Raises:
            Unavailable: the directory is away; it is told later what this pool has.
        """
        self._told.note(keys, is_there=False)
        try:
            pools = _where(keys, lambda part: self._directory.withdraw_all(part))
        except Unavailable as error:
            self._tell_later(error)
            raise
        if self._store is not None:
            self.publish(keys[self._store.has_keys(keys)])
        return pools

    def withdraw(self, keys: np.ndarray, pool_name: str | None = None) -> None:
        """Say that this pool, or another, does not have objects; later, if the directory is away.

        Another process may have put them back meanwhile: then they are published again.
        """
        is_own = pool_name in (None, self._pool_name)
        if is_own:
            self._told.note(keys, is_there=False)
        try:
            for part in in_parts(keys):
                self._directory.withdraw(pool_name or self._pool_name, part)
        except Unavailable as error:
            self._tell_later(error)
        if is_own and self._store is not None:
            self.publish(keys[self._store.has_keys(keys)])

    @contextlib.contextmanager
    def leaving(self, keys: np.ndarray) -> Iterator[None]:
        """Withdraw objects that may be removed, and publish them meanwhile by no means.

        In the end what the pool has nevertheless is published again.
        """
        with self._all:  # what a look has found is told before
            self._leaving += (keys,)
        try:
            self.withdraw(keys)
            yield
        finally:
            with self._all:
                self._leaving = _without(self._leaving, keys)
            if self._store is not None:
                self.publish(keys[self._store.has_keys(keys)])

    def withdraw_gone(self, keys: np.ndarray) -> np.ndarray:
        """Withdraw what the directory says the pool has, and it has not: ``[n]`` bool.

        Raises:
            Unavailable: the directory is away.
        """
        is_listed = np.array([self._pool_name in pools for pools in self.holders(keys)], bool)
        if self._store is not None:
            is_listed &= ~self._store.has_keys(keys)
            self.withdraw(keys[is_listed])
        return is_listed

    def publish_all(self) -> None:
        """Make what the directory says of the pool true.

        Raises:
            Unavailable: the directory is away.
        """
        if self._store is None:
            return
        with self._all:
            self.is_stale = False  # from here on others are told what changes
            try:
                self._told.take()  # the directory says what it was told
                self._told.put(self._tell_difference(self._listed()))
            except BaseException:
                self.is_stale = True
                raise

    def tell_changes(self) -> None:
        """Tell how the pool differs from what was told of it, whoever of the host changed it.

        For processes without a node put objects as well, and evict them. What others have
        withdrawn is not noticed here, but by ``publish_all``.

        Raises:
            Unavailable: the directory is away.
        """
        if self._store is not None:
            with self._all:
                try:
                    self._told.put(self._tell_difference(self._told.take()))
                except BaseException:
                    self.is_stale = True  # so all is compared the next time
                    raise

    def holders(self, keys: np.ndarray) -> Holders:
        """For each key, the names of living pools that have it.

        Raises:
            Unavailable: the directory is away.
        """
        return _where(keys, lambda part: self._directory.holders(part))

    def match_prefix(self, keys: np.ndarray) -> Holders:
        """For the first keys that living pools have, up to one that none has, the names of these.

        Raises:
            Unavailable: the directory is away.
        """
        found: Holders = []
        for part in in_parts(keys):
            pools = self._directory.match_prefix(part)
            found += pools
            if len(pools) < len(part):
                break
        return found

    def _tell_difference(self, before: np.ndarray) -> np.ndarray:
        """Tell how the pool differs from what it was; returns what it has."""
        assert self._store is not None
        present = self._store.list_keys()
        untold = self._leaving + self._arriving  # looked at last: what has arrived is among them
        present = _without_any(present, untold)
        gone = _without_any(before[~are_in(before, present)], untold)
        self._tell(present[~are_in(present, before)])
        if len(gone):
            self.withdraw(gone)
        return present

    def _tell(self, keys: np.ndarray) -> None:
        for part in in_parts(keys):
            if not self._directory.publish(self._pool_name, part):
                self.is_stale = True  # the membership was over: the pool is published anew
        if len(keys) and not (is_here := self.has_keys(keys)).all():
            self.withdraw(keys[~is_here])  # it was removed, and withdrawn, before it was told

    def _listed(self) -> np.ndarray:
        parts, cursor = [np.empty((0, 2), np.uint64)], 0
        while True:
            cursor, keys = self._directory.keys_of(self._pool_name, cursor)
            parts.append(keys)
            if cursor == 0:
                return np.concatenate(parts)

    def _tell_later(self, error: Unavailable) -> None:
        if not self.is_stale:
            logger.warning("the directory is told later: %s", error)
        self.is_stale = True


def _without(some: tuple[np.ndarray, ...], keys: np.ndarray) -> tuple[np.ndarray, ...]:
    return tuple(other for other in some if other is not keys)


def _without_any(keys: np.ndarray, some: tuple[np.ndarray, ...]) -> np.ndarray:
    for others in some:
        keys = keys[~are_in(keys, others)]
    return keys


def _where(keys: np.ndarray, ask: Callable[[np.ndarray], Holders]) -> Holders:
    """For each key the names of pools."""
    found: Holders = []
    for part in in_parts(keys):
        found += ask(part)
    return found


def in_parts(keys: np.ndarray) -> Iterator[np.ndarray]:
    """As many at a time as a directory takes."""
    for first in range(0, len(keys), MAX_KEYS):
        yield keys[first : first + MAX_KEYS]


def words_of(keys: np.ndarray) -> list[bytes]:
    """Keys as what can be in a set."""
    return np.ascontiguousarray(keys, np.uint64).view("V16").reshape(-1).tolist()
