"""A pool that a node's engine serves by itself, and the reports of what others did with it."""

import logging
import threading
from collections.abc import Callable

from mooncake_kernels.errors import Unavailable
from mooncake_kernels.transfer import RedisPublisher, TransferEngine

from ..store import Store

logger = logging.getLogger(__name__)


class ServedPool:
    """Lets other nodes read a pool by key, and put objects if only room has to be found for them.

    Args:
        engine: serves it.
        store: of the pool. The node that puts or removes also tells the directory, unless the
            engine lists what is put; if it dies before that, the next look at the pool does.
        publisher: makes the engine's connection to the directory, or None.
    """

    def __init__(
        self, engine: TransferEngine, store: Store, publisher: Callable[[], RedisPublisher | None]
    ):
        self._store = store
        self._make_publisher = publisher
        self._publisher: RedisPublisher | None = None
        self._renewing = threading.Lock()
        self._may_write = store.is_pool_all and not store.has_quota
        self._served = engine.serve(
            store.pool,
            is_all=store.is_pool_all,
            may_write=self._may_write,
            checksum=store.keeps_checksums,
        )
        self.renew_publisher()

    @property
    def publishes(self) -> bool:
        """Whether the engine lists what others put, if they ask for that."""
        return self.publisher is not None

    @property
    def publisher(self) -> RedisPublisher | None:
        """What the engine lists objects with; None if it cannot."""
        publisher = self._publisher
        return None if publisher is None or publisher.reason else publisher

    def renew_publisher(self, *, anew: bool = False) -> None:
        """Make a publisher, unless there is one that works; ``anew``: even then, since the
        directory may be another server by now.
        """
        if not self._may_write:
            return
        with self._renewing:
            served, old = self._served, self._publisher
            if served is None or (self.publishes and not anew):
                return
            if old is not None and old.reason:
                logger.info("the engine's connection to the directory has ended: %s", old.reason)
            try:
                self._publisher = self._make_publisher()
            except Unavailable as error:
                logger.info("the engine cannot list what others put: %s", error)
                self._publisher = None
            served.let_publish(self._publisher)

    def let_put(self, is_open: bool) -> None:
        """Set whether the engine accepts objects; if not, the node is asked, which also refuses."""
        if self._served is not None:
            self._served.let_put(is_open)

    def look(self) -> bool:
        """Tell the store what others read. Return whether the directory may list what was not
        stored. For one thread at a time.
        """
        if self._served is None:
            return False
        served = self._served.take()
        if len(served.read):
            self._store.note_read(served.read)
        return served.is_listed_in_vain

    def close(self) -> None:
        """Stop serving; current readers finish."""
        if self._served is not None:
            self._served.close()
        self.look()
        with self._renewing:
            if self._served is not None:
                self._served.let_publish(None)
            self._served = self._publisher = None  # they hold the pool, and a connection
