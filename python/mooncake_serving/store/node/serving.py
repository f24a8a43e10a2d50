"""A pool that a node's engine serves by itself, and who must know what others do with it."""

from mooncake_kernels.transfer import TransferEngine

from ..observer import ObservedPool
from ..store import Store


class Serving:
    """Lets other nodes read a pool by key, and put where nothing but room has to be asked for.

    Args:
        engine: which serves it.
        store: of the pool. Who puts or removes tells the directory, too; if he dies before that,
            the next look at what the pool has does.
    """

    def __init__(self, engine: TransferEngine, store: Store):
        self._engine = engine
        self._store = store
        self._served = engine.serve(
            store.pool,
            is_all=store.is_pool_all,
            may_write=store.is_pool_all and not store.has_quota,
            checksum=store.keeps_checksums,
        )

    def let_put(self, is_open: bool) -> None:
        """Say whether the engine takes objects; if not, the node is asked, which says no, too."""
        if self._served is not None:
            self._served.let_put(is_open)

    def look(self) -> None:
        """Tell the store and the pool's observers what others did. Of one thread at a time."""
        if self._served is None:
            return
        served = self._served.take()
        if len(served.read):
            self._store.note_read(served.read)
        if isinstance(self._store.pool, ObservedPool):
            self._store.pool.tell_served(served)

    def close(self) -> None:
        """Serve no more; who reads just now reads to the end."""
        self._engine.serve(None)
        self.look()
        self._served = None  # which holds the pool
