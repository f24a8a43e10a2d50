"""How a node carries out the requests of other nodes."""

from mooncake_kernels.errors import InvalidArgument

from ..object_list import RETENTIONS
from ..store import Store
from .directory_entries import DirectoryEntries
from .messages import (
    Drop,
    Dropped,
    Missed,
    Pin,
    Pinned,
    Pull,
    Release,
    Released,
    Request,
    Response,
    Retain,
    Retained,
    Stat,
    Stats,
    keys_of,
)
from .pins import Pins
from .pulls import Offers, Puller

PINS_LAST = 2  # times as long as the reader said that it would read


class PoolHandler:
    """Carries out requests to a pool. Thread-safe.

    Args:
        store: of the pool.
        entries: the pool's entries in the directory.
        pins: what others are reading.
        puller: takes copies.
    """

    def __init__(self, store: Store, entries: DirectoryEntries, pins: Pins, puller: Puller):
        self._store = store
        self._entries = entries
        self._puller = puller
        self.pins = pins

    def pin(self, sender: str, request: Pin) -> Pinned:
        found = self.pins.pin(
            (sender, request.life, request.number),
            keys_of(request.keys),
            verify=request.verify,
            keep_s=PINS_LAST * request.deadline_ms / 1000,
        )
        return Pinned(request.number, found.tobytes())

    def release(self, sender: str, request: Release) -> bool:
        return self.pins.release((sender, request.life, request.token))

    def drop(self, request: Drop) -> Dropped:
        keys = keys_of(request.keys)
        count = sum(self._store.remove_key((first, second)) for first, second in keys.tolist())
        self._entries.withdraw(keys)
        return Dropped(request.number, count)

    def retain(self, request: Retain) -> Retained:
        keys, retention = keys_of(request.keys).tolist(), RETENTIONS[request.retention]
        count = sum(self._store.pool.retain((first, second), retention) for first, second in keys)
        return Retained(request.number, count)

    def handle(self, sender: str, request: Request) -> Response | None:
        """Carry out another node's request; None: it is not answered."""
        if isinstance(request, Pin):
            return self.pin(sender, request)
        if isinstance(request, Pull):
            return self._puller.pull(sender, request)
        if isinstance(request, Drop):
            return self.drop(request)
        if isinstance(request, Retain):
            return self.retain(request)
        if isinstance(request, Stat):
            return Stats(request.number, self._store.stats())
        if isinstance(request, Missed):
            self._entries.withdraw_gone(keys_of(request.keys))
            return None
        raise InvalidArgument(f"answer: request must be a known one, got {request!r}")


class Handler:
    """Carries out requests to a node, which may have no pool. Thread-safe.

    Args:
        offers: memory that others were asked to read.
        pool: of its pool, if it has one.
    """

    def __init__(self, offers: Offers, pool: PoolHandler | None):
        self._offers = offers
        self._pool = pool

    def handle(self, sender: str, request: Request) -> Response | None:
        """Carry out another node's request; None: it is not answered.

        Raises:
            InvalidArgument: it needs a pool, and there is none.
        """
        if isinstance(request, Release):
            return Released(request.number, self._release(sender, request))
        if self._pool is not None:
            return self._pool.handle(sender, request)
        if isinstance(request, Stat):
            return Stats(request.number, None)
        raise InvalidArgument("answer: request must be one to a node without a pool")

    def _release(self, sender: str, request: Release) -> bool:
        if self._offers.end(request.token, sender):
            return True
        return self._pool is not None and self._pool.release(sender, request)
