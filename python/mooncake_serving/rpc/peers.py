"""Connections to other engines, opened on first use and shared by all threads."""

import threading
from collections.abc import Callable, Container
from typing import Any, Protocol, TypeVar

from mooncake_kernels.errors import FailureKind, InvalidArgument, TransferError, Unavailable
from mooncake_kernels.transfer import Peer, TransferEngine

R = TypeVar("R")

NEAR_BYTES = 256 << 10  # up to here a request is faster than memory that is mapped, or a NIC


class Lease:
    """A use of a peer: a context manager that returns it.

    If a ``TransferError`` ends it, the next user opens the peer again: its process may have been
    restarted under the same name.
    """

    __slots__ = ("_peers", "peer")

    peer: Peer

    def __init__(self, peers: "Peers"):
        self._peers = peers

    def __enter__(self) -> Peer:
        return self.peer

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.end(error)

    def locked(self) -> bool:
        """Whether the use goes on, until ``end``: as that of ``Peers.use``, which is a lock."""
        return True

    def end(self, error: BaseException | None = None) -> None:
        """End the use; ``error``: what has ended it. Thread-safe, idempotent."""
        self._peers._end(self.peer, self, has_failed=isinstance(error, TransferError))


class User(Protocol):
    """Uses a peer. Ctrl-C may come before it is taken off the list, but not before a lock is
    released that a ``with`` block holds.
    """

    def locked(self) -> bool: ...


class Peers:
    """Peers of an engine by name: engines, and never files. Thread-safe."""

    def __init__(self, engine: TransferEngine):
        self.engine = engine
        self._peers: dict[str, Peer] = {}
        self._users: dict[Peer, set[User]] = {}  # also of forgotten ones, until they are unused
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
        lease = Lease(self)
        lease.peer = self._begin(name, deadline_s, lease, may_open)
        return lease

    def use(self, name: str, deadline_s: float, action: Callable[..., R], *args: Any) -> R:
        """Carry out an action with a peer; if its engine turns out to be gone, once more with the
        one that has its name now.

        Args:
            name: of its engine.
            deadline_s: of connecting.
            action: called with the peer, which is not closed meanwhile.
            *args: further arguments of it.

        Raises:
            TransferError: it cannot be reached, or the action raises it.
        """
        may_retry = True
        while True:
            with (user := threading.Lock()):
                peer, has_failed = self._begin(name, deadline_s, user), False
                try:
                    return action(peer, *args)
                except TransferError as error:
                    has_failed = True
                    if error.kind is not FailureKind.GONE or not may_retry:
                        raise
                    may_retry = False
                finally:
                    self._end(peer, user, has_failed=has_failed)

    def prefers_rpc(self, peer: Peer, num_bytes: int) -> bool:
        """Whether that many bytes move faster with a request, or its answer, than by address."""
        return peer.transport == "tcp" or (peer.transport != "local" and num_bytes <= NEAR_BYTES)

    def is_open(self, name: str) -> bool:
        """Whether a peer is connected to."""
        with self._lock:
            return name in self._peers

    def forget(self, name: str) -> None:
        """Close a peer once no one uses it."""
        with self._lock:
            self._peers.pop(name, None)
        self._close_unused()

    def keep(self, names: Container[str]) -> None:
        """Forget all others."""
        with self._lock:
            self._peers = {name: peer for name, peer in self._peers.items() if name in names}
        self._close_unused()

    def close(self) -> None:
        """Close all, even those in use, whose transfers fail. Idempotent."""
        with self._lock:
            self._is_closed = True
            peers = list(self._users)
            self._peers, self._users = {}, {}
        for peer in peers:
            peer.close()

    def _begin(self, name: str, deadline_s: float, user: User, may_open: bool = True) -> Peer:
        with self._lock:
            if self._is_closed:
                raise TransferError(name, "this side was closed", kind=FailureKind.CLOSED)
            if (peer := self._peers.get(name)) is not None:
                self._users.setdefault(peer, set()).add(user)
                return peer
        if not may_open:
            raise TransferError(name, "it is not connected", kind=FailureKind.DISCONNECTED)
        try:
            opened = self.engine.open(name, allow_file=False, deadline_s=deadline_s)
        except Unavailable as error:  # no such host
            raise TransferError(name, str(error), kind=FailureKind.UNREACHABLE) from error
        except InvalidArgument as error:  # the engine was closed
            raise TransferError(name, str(error), kind=FailureKind.CLOSED) from error
        with self._lock:
            peer = None if self._is_closed else self._peers.get(name, opened)
            if peer is not None:  # its user first: Ctrl-C may come between the two
                self._users.setdefault(peer, set()).add(user)
                self._peers[name] = peer
        if peer is not opened:
            opened.close()  # these peers are closed, or another thread came first
        if peer is None:
            raise TransferError(name, "this side was closed", kind=FailureKind.CLOSED)
        return peer

    def _end(self, peer: Peer, user: User, *, has_failed: bool) -> None:
        with self._lock:
            is_kept = self._peers.get(peer.name) is peer
            if is_kept and has_failed:
                del self._peers[peer.name]
            self._users.get(peer, set()).discard(user)
        if has_failed or not is_kept:
            self._close_unused()

    def _close_unused(self) -> None:
        """Close the forgotten peers that no one uses any more."""
        with self._lock:
            unused = [
                peer
                for peer, users in self._users.items()
                if self._peers.get(peer.name) is not peer and not any(u.locked() for u in users)
            ]
        for peer in unused:
            peer.close()
            with self._lock:
                self._users.pop(peer, None)
