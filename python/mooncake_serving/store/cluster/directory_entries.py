"""A pool's entries in the directory, and what that says of others: any number of keys at a time."""

import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mooncake_kernels.errors import Unavailable

from ..directory import MAX_KEYS, Directory, Holders, Published
from ..keyspace import are_in, fingerprints, words_of
from ..store import Store

logger = logging.getLogger(__name__)

MAX_REMEMBERED = 65_536  # objects: about 20 MB
NOWHERE: tuple[tuple[str, ...], float] = ((), 0.0)
NO_KEYS = np.empty((0, 2), np.uint64)
LISTED, REMOVED, NOT_SERVED = map(int, Published)  # looking up an enum's members is slow


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


class PublishedSet:
    """Objects that were published to a directory, and not withdrawn later. Thread-safe.

    Updates are only appended, and merged when ``all`` is called, so that puts do not wait for it.

    Args:
        objects: the initial ones.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._recorded: list[Objects] = []
        self._lock = threading.Lock()

    def record(self, objects: Objects) -> None:
        """Record what was published under some keys."""
        if len(objects.keys):
            with self._lock:
                self._recorded.append(objects)

    def all(self) -> Objects:
        """Return all; for one thread at a time."""
        with self._lock:
            recorded, self._recorded = self._recorded, []
        if recorded:
            keys = np.concatenate([objects.keys for objects in recorded])
            ids = np.concatenate([objects.ids for objects in recorded])
            _, ends = np.unique(fingerprints(keys)[::-1], return_index=True)
            last = len(keys) - 1 - ends  # the last update of a key counts
            last = last[ids[last] != 0]
            others = self._objects.without(keys)
            self._objects = Objects(
                np.concatenate([others.keys, keys[last]]), np.concatenate([others.ids, ids[last]])
            )
        return self._objects


class CopyMarks:
    """Ids of objects that come, or came, from other pools. Thread-safe.

    A look at the pool takes unknown objects for new puts. Copies are not: so they are marked before
    they become visible, and until the directory has decided.
    """

    def __init__(self) -> None:
        self._coming: set[int] = set()
        self._here: set[int] = set()

    def begin(self, object_id: int) -> None:
        self._coming.add(object_id)

    def commit(self, object_id: int) -> None:
        self._here.add(object_id)
        self._coming.discard(object_id)

    def end(self, ids: np.ndarray) -> None:
        """Remove marks: the directory has decided, or nothing came."""
        if self._coming or self._here:
            self._coming.difference_update(ids.tolist())
            self._here.difference_update(ids.tolist())

    def are_in(self, ids: np.ndarray) -> np.ndarray:
        """``[n]`` bool: which of ``[n]`` ids are marked."""
        marked = (*tuple(self._coming), *tuple(self._here))  # in this order: none is missed
        return np.isin(ids, np.array(marked, np.uint64)) if marked else np.zeros(len(ids), bool)

    def here(self) -> np.ndarray:
        """Those that have arrived."""
        ids = tuple(self._here)
        return np.array(ids, np.uint64)

    def forget_gone(self, here: np.ndarray, present: np.ndarray) -> None:
        """Forget those that had arrived, and are no longer in the pool."""
        if len(here):
            self.end(here[~np.isin(here, present)])


class DirectoryEntries:
    """A pool's entries in a directory. Thread-safe. Keys are ``[n, 2]`` uint64.

    Updates that fail because the directory is away are made up for by ``publish_all``.

    Objects that were put are published as such. For all others the directory may answer that they
    were removed meanwhile: for copies, and for objects that were published before and that it no
    longer has. Then that very object is dropped here, but not one put under its key since.

    Args:
        directory: to be updated and queried.
        pool_name: name of the pool in the directory; "" for none.
        store: of the pool; None for none.
        removed_s: for how long removed objects must not come back.

    Attributes:
        is_stale: whether the directory may have missed updates.
        copies: objects that are copied into the pool.
    """

    def __init__(self, directory: Directory, pool_name: str, store: Store | None, removed_s: float):
        self._directory = directory
        self._removed_s = removed_s
        self._pool_name = pool_name
        self._store = store
        self._all = threading.Lock()
        self._gone = threading.Lock()  # while what is gone is being withdrawn
        self._leaving: tuple[np.ndarray, ...] = ()
        self._put_leaving: set[int] = set()  # ids of objects put under leaving keys meanwhile
        found = (NO_KEYS, np.empty(0, np.uint64)) if store is None else store.list_objects()
        self._published = PublishedSet(Objects(*found))  # these may have been removed elsewhere
        self.copies = CopyMarks()
        self.is_stale = False

    def publish(self, keys: np.ndarray) -> np.ndarray:
        """Publish that objects were put into the pool; later, if the directory is away.

        An object that has gone since it was stored may have been withdrawn before it is published
        here: it is withdrawn again.

        Returns:
            ``[n]`` bool: which are there.
        """
        if self._store is None:
            return np.zeros(len(keys), bool)
        ids = self._ids_of(keys)
        objects = _present(keys, ids)
        if self._leaving:
            is_leaving = are_in(objects.keys, self._leaving_keys())
            self._put_leaving.update(objects.ids[is_leaving].tolist())
            objects = objects.at(~is_leaving)
        try:
            self._publish_objects(objects)
            self._wait_for_withdrawal()
        except Unavailable as error:
            self._defer(error)
        return ids != 0

    def note_listed(self, keys: np.ndarray, ids: np.ndarray) -> None:
        """Record that ``[n]`` objects, which the directory has listed, are stored by now.

        What was removed in between counts as removed: ``publish_all`` drops it.
        """
        self._wait_for_withdrawal()
        self._published.record(Objects(keys, ids))

    def publish_copies(self, keys: np.ndarray) -> np.ndarray:
        """Publish copies of objects in the pool: ``[n]`` bool, which may stay.

        The others were removed meanwhile, and were not put again since: the caller drops them. If
        the directory is away, all may stay, until it is notified later.
        """
        may_stay = np.ones(len(keys), bool)
        staying = np.flatnonzero(~are_in(keys, self._leaving_keys()))
        ids = self._ids_of(keys[staying])
        try:
            answers = self._publish(keys[staying], is_copy=True)
        except Unavailable as error:
            self._defer(error)
            return may_stay
        self._wait_for_withdrawal()
        may_stay[staying] = answers != REMOVED
        self._note(Objects(keys[staying], ids), answers)
        return may_stay

    def has_keys(self, keys: np.ndarray) -> np.ndarray:
        """Return which objects the pool has now: ``[n]`` bool."""
        if self._store is None:
            return np.zeros(len(keys), bool)
        return self._store.has_keys(keys)

    def publish_for(self, pool_name: str, keys: np.ndarray) -> bool:
        """Publish that objects were put into another pool; if the directory is away, its node does
        so later.

        Returns:
            Whether the pool is served, as far as is known.
        """
        try:
            answers = [self._directory.publish(pool_name, part) for part in in_parts(keys)]
        except Unavailable as error:
            logger.warning("objects in %s are told later: %s", pool_name, error)
            return True
        return not any((answer == NOT_SERVED).any() for answer in answers)

    def remove(self, keys: np.ndarray) -> Holders:
        """Record that no pool shall have objects; return for each the pools that may have it.

        The directory remembers the removal for some time: a repeated call returns the same pools,
        and objects that were not dropped there, or are being copied, are refused when they are
        published.

        Raises:
            Unavailable: the directory is away.
        """
        pools: Holders = []
        for first in range(0, len(keys), MAX_KEYS):
            pools += self._directory.remove(keys[first : first + MAX_KEYS], self._removed_s)
        return pools

    def withdraw(self, keys: np.ndarray) -> None:
        """Record that the pool lacks objects; later, if the directory is away.

        They may have been put back meanwhile: then they are published again, even if they are only
        being written: the engine may have published them just before. Only a node of the pool
        knows, so no one else withdraws them.
        """
        self._published.record(Objects(keys, np.zeros(len(keys), np.uint64)))
        try:
            for part in in_parts(keys):
                self._directory.withdraw(self._pool_name, part)
            is_coming = ~self._are_gone(keys)
            if not is_coming.any():
                return
            keys = keys[is_coming]
            ids = self._ids_of(keys)
            self._publish_objects(_present(keys, ids).without(self._leaving_keys()))
            written = Objects(keys, ids).at(ids == 0).without(self._leaving_keys())
            if len(written.keys):  # as copies, which some may be: a removal stays in force
                self._publish(written.keys, is_copy=True)
        except Unavailable as error:
            self._defer(error)

    @contextlib.contextmanager
    def leaving(self, keys: np.ndarray) -> Iterator[np.ndarray]:
        """Withdraw objects that may be removed, and do not publish them meanwhile.

        At the end, those that the pool still has are published again.

        Yields:
            ``[n]`` bool: which other pools have, as far as the directory knows. The others stay
            listed: they must not be removed.

        Raises:
            Unavailable: the directory is away.
        """
        with self._all:  # what a look has found is published before
            self._leaving += (keys,)
        before = np.zeros(len(keys), np.uint64)
        is_withdrawn = np.zeros(len(keys), bool)
        try:
            before = self._ids_of(keys)
            is_withdrawn = self.give_up(self._pool_name, keys)
            yield is_withdrawn
        finally:
            with self._all:  # no look comes in between
                self._leaving = tuple(other for other in self._leaving if other is not keys)
                self._publish_stayed(keys, before)
                self.withdraw_gone(keys[~is_withdrawn])

    def give_up(self, pool_name: str, keys: np.ndarray) -> np.ndarray:
        """Withdraw objects from a pool that may still have them, where the directory knows of
        another that has them: ``[n]`` bool. Whoever removes them meanwhile asks this one, too.

        Raises:
            Unavailable: the directory is away.
        """
        parts = [
            self._directory.give_up(pool_name, part, self._removed_s) for part in in_parts(keys)
        ]
        return np.concatenate([np.empty(0, bool), *parts])

    def withdraw_gone(self, keys: np.ndarray) -> np.ndarray:
        """Withdraw what the directory lists, of which the pool does not have some: ``[n]`` bool."""
        with self._gone:
            is_gone = self._are_gone(keys)
            self.withdraw(keys[is_gone])
        return is_gone

    def _are_gone(self, keys: np.ndarray) -> np.ndarray:
        """Return which objects the pool does not have, nor gets: ``[n]`` bool.

        What others put by its engine is published just before it is stored. So what is being
        written may rightly be listed.
        """
        if self._store is None:
            return np.ones(len(keys), bool)
        return ~self._store.has_keys(keys, or_written=True)

    def _wait_for_withdrawal(self) -> None:
        """Wait until what was seen to be gone before, and may be back, is listed again."""
        if self._gone.locked():
            with self._gone:
                pass

    def publish_all(self) -> None:
        """Bring the directory's entries in line with the pool.

        Raises:
            Unavailable: the directory is away.
        """
        if self._store is None:
            return
        with self._look():
            self.is_stale = False  # from here on updates count again
            present, is_staying = self._list_present()
            listed = self._listed()
            was_published, gone = self._compare(self._published.all(), present)
            is_listed = are_in(present.keys, listed)
            missing = listed[~are_in(listed, present.keys)]
            gone = np.concatenate([self._forget_unlisted(gone, are_in(gone, listed)), missing])
            new = present.at(is_staying & ~is_listed)
            # Objects published before and no longer listed were withdrawn, perhaps by a removal.
            is_old = was_published[is_staying & ~is_listed] | self.copies.are_in(new.ids)
            self._published.record(present.at(is_listed & ~was_published))
            self._publish_difference(gone, new, is_old)

    def publish_changes(self) -> None:
        """Publish and withdraw changes of the pool, whichever process of the host made them.

        This covers processes without a node, which also put and evict objects. Withdrawals by other
        nodes are not noticed here, but by ``publish_all``.

        Raises:
            Unavailable: the directory is away.
        """
        if self._store is None:
            return
        with self._look():
            present, is_staying = self._list_present()
            was_published, gone = self._compare(self._published.all(), present)
            new = present.at(is_staying & ~was_published)
            # Others may have published it, such as a node that put it by this engine. Then it is
            # not published again: it may have been removed since.
            is_listed = np.array(
                [self._pool_name in names for names in self.holders(new.keys)], bool
            )
            self._published.record(new.at(is_listed))
            new = new.at(~is_listed)
            still = np.array([self._pool_name in names for names in self.holders(gone)], bool)
            gone = self._forget_unlisted(gone, still)
            self._publish_difference(gone, new, self.copies.are_in(new.ids))

    def holders(self, keys: np.ndarray) -> Holders:
        """For each key, the names of living pools that have it.

        Raises:
            Unavailable: the directory is away.
        """
        found: Holders = []
        for part in in_parts(keys):
            found += self._directory.holders(part)
        return found

    def match_prefix(self, keys: np.ndarray) -> Holders:
        """For the first keys, up to one that no living pool has, the names of the pools.

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

    @contextlib.contextmanager
    def _look(self) -> Iterator[None]:
        """Compare the whole pool, one thread at a time."""
        with self._all:
            try:
                yield
            except BaseException:
                self.is_stale = True  # so everything is compared the next time
                raise

    def _compare(self, published: Objects, present: Objects) -> tuple[np.ndarray, np.ndarray]:
        """Return which objects present in the pool were published, and the keys of published
        objects that are gone; an object that came only after the pool was listed does not count
        as gone.
        """
        absent = published.at(~np.isin(published.ids, present.ids))
        is_gone = self._ids_of(absent.keys) != absent.ids
        return np.isin(present.ids, published.ids), absent.keys[is_gone]

    def _forget_unlisted(self, gone: np.ndarray, is_listed: np.ndarray) -> np.ndarray:
        """Return which objects that are gone are still listed. The others were removed, and are not
        withdrawn: another may be listed under such a key by now, before it is stored.
        """
        unlisted = gone[~is_listed]
        self._published.record(Objects(unlisted, np.zeros(len(unlisted), np.uint64)))
        return gone[is_listed]

    def _publish_difference(self, gone: np.ndarray, new: Objects, is_old: np.ndarray) -> None:
        """Withdraw what has gone, unless it is back by now; publish what is new."""
        if len(gone) and not (is_gone := self._are_gone(gone)).all():
            back = gone[self.has_keys(gone)]  # what is only being written is looked at again
            self._published.record(Objects(back, np.zeros(len(back), np.uint64)))
            gone = gone[is_gone]
        if len(gone):
            self.withdraw(gone)
        self._publish_objects(new, is_old)

    def _publish_stayed(self, keys: np.ndarray, before: np.ndarray) -> None:
        """Publish what should have left, and was withdrawn for that, but stayed: as old what was
        there before, and as put what was put since.
        """
        ids = self._ids_of(keys)
        is_here = ids != 0
        self._published.record(Objects(keys[~is_here], ids[~is_here]))
        objects = Objects(keys[is_here], ids[is_here])
        put = np.array(tuple(self._put_leaving), np.uint64)
        is_old = (before == ids)[is_here] & ~np.isin(objects.ids, put)
        self._put_leaving.difference_update(objects.ids.tolist())
        if not self._leaving:
            self._put_leaving.clear()  # the rest has gone again
        try:
            self._publish_objects(objects, is_old | self.copies.are_in(objects.ids))
        except Unavailable as error:
            self._defer(error)

    def _publish_objects(self, objects: Objects, is_old: np.ndarray | None = None) -> None:
        """Publish objects: ``[n]`` bool says which were not put just now. None: the copies."""
        if is_old is None:
            is_old = self.copies.are_in(objects.ids)
        if is_old.any():
            self._publish_as(objects.at(is_old), is_copy=True)
            objects = objects.at(~is_old)
        self._publish_as(objects, is_copy=False)

    def _publish_as(self, objects: Objects, *, is_copy: bool) -> None:
        """Publish puts, or copies: copies of removed objects are dropped."""
        for first in range(0, len(objects.keys), MAX_KEYS):
            part = Objects(*(column[first : first + MAX_KEYS] for column in objects))
            answers = self._publish(part.keys, is_copy=is_copy)
            if is_copy:
                self._drop(part.at(answers == REMOVED))
            self._note(part, answers)

    def _publish(self, keys: np.ndarray, *, is_copy: bool) -> np.ndarray:
        """``[n]`` of ``Published``."""
        parts = [
            self._directory.publish(self._pool_name, part, is_copy=is_copy)
            for part in in_parts(keys)
        ]
        answers = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int8), *parts])
        if answers.any() and (answers == NOT_SERVED).any():
            self.is_stale = True  # the membership was over: the whole pool is published again
        return answers

    def _note(self, objects: Objects, answers: np.ndarray) -> None:
        """Record the answers to publishing objects. An object that had gone before, and was
        withdrawn, is withdrawn again.
        """
        listed = objects.at(answers == LISTED) if answers.any() else objects
        self._published.record(listed)
        self.copies.end(listed.ids)
        if len(listed.keys) and (is_gone := self._are_gone(listed.keys)).any():
            self.withdraw(listed.keys[is_gone])

    def _drop(self, objects: Objects) -> None:
        """Remove objects that were removed everywhere else."""
        for (first, second), object_id in zip(
            objects.keys.tolist(), objects.ids.tolist(), strict=True
        ):
            assert self._store is not None
            try:
                self._store.remove_exactly((first, second), object_id)
            except (Unavailable, OSError) as error:  # a disk's, or a stopped process holds the pool
                logger.warning("what was removed is still here: %s", error)
                self.is_stale = True
            else:
                self.copies.end(np.array([object_id], np.uint64))

    def _ids_of(self, keys: np.ndarray) -> np.ndarray:
        return np.zeros(len(keys), np.uint64) if self._store is None else self._store.ids_of(keys)

    def _list_present(self) -> tuple[Objects, np.ndarray]:
        """All objects of the pool, and which of them are not leaving."""
        assert self._store is not None
        copies = self.copies.here()
        present = Objects(*self._store.list_objects())
        self.copies.forget_gone(copies, present.ids)
        return present, ~are_in(present.keys, self._leaving_keys())

    def _leaving_keys(self) -> np.ndarray:
        leaving = self._leaving
        return np.concatenate(leaving) if leaving else NO_KEYS

    def _listed(self) -> np.ndarray:
        parts, cursor = [NO_KEYS], 0
        while True:
            cursor, keys = self._directory.keys_of(self._pool_name, cursor)
            parts.append(keys)
            if cursor == 0:
                return np.concatenate(parts)

    def _defer(self, error: Unavailable) -> None:
        if not self.is_stale:
            logger.warning("the directory is told later: %s", error)
        self.is_stale = True


class Locations:
    """Pools of objects, as the directory last reported them. Thread-safe.

    A remembered location may be outdated, like everything in a directory: a pool that does not have
    the object says so, and then ``find`` is called with ``anew``.

    Args:
        directory: knows where they are.
        valid_s: for how long an answer is remembered.
    """

    def __init__(self, directory: Directory, valid_s: float):
        self._directory = directory
        self._valid_s = valid_s
        self._found: OrderedDict[bytes, tuple[tuple[str, ...], float]] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, keys: np.ndarray, *, anew: bool = False) -> tuple[Holders, list[bool]]:
        """Return where objects are; the directory is asked for those that are not remembered.

        Returns:
            For each key the names of pools, and n of bool: whether that was remembered.

        Raises:
            Unavailable: the directory is away.
        """
        now = time.monotonic()
        pools: Holders = []
        is_remembered: list[bool] = []
        asked: list[int] = []
        unknown: list[bytes] = []
        with self._lock:
            for i, word in enumerate(words_of(keys)):
                names, until = NOWHERE if anew else self._found.get(word, NOWHERE)
                pools.append(names)
                is_remembered.append(now < until)
                if now >= until:
                    asked.append(i)
                    unknown.append(word)
        for first in range(0, len(asked), MAX_KEYS):
            part = asked[first : first + MAX_KEYS]
            answers = self._directory.holders(keys[part])
            for i, names in zip(part, answers, strict=True):
                pools[i] = names
            self._keep(unknown[first : first + MAX_KEYS], answers)
        return pools, is_remembered

    def knows_any(self, keys: np.ndarray) -> bool:
        """Whether it is remembered of any object that a pool has it."""
        now = time.monotonic()
        with self._lock:
            for word in words_of(keys):
                if now < self._found.get(word, NOWHERE)[1]:
                    return True
        return False

    def remember(self, keys: np.ndarray, pools: Holders) -> None:
        """Remember where objects are; objects without a location are forgotten."""
        self._keep(words_of(keys), pools)

    def forget_pool(self, pool: str) -> None:
        """Forget all that a pool was said to have."""
        with self._lock:
            gone = [word for word, (names, _) in self._found.items() if pool in names]
            for word in gone:
                del self._found[word]

    def forget(self, keys: np.ndarray) -> None:
        with self._lock:
            for word in words_of(keys):
                self._found.pop(word, None)

    def _keep(self, words: Sequence[bytes], pools: Holders) -> None:
        until = time.monotonic() + self._valid_s
        with self._lock:
            for word, names in zip(words, pools, strict=True):
                self._found.pop(word, None)
                if names:
                    self._found[word] = (names, until)
            while len(self._found) > MAX_REMEMBERED:
                self._found.popitem(last=False)


def _present(keys: np.ndarray, ids: np.ndarray) -> Objects:
    """Those objects that exist."""
    objects = Objects(keys, ids)
    return objects if ids.all() else objects.at(ids != 0)


def in_parts(keys: np.ndarray) -> Iterator[np.ndarray]:
    """As many keys at a time as a directory takes."""
    for first in range(0, len(keys), MAX_KEYS):
        yield keys[first : first + MAX_KEYS]
