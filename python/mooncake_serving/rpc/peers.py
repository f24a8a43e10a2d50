"""Connections to other engines, opened on first use and shared by all threads."""

import threading
from collections.abc import Callable, Container
from typing import TypeVar

from mooncake_kernels.errors import FailureKind, InvalidArgument, TransferError, Unavailable
from mooncake_kernels.transfer import Peer, TransferEngine

R = TypeVar("R")


class Lease:
    """A use of a peer: a context manager that returns it.

    If a ``TransferError`` ends it, the next user opens the peer again: its process may have been
    restarted under the same name.
    """

    __slots__ = ("_peers", "peer")

    def __init__(self, peers: "Peers", peer: Peer):
        self._peers, self.peer = peers, peer

    def __enter__(self) -> Peer:
        return self.peer

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._peers._end(self, has_failed=isinstance(error, TransferError))

    def end(self, error: BaseException | None = None) -> None:
        """End the use; ``error``: what has ended it. Thread-safe, idempotent."""
        self._peers._end(self, has_failed=isinstance(error, TransferError))


class Peers:
    """Peers of an engine by name: engines, and never files. Thread-safe."""

    def __init__(self, engine: TransferEngine):
        self.engine = engine
        self._peers: dict[str, Peer] = {}
        self._leases: dict[Peer, set[Lease]] = {}  # also of forgotten ones, until they are unused
        self._lock = threading.Lock()
        self._is_closed = False

    def lease(self, name: str, deadline_s: float, *, may_open: bool = True) -> Lease:
        """Begin to use a peer, which is not closed meanwhile.

        Args:
            name: of its engine.
            deadline_s: of connecting.
            may_open: whether it is connected to if it is not yet.

        Raises:
            TransferError: it cannot be reached, or may not be connected to.
        """
        with self._lock:
            if self._is_closed:
                raise TransferError(name, "this side was closed", kind=FailureKind.CLOSED)
            if (peer := self._peers.get(name)) is not None:
                return self._begin(peer)
        if not may_open:
            raise TransferError(name, "it is not connected", kind=FailureKind.DISCONNECTED)
        try:
            opened = self.engine.open(name, allow_file=False, deadline_s=deadline_s)
        except Unavailable as error:  # no such host
            raise TransferError(name, str(error), kind=FailureKind.UNREACHABLE) from error
        except InvalidArgument as error:  # the engine was closed
            raise TransferError(name, str(error), kind=FailureKind.CLOSED) from error
        with self._lock:
            peer = None if self._is_closed else self._peers.setdefault(name, opened)
            lease = None if peer is None else self._begin(peer)
        if peer is not opened:
            opened.close()  # these peers are closed, or another thread came first
        if lease is None:
            raise TransferError(name, "this side was closed", kind=FailureKind.CLOSED)
        return lease

    def use(self, name: str, deadline_s: float, action: Callable[[Peer], R]) -> R:
        """Carry out an action with a peer; if its engine turns out to be gone, once more with the
        one that has its name now.

        Args:
            name: of its engine.
            deadline_s: of connecting.
            action: called with the peer, within a lease.

        Raises:
            TransferError: it cannot be reached, or the action raises it.
        """
        lease = self.lease(name, deadline_s)
        try:
            with lease as peer:
                return action(peer)
        except TransferError as error:
            if error.kind is not FailureKind.GONE:
                raise
        with self.lease(name, deadline_s) as peer:
            return action(peer)

    def is_open(self, name: str) -> bool:
        """Whether a peer is connected to."""
        with self._lock:
            return name in self._peers

    def forget(self, name: str) -> None:
        """Close a peer once no lease uses it."""
        with self._lock:
            peer = self._peers.pop(name, None)
            if peer is None or self._leases.get(peer):
                return
            self._leases.pop(peer, None)
        peer.close()

    def keep(self, names: Container[str]) -> None:
        """Forget all others."""
        with self._lock:
            others = [name for name in self._peers if name not in names]
        for name in others:
            self.forget(name)

    def close(self) -> None:
        """Close all, even those in use, whose transfers fail. Idempotent."""
        with self._lock:
            self._is_closed = True
            peers = list(self._leases)
            self._peers, self._leases = {}, {}
        for peer in peers:
            peer.close()

    def _begin(self, peer: Peer) -> Lease:
        lease = Lease(self, peer)
        self._leases.setdefault(peer, set()).add(lease)
        return lease

    def _end(self, lease: Lease, *, has_failed: bool) -> None:
        peer = lease.peer
        with self._lock:
            if has_failed and self._peers.get(peer.name) is peer:
                del self._peers[peer.name]
            leases = self._leases.get(peer)
            if leases is not None:
                leases.discard(lease)
            if leases or self._peers.get(peer.name) is peer:
                return
            self._leases.pop(peer, None)
        peer.close()
