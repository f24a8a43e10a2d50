"""What a node tells the directory of its pool, and asks it: any number of keys at a time."""

import contextlib
import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from mooncake_kernels.errors import Unavailable

from ..directory import MAX_KEYS, Directory, Holders, Published
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
        removed_s: for how long what is removed is not to come back.

    Attributes:
        is_stale: whether the directory may not have all that was told.
    """

    def __init__(self, directory: Directory, pool_name: str, store: Store | None, removed_s: float):
        self._directory = directory
        self._removed_s = removed_s
        self._pool_name = pool_name
        self._store = store
        self._all = threading.Lock()
        self._leaving: tuple[np.ndarray, ...] = ()
        self._copying: Counter[bytes] = Counter()  # just now, by how many threads
        self._undecided: set[bytes] = set()  # copies of which it is not known whether they may stay
        self._marking = threading.Lock()
        self._told = Told()
        self._knows = False  # what the directory was told
        self.is_stale = False

    def publish(self, keys: np.ndarray) -> None:
        """Say that objects were put into the pool; later, if the directory is away.

        What has gone since it was stored may have been withdrawn before it is published here: it is
        withdrawn again.
        """
        keys = _without_any(keys, self._leaving)
        try:
            self._tell_puts(keys)
        except Unavailable as error:
            self._tell_later(error)

    @contextlib.contextmanager
    def copying(self, keys: np.ndarray) -> Iterator[None]:
        """Copy objects from other pools into this one, and ``publish_copies`` then.

        Whoever tells of one before that, or after it failed, does not take it for one that was put.
        """
        words = words_of(keys)
        with self._marking:
            self._copying.update(words)
        try:
            yield
        finally:
            is_here = self.has_keys(keys).tolist()
            with self._marking:
                self._copying.subtract(words)
                self._copying = +self._copying
                self._undecided.update(itertools.compress(words, is_here))

    def publish_copies(self, keys: np.ndarray) -> np.ndarray:
        """Say that the pool has copies of objects: ``[n]`` bool, which may stay.

        The others were removed meanwhile, and nobody has put them since: the caller drops them. If
        the directory is away, all may stay, until it is told later.
        """
        try:
            answers = self._publish(keys, is_copy=True)
        except Unavailable as error:
            self._tell_later(error)
            return np.ones(len(keys), bool)
        may_stay = answers != Published.REMOVED
        self._note_told(keys[may_stay])
        return may_stay

    def has_keys(self, keys: np.ndarray) -> np.ndarray:
        """Tell of objects which the pool has now: ``[n]`` bool."""
        if self._store is None:
            return np.zeros(len(keys), bool)
        return self._store.has_keys(keys)

    def publish_for(self, pool_name: str, keys: np.ndarray) -> bool:
        """Say that objects were put into another pool; if the directory is away, its node does so
        later.

        Returns:
            Whether the pool is served, as far as is known.
        """
        try:
            answers = [self._directory.publish(pool_name, part) for part in in_parts(keys)]
        except Unavailable as error:
            logger.warning("objects in %s are told later: %s", pool_name, error)
            return True
        return not any((answer == Published.NOT_SERVED).any() for answer in answers)

    def remove(self, keys: np.ndarray) -> Holders:
        """Say that no pool shall have objects any more; for each, the names of those that may.

        For some time the directory knows them: who asks again is told of the same pools, and what
        was not dropped there, or is copied just then, is refused when somebody tells of it.

        Raises:
            Unavailable: the directory is away.
        """
        self._told.note(keys, is_there=False)
        return _where(keys, lambda part: self._directory.remove(part, self._removed_s))

    def note_changes(self, keys: np.ndarray, is_there: np.ndarray) -> None:
        """Take note of what others have put into the pool, and removed, in that order."""
        self._told.note(keys[~is_there], is_there=False)  # what was put they tell themselves

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
        if is_own and (is_here := self.has_keys(keys)).any():
            try:
                self._tell(keys[is_here])
            except Unavailable as error:
                self._tell_later(error)

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
                self._leaving = tuple(other for other in self._leaving if other is not keys)
            try:
                self._tell_again(keys[self.has_keys(keys)])
            except Unavailable as error:
                self._tell_later(error)

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
                told = self._told.take()
                self._told.put(self._tell_difference(self._listed(), told if self._knows else None))
                self._knows = True
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
                    told = self._told.take()
                    self._told.put(self._tell_difference(told, told))
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

    def _tell_difference(self, before: np.ndarray, told: np.ndarray | None) -> np.ndarray:
        """Tell how the pool differs from what the directory has; returns what it has.

        What the directory was told, and does not have, was withdrawn by somebody, who may have
        removed it. None: nobody knows what it was told.
        """
        assert self._store is not None
        undecided = self._undecided.copy()
        present = _without_any(self._store.list_keys(), self._leaving)
        gone = before[~are_in(before, present)]
        missing = present[~are_in(present, before)]
        was_told = are_in(missing, present if told is None else told)
        self._tell_again(missing[was_told])
        self._tell(missing[~was_told])
        if len(gone):
            self.withdraw(gone)
        with self._marking:
            self._undecided -= undecided  # what was there is told, and the rest has gone
        return present

    def _tell(self, keys: np.ndarray) -> None:
        """Tell of what has come into the pool, however it did, and does not leave it just now."""
        keys = _without_any(keys, self._leaving)
        with self._marking:
            known = self._copying.keys() | self._undecided
        is_copy = np.zeros(len(keys), bool)
        if known:
            is_copy[:] = [word in known for word in words_of(keys)]
        self._tell_again(keys[is_copy])
        self._tell_puts(keys[~is_copy])

    def _tell_puts(self, keys: np.ndarray) -> None:
        self._publish(keys, is_copy=False)
        self._note_told(keys)

    def _tell_again(self, keys: np.ndarray) -> None:
        """Tell of what may have been removed meanwhile, and drop it then."""
        is_removed = self._publish(keys, is_copy=True) == Published.REMOVED
        for first, second in keys[is_removed].tolist():
            assert self._store is not None
            self._store.remove_key((first, second))
        self._told.note(keys[is_removed], is_there=False)
        self._note_told(keys[~is_removed])

    def _publish(self, keys: np.ndarray, *, is_copy: bool) -> np.ndarray:
        """``[n]`` of ``Published``; of what is told for sure nothing is undecided any more."""
        parts = [
            self._directory.publish(self._pool_name, part, is_copy=is_copy)
            for part in in_parts(keys)
        ]
        answers = np.concatenate([np.empty(0, np.int8), *parts])
        if (answers == Published.NOT_SERVED).any():
            self.is_stale = True  # the membership was over: the pool is published anew
        elif self._undecided:
            with self._marking:
                self._undecided.difference_update(words_of(keys))
        return answers

    def _note_told(self, keys: np.ndarray) -> None:
        """Note what the directory has now, but what was removed, and withdrawn, before it was told:
        that is withdrawn again.

        Not sooner: what was told once, and is not there, a look takes for removed.
        """
        self._told.note(keys, is_there=True)
        if len(keys) and not (is_here := self.has_keys(keys)).all():
            self.withdraw(keys[~is_here])

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


def _without_any(keys: np.ndarray, some: tuple[np.ndarray, ...]) -> np.ndarray:
    return keys[~are_in(keys, np.concatenate(some))] if some else keys


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
