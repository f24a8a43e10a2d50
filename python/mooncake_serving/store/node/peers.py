"""Connections to other nodes, opened on first use and shared by all threads."""

import contextlib
import threading
from collections.abc import Container, Iterator
from dataclasses import dataclass

from mooncake_kernels.errors import TransferError
from mooncake_kernels.transfer import Peer, TransferEngine


@dataclass
class _Entry:
    peer: Peer
    num_users: int = 0
    is_forgotten: bool = False  # closed by its last user


class Peers:
    """Peers of an engine by name. Thread-safe."""

    def __init__(self, engine: TransferEngine):
        self._engine = engine
        self._entries: dict[str, _Entry] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    @contextlib.contextmanager
    def lease(self, name: str, deadline_s: float) -> Iterator[Peer]:
        """Use a peer. If it fails meanwhile, the next user opens it again.

        Raises:
            TransferError: it cannot be reached, or it failed in the ``with`` block.
            Unavailable: its name cannot be looked up.
        """
        entry = self._take(name) or self._open(name, deadline_s)
        try:
            yield entry.peer
        except TransferError:
            self._forget(name, entry)  # the node may have been restarted under the same name
            raise
        finally:
            self._give_back(entry)

    def keep(self, names: Container[str]) -> None:
        """Close all others, once they are unused."""
        with self._lock:
            others = [(name, entry) for name, entry in self._entries.items() if name not in names]
        for name, entry in others:
            self._forget(name, entry)

    def close(self) -> None:
        """Close all, even those in use, whose transfers fail. Idempotent."""
        with self._lock:
            self._is_closed = True
            entries, self._entries = list(self._entries.values()), {}
        for entry in entries:
            entry.peer.close()

    def _take(self, name: str) -> _Entry | None:
        with self._lock:
            if (entry := self._entries.get(name)) is not None:
                entry.num_users += 1
            return entry

    def _open(self, name: str, deadline_s: float) -> _Entry:
        peer = self._engine.open(name, deadline_s=deadline_s)
        with self._lock:
            entry = None
            if not self._is_closed:
                entry = self._entries.setdefault(name, _Entry(peer))
                entry.num_users += 1
        if entry is None or entry.peer is not peer:
            peer.close()  # the node is closed, or another thread came first
        if entry is None:
            raise TransferError(name, "the node was closed")
        return entry

    def _forget(self, name: str, entry: _Entry) -> None:
        with self._lock:
            if self._entries.get(name) is entry:
                del self._entries[name]
            entry.is_forgotten = True
            is_unused = entry.num_users == 0
        if is_unused:
            entry.peer.close()

    def _give_back(self, entry: _Entry) -> None:
        with self._lock:
            entry.num_users -= 1
            is_last = entry.is_forgotten and entry.num_users == 0
        if is_last:
            entry.peer.close()
