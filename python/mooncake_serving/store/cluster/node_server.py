"""How a node serves others: its threads, what it does on request, and the pool of its engine."""

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor

from mooncake_kernels.errors import InvalidArgument, TransferError, Unavailable
from mooncake_kernels.transfer import RedisPublisher, TransferEngine

from ...rpc import Receiver, Refused
from ..checks import RETENTIONS
from ..store import Store
from .copies import Copies
from .directory_entries import DirectoryEntries
from .memory import Offers
from .messages import (
    Drop,
    Dropped,
    Message,
    Missed,
    NodeRpc,
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
    decode,
    keys_of,
    reason_of,
)
from .pins import Pins

logger = logging.getLogger(__name__)

PINS_LAST = 2  # times as long as the reader said that it would read
NUM_THREADS = 4
MAX_PENDING = 1024  # requests; further ones are not answered
POLL_S = 0.1  # how long closing may go unnoticed


class PoolHandler:
    """Carries out requests to a pool. Thread-safe.

    Args:
        store: of the pool.
        entries: the pool's entries in the directory.
        pins: what others are reading.
        copies: takes them.
    """

    def __init__(self, store: Store, entries: DirectoryEntries, pins: Pins, copies: Copies):
        self._store = store
        self._entries = entries
        self._copies = copies
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
            return self._copies.pull(sender, request)
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


class NodeServer:
    """Takes the notifications of an engine, all of which are the node's.

    One thread receives, and hands answers to their waiters. Other threads carry out requests, with
    one thread for pulls alone: pulls wait for other nodes, which may wait for a pin here.

    Args:
        engine: whose notifications are taken.
        rpc: this node's requests; also sends its answers.
        handler: of the requests of others.
        answer_s: how long it may take to deliver an answer.
        heard: is called with the name of each sender.
        meet: is called with the name and the life of each that asks for something.
        look: is called several times a second.
    """

    def __init__(
        self,
        engine: TransferEngine,
        rpc: NodeRpc,
        handler: Handler,
        answer_s: float,
        *,
        heard: Callable[[str], object],
        meet: Callable[[str, int], object],
        look: Callable[[], object],
    ):
        self._rpc = rpc
        self._handler = handler
        self._answer_s = answer_s
        self._heard = heard
        self._meet = meet
        self._ends_s = math.inf  # when closing is to be over, of ``time.monotonic``
        self._room = threading.BoundedSemaphore(MAX_PENDING)
        self._serving = ThreadPoolExecutor(NUM_THREADS, "mk-store-serve")
        self._pulling = ThreadPoolExecutor(1, "mk-store-pull")
        self._receiver = Receiver(engine, self._take, look, lambda: POLL_S, "mk-store-receive")

    def close(self) -> None:
        """Stop; requests being carried out finish first, and waiting and later ones are refused."""
        self._ends_s = time.monotonic() + self._answer_s
        self._receiver.close()
        for executor in (self._pulling, self._serving):
            executor.shutdown()

    def _take(self, sender: str, data: bytes) -> None:
        self._heard(sender)
        message = decode(data)
        if isinstance(message, Request):
            self._meet(sender, message.life)
        if isinstance(message, Release) and not message.is_answered:
            self._handler.handle(sender, message)
        elif isinstance(message, Pull):
            self._submit(self._pulling, self._serve, sender, message, time.monotonic())
        elif isinstance(message, Request):
            self._submit(self._serving, self._serve, sender, message, time.monotonic())
        elif not self._rpc.take_response(sender, message) and isinstance(message, Pinned):
            # Too late: the objects that were pinned are not read.
            release = self._rpc.make(
                Release, self._answer_s, token=message.number, is_answered=False
            )
            self._submit(self._serving, self._send, sender, release)

    def _submit(self, executor: Executor, work: Callable[..., object], *args: object) -> None:
        if not self._room.acquire(blocking=False):
            logger.warning("a request of %s is not answered: too many wait", args[0])
            return
        try:
            submitted = executor.submit(work, *args)
        except RuntimeError:  # the interpreter exits: the node leaves before it ends
            self._room.release()
            return
        submitted.add_done_callback(lambda _: self._room.release())

    def _serve(self, sender: str, request: Request, received: float) -> None:
        now = time.monotonic()
        if now > received + request.deadline_ms / 1000 or now > self._ends_s:
            return  # the sender has given it up, or it takes too long to refuse them all
        try:
            answer: Response | None = Refused(request.number, "the node is closed")
            if self._ends_s == math.inf:
                answer = self._handler.handle(sender, request)
            if answer is not None:
                self._send(sender, answer)
        except (RuntimeError, ValueError, OSError) as error:  # ours, the pool's, the system's
            self._send(sender, Refused(request.number, reason_of(error)))

    def _send(self, name: str, message: Message) -> None:
        try:
            self._rpc.send(name, message, self._answer_s)
        except TransferError as error:
            logger.info("%s is not told: %s", name, error)


class PoolService:
    """Lets other nodes read a pool by key, and put objects if only room has to be found for them.

    Args:
        engine: serves it.
        store: of the pool. The node that puts or removes also tells the directory, unless the
            engine lists what is put; if it dies before that, the next look at the pool does.
        publisher: makes the engine's connection to the directory, or None.

    Attributes:
        publisher: what the engine lists objects with, unless it has ended: see its ``reason``. None
            if it lists nothing.
    """

    def __init__(
        self, engine: TransferEngine, store: Store, publisher: Callable[[], RedisPublisher | None]
    ):
        self._store = store
        self._make_publisher = publisher
        self.publisher: RedisPublisher | None = None
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
        publisher = self.publisher
        return publisher is not None and not publisher.reason

    def renew_publisher(self, *, anew: bool = False) -> None:
        """Make a publisher, unless there is one that works; ``anew``: even then, since the
        directory may be another server by now.
        """
        if not self._may_write:
            return
        with self._renewing:
            served, old = self._served, self.publisher
            if served is None or (self.publishes and not anew):
                return
            if old is not None and old.reason:
                logger.info("the engine's connection to the directory has ended: %s", old.reason)
            try:
                self.publisher = self._make_publisher()
            except Unavailable as error:
                logger.info("the engine cannot list what others put: %s", error)
                self.publisher = None
            served.let_publish(self.publisher)

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
            self._served = self.publisher = None  # they hold the pool, and a connection
