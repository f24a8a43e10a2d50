"""A process that takes part in a store over several hosts."""

import atexit
import logging
import os
import threading
import time
import weakref
from contextlib import ExitStack
from types import UnionType
from typing import Any

import numpy as np

from mooncake_kernels.closeable import Closeable
from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.transfer import RedisPublisher, Region, TransferEngine

from ...rpc import Peers
from ..directory import Directory, Member
from ..store import Store
from .claims import Admission, Claims
from .copies import Copies
from .directory_entries import DirectoryEntries, Locations
from .membership import CachedStats, Lives, Membership, PeerBackoff, host_name, pool_name
from .memory import Offers, RegisteredMemory
from .messages import NodeRpc
from .node_client import NodeClient
from .node_server import Handler, NodeServer, PoolHandler, PoolService
from .pinned_reads import PinnedReads
from .pins import Pins
from .reads import Reads

logger = logging.getLogger(__name__)

STATS_TTLS = 0.1  # how long a renewal waits for the pool's numbers
PAUSE_S = 0.005  # while others finish their reads
MAX_S = 600  # seconds, of anything
REMOVED_S = 300  # longer than any copy is in flight
REMOVED_TTLS = 15  # longer than it takes until a node compares its pool with the directory
MAX_SLOTS = 1024
MAX_SLOT_BYTES = 1 << 30

# A node takes all notifications of its engine, so that each has one node at most.
_taken: weakref.WeakSet[TransferEngine] = weakref.WeakSet()
_lock = threading.Lock()
# Nodes that are open when the interpreter exits leave then, as if they had been closed. Their
# engines, stores and directories are closed later, or not at all. In a forked child they are its
# parent's.
_open: "weakref.WeakSet[Node]" = weakref.WeakSet()


class Node(Closeable):
    """Takes part in a store over several hosts: serves its pool to others, and uses theirs.
    Thread-safe. A context manager.

    Several processes may serve one pool, each with a node of its own. The caller owns store, engine
    and directory, and closes them after the node. The node takes all notifications of the engine,
    and everything that it serves.

    Args:
        store: of the pool; None: this process has none, and still reads and writes.
        engine: by which others read the pool, which is registered with it.
        directory: knows the other members.
        host: name of the machine, by which copies are spread; None: its host name and Linux's id of
            this boot.
        ttl_s: how long the others wait for a node that shows no sign of life.
        answer_s: how long a node may take to answer.
        read_s: how long it may take to read what a holder has pinned at once.
        staging_slots: how many parts of objects may be in flight at once to memory that is not
            registered.
        slot_bytes: size of such a part.

    Attributes:
        name: of the engine.
        is_open: whether it was not closed, and is of this process, not of its parent.
        host: see above.
        pool_name: name of the pool in the directory, the same for all that serve it; "" for none.
        directory: see above.
        membership: of this node, and who else takes part.
        locations: where objects are.
        admission: whether the pool accepts objects, and whether any are being put.
        backoff: nodes that were asked and have not answered in time.
        client: requests to other nodes.
        entries: of the pool in the directory.
        claims: which objects this node may write.
        memory: what is registered with the engine.
        reads: of objects of other pools.
        copies: of such objects in the pool; None: there is no pool.

    Raises:
        InvalidArgument: an argument is wrong, or the engine has a node, or has registered the pool.
        Unavailable: the directory does not answer.
    """

    def __init__(
        self,
        store: Store | None,
        engine: TransferEngine,
        directory: Directory,
        *,
        host: str | None = None,
        ttl_s: float = 10.0,
        answer_s: float = 5.0,
        read_s: float = 30.0,
        staging_slots: int = 8,
        slot_bytes: int = 4 << 20,
    ):
        if not isinstance(store, Store | None):
            raise InvalidArgument(f"Node: store must be a Store or None, got {store!r:.80}")
        if not isinstance(engine, TransferEngine):
            raise InvalidArgument(f"Node: engine must be a TransferEngine, got {engine!r:.80}")
        _check_range("ttl_s", ttl_s, MAX_S)
        _check_range("answer_s", answer_s, MAX_S)
        _check_range("read_s", read_s, MAX_S)
        _check_range("staging_slots", staging_slots, MAX_SLOTS, int)
        _check_range("slot_bytes", slot_bytes, MAX_SLOT_BYTES, int)
        self.name = engine.name
        self.host = host_name() if host is None else host
        self.store = store
        self.directory = directory
        self.pool_name = "" if store is None else pool_name(store.pool.path)
        self.admission = Admission()
        self.is_open = True
        self._ttl_s = ttl_s
        self._answer_s = answer_s
        self._is_closed = False
        self._engine = engine
        self.memory = RegisteredMemory(engine, staging_slots, slot_bytes)
        _take_engine(engine)
        with ExitStack() as opened:
            opened.callback(_taken.discard, engine)
            self._open(opened, read_s)
            self._opened = opened.pop_all()
        _open.add(self)

    def _open(self, opened: ExitStack, read_s: float) -> None:
        """Join; ``opened`` closes in reverse what has been opened by then."""
        store, engine, directory = self.store, self._engine, self.directory
        ttl_s, answer_s = self._ttl_s, self._answer_s
        opened.callback(self.memory.close)
        if store is not None:
            self.memory.register(store.pool.buffer)
        removed_s = float(max(REMOVED_S, REMOVED_TTLS * ttl_s))
        self.entries = DirectoryEntries(directory, self.pool_name, store, removed_s)
        self.membership = Membership(
            directory,
            self.entries,
            self._describe,
            ttl_s,
            self._meet_member,
            self._on_members,
            self._on_beat,
            self._on_rejoin,
        )
        self.locations = Locations(directory, ttl_s)
        self.claims = Claims(directory, self.name, self.entries, self.membership.rejoin)
        self.backoff = PeerBackoff(answer_s)
        self._peers = Peers(engine)
        opened.callback(self._peers.close)
        self._rpc = NodeRpc(self._peers)
        self._senders, self._lives = Lives(), Lives()
        offers = Offers()
        self.client = NodeClient(
            self._rpc, self._peers, self.backoff, offers, self.memory, answer_s, read_s
        )
        self.reads = Reads(
            store,
            self.entries,
            self.locations,
            self.membership,
            self._peers,
            self.client,
            PinnedReads(self._rpc, self._peers, self.memory, self.backoff, answer_s, read_s),
            self.backoff,
            host=self.host,
            answer_s=answer_s,
            read_s=read_s,
        )
        opened.callback(self.reads.close)
        self._stats: CachedStats | None = None
        self.copies: Copies | None = None
        self._pins: Pins | None = None
        self._served: PoolService | None = None
        handler = None if store is None else self._make_handler(opened, store)
        self._server = NodeServer(
            engine,
            self._rpc,
            Handler(offers, handler),
            answer_s,
            heard=self.backoff.heard,
            meet=self._meet_sender,
            look=self._look,
        )
        opened.callback(self._server.close)
        opened.callback(self._rpc.close)
        self.membership.join()

    def members(self, *, anew: bool = False) -> list[Member]:
        """Return the members by name, as last reported; ``anew``: ask the directory now.

        Raises:
            Unavailable: it is asked, and does not answer.
        """
        members = self.membership.refresh() if anew else self.membership.members
        return [member for _, member in sorted(members.items())]

    def set_draining(self, is_draining: bool) -> None:
        """Set whether the node accepts no new objects, and puts its own into other pools.

        Raises:
            Unavailable: the directory does not answer; it is notified later.
        """
        if not self.is_open:
            raise self.not_open()
        self.admission.set_open(not is_draining)
        if self._served is not None:
            self._served.let_put(not is_draining)
        self.membership.announce()

    @property
    def is_draining(self) -> bool:
        """Whether it accepts no new objects, see ``set_draining``."""
        return not self.admission.is_open

    @property
    def publisher(self) -> RedisPublisher | None:
        """What lists objects of the pool in the directory; None if nothing can."""
        publisher = None if self._served is None else self._served.publisher
        return None if publisher is None or publisher.reason else publisher

    def member(self, name: str) -> Member | None:
        """Return a member; the directory is asked if it is not known yet.

        Raises:
            Unavailable: the directory does not answer.
        """
        return self.membership.members.get(name) or self.membership.refresh().get(name)

    def has_served(self, name: str) -> bool:
        """Whether a member of that name with a pool was ever reported, even if it is not now."""
        return self.membership.has_served(name)

    def register(self, buffer: Any) -> Region:
        """Register memory, so that objects are read into it, and written from it, without a copy.

        Returns:
            A region; ``deregister`` it before the memory is freed.

        Raises:
            InvalidArgument: as ``TransferEngine.register``.
        """
        return self.memory.register(buffer)

    def deregister(self, region: Region) -> None:
        self.memory.deregister(region)

    def num_readers(self) -> int:
        """How many reads of other nodes have pinned objects of this pool."""
        return 0 if self._pins is None else self._pins.num_tokens()

    def not_open(self) -> InvalidArgument:
        """The error of a call after ``close``, or in a forked child."""
        state = "closed" if self._is_closed else "its parent's"
        return InvalidArgument(f"Node: node must be open, got {self.name}, which is {state}")

    def close(self) -> None:
        """Leave. Current readers have ``answer_s`` to finish; this node's own requests fail.
        Idempotent. A node that is left open leaves when the interpreter exits.

        In a forked child it has no effect.
        """
        if not self.is_open:
            return
        self._is_closed, self.is_open = True, False
        _open.discard(self)
        self.membership.close()
        until = time.monotonic() + self._answer_s
        while self.num_readers() and time.monotonic() < until:
            time.sleep(PAUSE_S)
        self._opened.close()

    def _make_handler(self, opened: ExitStack, store: Store) -> PoolHandler:
        """Make the handler of requests to the pool, whose removals are withdrawn from now on."""
        store.on_evicted.append(self.entries.withdraw)
        opened.callback(store.on_evicted.remove, self.entries.withdraw)
        self._stats = CachedStats(store, STATS_TTLS * self._ttl_s)
        opened.callback(self._stats.close)
        self._pins = Pins(store, self.memory.show, self._drop_damaged)
        opened.callback(self._pins.close)
        if store.pool.device is None:
            self._served = PoolService(
                self._engine, store, lambda: self.directory.publisher(self.pool_name)
            )
            opened.callback(self._served.close)
        self.copies = Copies(
            store,
            self.admission,
            self.entries,
            self.locations,
            self.reads,
            self._rpc,
            self._peers,
            self.memory,
            self.member,
            self._answer_s,
        )
        return PoolHandler(store, self.entries, self._pins, self.copies)

    def _look(self) -> None:
        if self._served is not None and self._served.look():
            self.entries.is_stale = True

    def _describe(self) -> Member:
        if self._stats is None:
            return Member(self.name, self.host, life=self._rpc.life)
        stats = self._stats.get()
        return Member(
            self.name,
            self.host,
            self.pool_name,
            stats.capacity_bytes,
            stats.free_bytes,
            self.is_draining,
            publishes=self._served is not None and self._served.publishes,
            life=self._rpc.life,
        )

    def _meet_sender(self, name: str, life: int) -> None:
        """Connect anew to a node in whose place there is another one, as it says itself."""
        if self._senders.meet(name, life):
            self._peers.forget(name)

    def _meet_member(self, member: Member, before: Member | None) -> None:
        """Drop what is kept of a node in whose place there is another one."""
        name = member.name
        if self._lives.meet(name, member.life):
            logger.info("%s was restarted", name)
            self._peers.forget(name)
            self.backoff.heard(name)
            self._rpc.fail_to(name)
            if before is not None and before.pool:
                self.locations.forget_pool(before.pool)

    def _on_members(self, members: dict[str, Member]) -> None:
        self._rpc.give_up(members, self._ttl_s)
        self._peers.keep(members)
        self._senders.keep(members)
        self._lives.keep(members)
        if self._pins is not None:
            self._pins.release_gone(members, self._ttl_s)
        self.claims.settle_left()

    def _on_beat(self) -> None:
        if self._pins is not None:
            self._pins.release_late()
        if self._served is not None:
            self._served.renew_publisher()

    def _on_rejoin(self) -> None:
        if self._served is not None:
            self._served.renew_publisher(anew=True)

    def _drop_damaged(self, keys: np.ndarray) -> None:
        if self.store is not None:
            for first, second in keys.tolist():
                self.store.remove_damaged((first, second))
            self.entries.withdraw(keys)


def _check_range(
    argument: str, value: float, high: int, kind: type | UnionType = int | float
) -> None:
    if not isinstance(value, kind) or not 0 < value <= high:
        what = "an integer" if kind is int else "a number"
        raise InvalidArgument(
            f"Node: {argument} must be {what} above 0 and at most {high}, got {value!r}"
        )


def _take_engine(engine: TransferEngine) -> None:
    """Record that an engine has a node.

    Raises:
        InvalidArgument: it has one already.
    """
    with _lock:
        if engine in _taken:
            raise InvalidArgument(
                f"Node: engine must be without a node, got {engine.name}, which has one"
            )
        _taken.add(engine)


def _leave_to_parent() -> None:
    for node in list(_open):
        node.is_open = False


os.register_at_fork(after_in_child=_leave_to_parent)


@atexit.register
def _close_all() -> None:
    for node in list(_open):
        try:
            node.close()
        except Exception as error:  # noqa: BLE001 - the others are closed, too
            logger.info("a node is not closed: %s", error)
