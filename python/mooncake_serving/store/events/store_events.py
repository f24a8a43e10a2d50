"""Publishes all that happens to a store's pool and its disk, whichever process does it."""

import logging
import os
import threading

import numpy as np

from mooncake_kernels.closeable import Closeable
from mooncake_kernels.errors import InvalidArgument, Unavailable, shown
from mooncake_kernels.pool import PoolChanges

from ..store import Store
from ..tiered import TieredStore
from .messages import DISK, MEDIUM, BlockRemoved, BlockStored
from .publisher import EventPublisher

logger = logging.getLogger(__name__)

MAX_INTERVAL_S = 3600
NOTHING = PoolChanges(*np.empty((2, 0, 2), np.uint64))


class StoreEvents(Closeable):
    """Publishes which objects come to a pool and to the disk behind it, and go, whichever process
    of the host stores, evicts or removes them. A context manager; close it before the store.

    It begins with a snapshot of what is there. Then a thread looks at intervals for what has
    changed, which costs time for each change, and next to nothing if there is none. Each change is
    published once; an object that came and went between two looks is not.

    What moves to the disk is published there before it is withdrawn from memory. It stays on the
    disk when it is read, so it is published in both then.

    Args:
        store: whose pool, and disk if it is a ``TieredStore``.
        publisher: by which; closed by the caller, afterwards.
        interval_s: how long after a look the next one begins: so late are events at most, but for
            what is removed from the disk: that is published once the disk has recorded it.

    Raises:
        InvalidArgument: an argument is wrong.
        TimeoutError: a stopped process holds the pool.
    """

    def __init__(self, store: Store, publisher: EventPublisher, *, interval_s: float = 0.1):
        if not isinstance(store, Store):
            raise InvalidArgument(f"StoreEvents: store must be a Store, got {shown(store)}")
        if not isinstance(publisher, EventPublisher):
            raise InvalidArgument(
                f"StoreEvents: publisher must be an EventPublisher, got {shown(publisher)}"
            )
        if not (isinstance(interval_s, int | float) and 0 < interval_s <= MAX_INTERVAL_S):
            raise InvalidArgument(
                f"StoreEvents: interval_s must be above 0 and at most {MAX_INTERVAL_S}, "
                f"got {interval_s!r}"
            )
        self._publisher = publisher
        self._interval_s = interval_s
        self._pool = store.pool.watch()
        self._disk = store.tier.watch() if isinstance(store, TieredStore) else None
        self._pid = os.getpid()
        self._closing = threading.Event()
        try:
            self._look(is_first=True)
        except BaseException:
            self._unwatch_disk()
            raise
        self._thread = threading.Thread(target=self._follow, name="store-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publish what has changed until now, then stop. Idempotent.

        In a forked child it does nothing: the thread does not exist there.
        """
        if os.getpid() == self._pid:
            self._closing.set()
            self._thread.join()

    def _follow(self) -> None:
        try:
            self._look_repeatedly()
        finally:  # or the disk would go on collecting changes for no one
            self._unwatch_disk()

    def _look_repeatedly(self) -> None:
        is_last = was_late = False
        while not is_last:
            is_last = self._closing.wait(self._interval_s)
            try:
                self._look()
            except InvalidArgument as error:  # the pool was closed and this was not
                logger.warning("events of a store end: %s", error)
                break
            except (TimeoutError, Unavailable) as error:
                if not was_late:
                    logger.warning("events of a store are late: %s", error)
                was_late = True
            else:
                was_late = False

    def _look(self, *, is_first: bool = False) -> None:
        pool = self._pool.look()  # first: what has left it for the disk is there by now
        disk = NOTHING if self._disk is None else self._disk.look()
        self._publisher.publish(
            (BlockStored, disk.stored, DISK),
            (BlockRemoved, pool.removed, MEDIUM),
            (BlockStored, pool.stored, MEDIUM),
            (BlockRemoved, disk.removed, DISK),
            is_snapshot=is_first,
        )

    def _unwatch_disk(self) -> None:
        if self._disk is not None:
            self._disk.close()
