"""The messages of a rank: one transfer engine, a thread that takes what arrives, a line a peer."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from mooncake_kernels.closeable import Closeable
from mooncake_kernels.errors import FailureKind, InvalidArgument, TransferError
from mooncake_kernels.transfer import Peer, TransferEngine

from ...rpc import Message, Peers, Receiver
from .messages import CODEC, Ask
from .settings import HandoffSettings

logger = logging.getLogger(__name__)

TICK_S = 0.05
IDLE_S = 30.0  # after which a line's thread ends
LAST_WORDS_S = 1.0  # at most, to send what was queued before it is closed
MAX_LINES = 512  # peers that messages go to at a time: each has a thread
MAX_BYTES = 64 << 10  # of a notification
OF_PEER = {  # errors after which a peer gets no other message, either
    FailureKind.TIMED_OUT,
    FailureKind.GONE,
    FailureKind.DISCONNECTED,
    FailureKind.UNREACHABLE,
    FailureKind.DENIED,
    FailureKind.INCOMPATIBLE,
}

Failed = Callable[[str, TransferError, Message | None], None]


class Endpoint(Closeable):
    """Sends and takes the messages of a sender, a receiver, or both in one rank.

    Args:
        engine: all of whose notifications are taken; it stays the caller's.
        settings: of the hand-off.

    Attributes:
        name: of the engine, by which peers reach it.
    """

    def __init__(self, engine: TransferEngine, settings: HandoffSettings):
        self.engine, self.settings, self.name = engine, settings, engine.name
        self._peers = Peers(engine)
        self._handlers: dict[type[Message], Callable[[str, Any], None]] = {}
        self._ticks: list[Callable[[], None]] = []
        self._failures: list[Failed] = []
        self._lines: dict[str, _Line] = {}
        self._refused: list[tuple[str, TransferError, Message]] = []  # for want of a line
        self._transports: dict[str, str] = {}  # by peer, as logged
        self._lock = threading.Lock()
        self._thread: Receiver | None = None
        self.closed = False

    def handle(self, kind: type[Message], handler: Callable[[str, Any], None]) -> None:
        """Have messages of a kind handled, on the thread that takes them: it must not block."""
        self._handlers[kind] = handler

    def on_tick(self, tick: Callable[[], None]) -> None:
        """Have something called several times a second, on that thread."""
        self._ticks.append(tick)

    def on_failure(self, failed: Failed) -> None:
        """Have a message that could not be sent passed on: the name of the peer, and the error.

        The message is None if the peer has failed, so that none reaches it.
        """
        self._failures.append(failed)

    def start(self) -> None:
        """Take messages from now on: when all handlers are there."""
        self._thread = Receiver(
            self.engine, self._take, self._tick, lambda: TICK_S, "handoff messages"
        )

    def send(self, name: str, message: Message, *, repeats: bool = False) -> None:
        """Send a message, without waiting; those to one peer arrive in order.

        Args:
            name: of the peer's engine.
            message: to send.
            repeats: whether it will be sent again, so that it is not queued behind another one.
        """
        with self._lock:
            if self.closed:
                return
            line = self._lines.get(name)
            if line is not None and repeats and line.is_busy:
                return
            if line is not None and line.put(message):
                return
            if len(self._lines) >= MAX_LINES:
                self._lines = {key: line for key, line in self._lines.items() if not line.is_over}
            if len(self._lines) >= MAX_LINES:
                what = f"{MAX_LINES} other peers are being sent messages"
                error = TransferError(name, what, kind=FailureKind.EXHAUSTED)
                self._refused.append((name, error, message))  # its caller may hold its own lock
                return
            line = self._lines[name] = _Line(name, self._send_now, self._has_failed)
            line.put(message)

    def write(self, name: str, descriptors: Sequence[tuple[int, int, int]], last: Message) -> None:
        """Write data, then send a message, and wait until both are there.

        Raises:
            TransferError: they are not; none of this engine's memory is touched any more.
        """
        deadline_s = self.settings.deadline_s
        with self._peers.lease(name, deadline_s) as peer:
            self._say_way(peer)
            self._refuse_tcp(peer)
            try:
                ticket = self.engine.write(
                    peer, descriptors, notify=CODEC.encode(last), deadline_s=deadline_s
                )
            except InvalidArgument as error:  # the peer was closed meanwhile
                raise TransferError(name, str(error), kind=FailureKind.CLOSED) from error
            ticket.wait()

    def close(self) -> None:
        """Stop. The engine stays open. Idempotent."""
        with self._lock:
            self.closed = True
            lines = [*self._lines.values()]
        for line in lines:
            line.close()
        end = time.monotonic() + LAST_WORDS_S
        for line in lines:
            line.join(max(0.0, end - time.monotonic()))
        self._peers.close()
        if self._thread is not None:
            self._thread.close()

    def _send_now(self, name: str, message: Message) -> None:
        data, deadline_s = CODEC.encode(message), self.settings.deadline_s
        if len(data) > MAX_BYTES:
            raise InvalidArgument(
                f"send: a message must be at most {MAX_BYTES} bytes, got {len(data)}"
            )

        def send(peer: Peer) -> None:
            self._say_way(peer)
            if isinstance(message, Ask):
                self._refuse_tcp(peer)
            try:
                self.engine.write(peer, (), notify=data, deadline_s=deadline_s).wait()
            except InvalidArgument as error:
                raise TransferError(name, str(error), kind=FailureKind.CLOSED) from error

        self._peers.use(name, deadline_s, send)

    def _say_way(self, peer: Peer) -> None:
        """Log once by which transport a peer is reached."""
        if self._transports.get(peer.name) != peer.transport:
            self._transports[peer.name] = peer.transport
            logger.info("hand-off: %s reaches %s by %s", self.name, peer.name, peer.transport)

    def _refuse_tcp(self, peer: Peer) -> None:
        if self.settings.require_rdma and peer.transport == "tcp":
            raise TransferError(
                peer.name,
                "require_rdma is set, and the only way there is tcp: no NIC for RDMA on one of the "
                "two sides (`python -m mooncake_kernels doctor` says which), or its transports "
                "leave rdma out",
                kind=FailureKind.INCOMPATIBLE,
            )

    def _has_failed(self, name: str, error: TransferError, message: Message) -> None:
        if self.closed:
            return
        for failed in self._failures:
            failed(name, error, None if error.kind in OF_PEER else message)

    def _take(self, sender: str, data: bytes) -> None:
        message = CODEC.decode(data)
        handler = self._handlers.get(type(message))
        if handler is None:
            raise InvalidArgument(f"handoff: this rank does not take {type(message).__name__}")
        handler(sender, message)

    def _tick(self) -> None:
        with self._lock:
            refused, self._refused = self._refused, []
        for name, error, message in refused:
            self._has_failed(name, error, message)
        for tick in self._ticks:
            tick()


class _Line:
    """Sends messages to one peer, in order, on a thread of its own: another peer that does not
    answer delays none of them.
    """

    def __init__(
        self,
        name: str,
        send: Callable[[str, Message], None],
        failed: Callable[[str, TransferError, Message], None],
    ):
        self._name, self._send, self._failed = name, send, failed
        self._queue: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self.is_over = False
        self._thread = threading.Thread(target=self._run, name=f"handoff to {name}", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        return not self._queue.empty()

    def put(self, message: Message) -> bool:
        """Queue a message; returns False if the line's thread has ended."""
        with self._lock:
            if not self.is_over:
                self._queue.put(message)
            return not self.is_over

    def close(self) -> None:
        """End it after what is queued."""
        self._queue.put(None)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            try:
                message = self._queue.get(timeout=IDLE_S)
            except queue.Empty:
                with self._lock:
                    if not self._queue.empty():
                        continue
                    self.is_over = True
                return
            if message is None:
                return
            try:
                self._send(self._name, message)
            except TransferError as error:
                self._failed(self._name, error, message)
            except Exception as error:  # of this message: the thread serves what comes later
                logger.exception("a message to %s was not sent", self._name)
                unforeseen = TransferError(self._name, repr(error), kind=FailureKind.OTHER)
                self._failed(self._name, unforeseen, message)
