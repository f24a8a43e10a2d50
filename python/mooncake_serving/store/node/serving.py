"""A pool that a node's engine serves by itself, and the reports of what others did with it."""

from mooncake_kernels.transfer import TransferEngine

from ..observer import ObservedPool
from ..store import Store


class Serving:
    """Lets other nodes read a pool by key, and put objects if only room has to be found for them.

    Args:
        engine: serves it.
        store: of the pool. The node that puts or removes also tells the directory; if it dies
            before that, the next look at the pool does.
    """

    def __init__(self, engine: TransferEngine, store: Store):
        self._store = store
        self._served = engine.serve(
            store.pool,
            is_all=store.is_pool_all,
            may_write=store.is_pool_all and not store.has_quota,
            checksum=store.keeps_checksums,
        )

    def let_put(self, is_open: bool) -> None:
        """Set whether the engine accepts objects; if not, the node is asked, which also refuses."""
        if self._served is not None:
            self._served.let_put(is_open)

    def look(self) -> None:
        """Tell the store and the pool's observers what others did. For one thread at a time."""
        if self._served is None:
            return
        served = self._served.take()
        if len(served.read):
            self._store.note_read(served.read)
        if isinstance(self._store.pool, ObservedPool):
            self._store.pool.tell_served(served)

    def close(self) -> None:
        """Stop serving; current readers finish."""
        if self._served is not None:
            self._served.close()
        self.look()
        self._served = None  # it holds the pool
