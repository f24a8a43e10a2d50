"""Other agents: opened in the background, requested from in order, forgotten when they are lost."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np

from mooncake_kernels import config
from mooncake_kernels.errors import (
    FailureKind,
    InvalidArgument,
    TransferError,
    Unavailable,
)
from mooncake_kernels.transfer import Peer, TransferEngine

from . import dropped
from .descriptors import nixl_mem_t
from .errors import nixlInvalidParamError, nixlNotAllowedError, nixlNotFoundError
from .logging import get_logger, shown
from .memory import Memory, Ranges
from .metadata import AgentMetadata, as_array, as_bytes, this_machine

MAX_OPEN_S = 10.0  # for connecting; a transfer that waits for it fails then
_log = get_logger(__name__)
_NO_ROWS = np.empty((0, 3), np.uint64)
_MEMORY = (nixl_mem_t.DRAM_SEG, nixl_mem_t.VRAM_SEG)


class Request(Protocol):
    """What waits for a peer to be opened. Both calls return soon, and do not raise."""

    def start(self, peer: Peer) -> None:
        """Submit it."""

    def fail(self, error: Exception) -> None:
        """End it: the peer cannot be opened."""


class Remote:
    """An agent whose memory this one may use. Thread-safe.

    It is opened when it is first needed, by a thread of its own, and again after it has failed.
    Requests wait for that in order; no caller does.

    Attributes:
        name: of the agent.
        address: of its engine; empty if only its memory is known.
        is_known: whether it was neither removed nor lost.
        peer: what requests go to, once nothing waits for it any more; else None.
    """

    def __init__(self, engine: TransferEngine, name: str, address: str = "", machine: str = ""):
        self.name = name
        self.address = address
        self.is_known = True
        self.peer: Peer | None = None
        self._machine = machine
        self._engine = engine
        self._lock = threading.Lock()
        self._is_opening = False
        self._is_closed = False
        self._waiting: deque[Request] = deque()
        self._rows: dict[nixl_mem_t, np.ndarray] = {}
        self._ranges: dict[nixl_mem_t, Ranges] = {}

    def learn(self, metadata: AgentMetadata) -> None:
        """Take over what metadata says.

        Raises:
            nixlNotAllowedError: its engine has another address than is known.
        """
        with self._lock:
            if self.address and metadata.address not in ("", self.address):
                raise nixlNotAllowedError(
                    f"add_remote_agent: metadata of {self.name} must have the address "
                    f"{self.address} until remove_remote_agent, got {metadata.address!r:.80}"
                )
            if metadata.address:
                self.address, self._machine = metadata.address, metadata.machine
            rows = {nixl_mem_t[kind]: as_array(data) for kind, data in metadata.ranges.items()}
            for kind in _MEMORY:
                known = self._rows.get(kind, _NO_ROWS) if metadata.is_partial else _NO_ROWS
                every = np.concatenate([known, rows.get(kind, _NO_ROWS)])
                self._rows[kind], self._ranges[kind] = every, Ranges(every)

    def ranges(self, kind: nixl_mem_t) -> Ranges:
        """What it has registered, as of its metadata."""
        return self._ranges[kind]

    def post(self, request: Request) -> None:
        """Start a request, now or when the peer is open."""
        peer = self.peer
        error: Exception | None = None
        if peer is None:
            with self._lock:
                peer = self.peer
                if peer is None and not self._is_closed:
                    try:
                        self._open_in_background()
                    except RuntimeError as failure:  # there is no thread left
                        error = failure
                    else:
                        self._waiting.append(request)
                        return
        if peer is None:
            request.fail(error or self._closed_error())
        else:
            request.start(peer)

    def connect(self) -> None:
        """Begin to open it."""
        with self._lock:
            if self.peer is None and not self._is_closed:
                self._open_in_background()

    def close(self) -> None:
        """Fail what is requested from it, and disconnect. Idempotent."""
        with self._lock:
            self._is_closed = True
            peer, self.peer = self.peer, None
            waiting, self._waiting = self._waiting, deque()
        for request in waiting:
            request.fail(self._closed_error())
        if peer is not None:
            peer.close()

    def _closed_error(self) -> TransferError:
        return TransferError(self.name, "the agent was removed", kind=FailureKind.CLOSED)

    def _open_in_background(self) -> None:
        if not self._is_opening:
            name = f"nixl-open-{self.name[:40]}"
            threading.Thread(target=self._open, name=name, daemon=True).start()
            self._is_opening = True  # the thread looks at it under the lock

    def _open(self) -> None:
        dropped.JOBS.enter()
        try:
            peer = self._opened()
        except Exception as error:  # noqa: BLE001 - for those that wait, whatever it is
            with self._lock:
                self._is_opening = False
                waiting, self._waiting = self._waiting, deque()
            for request in waiting:
                request.fail(error)
            return
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_opening = False
                    is_closed = self._is_closed
                    self.peer = None if is_closed else peer
                    break
                request = self._waiting.popleft()
            try:
                request.start(peer)
            except Exception as error:  # noqa: BLE001 - of that request alone, whatever it is
                _log.exception("a request to agent %s failed", shown(self.name))
                request.fail(error)
        if is_closed:
            peer.close()

    def _opened(self) -> Peer:
        deadline_s = min(MAX_OPEN_S, config.current().deadline_s)
        try:
            return self._engine.open(self.address, allow_file=False, deadline_s=deadline_s)
        except (TransferError, Unavailable, InvalidArgument) as error:
            cause, kind = str(error), getattr(error, "kind", FailureKind.UNREACHABLE)
            if self._machine not in ("", this_machine()) and self.address.startswith("127."):
                cause += "; it is on another machine, and must be given an address there by "
                cause += "MOONCAKE_KERNELS_LISTEN_HOST"
            raise TransferError(self.name, cause, kind=kind) from None


class Remotes:
    """The agents that an agent knows, and itself, by name. Thread-safe."""

    def __init__(self, engine: TransferEngine, name: str, memory: Memory):
        self.name = name
        self._engine = engine
        self._memory = memory
        self._lock = threading.Lock()
        self._known: dict[str, Remote] = {}

    def metadata(self, ranges: dict[nixl_mem_t, np.ndarray] | None = None) -> AgentMetadata:
        """What others need to know of this agent: all, or these ranges only."""
        every = ranges
        if every is None:
            every = {kind: self._memory.ranges(kind).rows() for kind in _MEMORY}
        return AgentMetadata(
            self.name,
            self._engine.name,
            this_machine(),
            ranges is not None,
            {kind.name: as_bytes(rows) for kind, rows in every.items()},
        )

    def add(self, metadata: AgentMetadata) -> None:
        """Know an agent from now on, or what has changed of it.

        Raises:
            nixlInvalidParamError: it is this one.
            nixlNotAllowedError: one of that name is known, and its engine has another address.
        """
        if metadata.name == self.name:
            raise nixlInvalidParamError(
                f"add_remote_agent: metadata must be of another agent, got that of {self.name}"
            )
        with self._lock:
            known = self._known.get(metadata.name)
            remote = known or Remote(self._engine, metadata.name)
            remote.learn(metadata)
            self._known[metadata.name] = remote

    def remove(self, name: str) -> None:
        """Forget an agent, if it is known, and disconnect."""
        with self._lock:
            remote = self._known.pop(name, None)
            if remote is not None:
                remote.is_known = False
        if remote is not None:
            remote.close()

    def lose(self, remote: Remote, error: Exception) -> None:
        """Forget an agent that is gone: its addresses mean nothing any more."""
        with self._lock:
            if self._known.get(remote.name) is not remote:
                return
            del self._known[remote.name]
            remote.is_known = False
        _log.warning(
            "agent %s is lost, and must be added again: %s", shown(remote.name), shown(error)
        )
        threading.Thread(target=remote.close, name="nixl-close", daemon=True).start()

    def get(self, op: str, name: str) -> Remote:
        """The agent of that name, whose engine's address is known.

        Raises:
            nixlNotFoundError: there is none.
        """
        with self._lock:
            remote = self._known.get(name)
            if remote is None and name == self.name:
                remote = self._known[name] = _Loopback(self._engine, name, self._memory)
        if remote is None or not remote.address:
            what = "agent" if remote is None else "agent with connection information"
            raise nixlNotFoundError(
                f"{op}: there must be a remote {what} of that name: add_remote_agent, got "
                f"{name!r:.80}"
            )
        return remote

    def find(self, name: str) -> Remote | None:
        """The agent of that name, if it is known."""
        with self._lock:
            return self._known.get(name)

    def close(self) -> None:
        """Forget all."""
        with self._lock:
            remotes, self._known = self._known, {}
            for remote in remotes.values():
                remote.is_known = False
        for remote in remotes.values():
            remote.close()


class _Loopback(Remote):
    """The agent itself as a remote one: its memory is what it has registered by now."""

    def __init__(self, engine: TransferEngine, name: str, memory: Memory):
        super().__init__(engine, name, engine.name)
        self._own = memory

    def ranges(self, kind: nixl_mem_t) -> Ranges:
        return self._own.ranges(kind)


class Notice:
    """A message that goes alone. A failure is logged: no one waits for it.

    Args:
        send: submits it to a peer.
        lost: is called with what made it fail.
    """

    def __init__(self, send: Callable[[Peer], None], lost: Callable[[Exception], None]):
        self._send = send
        self._lost = lost

    def start(self, peer: Peer) -> None:
        """Submit it."""
        try:
            self._send(peer)
        except Exception as error:  # noqa: BLE001 - it is logged, whatever it is
            self._lost(error)

    def fail(self, error: Exception) -> None:
        """End it: the peer cannot be opened."""
        self._lost(error)
