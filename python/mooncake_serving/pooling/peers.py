"""The other instances of a pool, as peers of the transfer engine."""

import threading
from collections.abc import Callable

from mooncake_kernels.errors import InvalidArgument, TransferError, Unavailable
from mooncake_kernels.transfer import Peer, Ticket, TransferEngine

from .buffers import Descriptors
from .messages import Message
from .wire import encode


class Peers:
    """Opened when first needed, and kept. Thread-safe.

    Args:
        transfer: this instance's engine.
        deadline_s: of connecting, and of one write.
    """

    def __init__(self, transfer: TransferEngine, deadline_s: float):
        self.transfer, self.deadline_s = transfer, deadline_s
        self._peers: dict[str, Peer] = {}
        self._lock = threading.Lock()

    def send(
        self, name: str, message: Message, descriptors: Descriptors = (), *, may_open: bool = True
    ) -> Ticket:
        """Write data and then deliver a message, without waiting for either.

        Args:
            name: of the instance.
            message: to deliver.
            descriptors: what to write before.
            may_open: connect first if necessary, which may take ``deadline_s``.

        Raises:
            TransferError: the instance cannot be reached, or may not be connected to.
        """
        notify = encode(message)
        if not may_open and not self.is_open(name):
            raise TransferError(name, "it is not connected")
        try:
            peer = self._open(name)
            return self.transfer.write(peer, descriptors, deadline_s=self.deadline_s, notify=notify)
        except (Unavailable, InvalidArgument) as error:  # no such host; a peer that was dropped
            raise TransferError(name, str(error)) from None

    def is_open(self, name: str) -> bool:
        """Tell whether an instance is connected to."""
        with self._lock:
            return name in self._peers

    def open_later(self, name: str) -> "Opening":
        """Begin to connect, without waiting."""
        return Opening(lambda: self._open(name), name)

    def drop(self, name: str) -> None:
        """Close the connection to an instance; its writes that are under way fail."""
        with self._lock:
            peer = self._peers.pop(name, None)
        if peer is not None:
            peer.close()

    def _open(self, name: str) -> Peer:
        with self._lock:
            known = self._peers.get(name)
        if known is not None:
            return known
        opened = self.transfer.open(name, deadline_s=self.deadline_s)
        with self._lock:
            kept = self._peers.setdefault(name, opened)
        if kept is not opened:  # another thread was faster
            opened.close()
        return kept


class Opening:
    """A connection that is being made, on a thread of its own; waited for like a ``Ticket``."""

    def __init__(self, connect: Callable[[], object], name: str):
        self._connect, self._name = connect, name
        self._is_over = threading.Event()
        self._error: TransferError | None = TransferError(name, "it was not connected to")
        threading.Thread(target=self._run, name=f"mk-pool-open {name}", daemon=True).start()

    def wait(self, timeout_s: float) -> None:
        """Wait for the connection.

        Raises:
            TransferError: the instance cannot be reached.
            TimeoutError: it is still being made.
        """
        if not self._is_over.wait(timeout_s):
            raise TimeoutError
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._connect()
            self._error = None
        except TransferError as error:
            self._error = error
        except (Unavailable, InvalidArgument) as error:  # no such host; this instance has left
            self._error = TransferError(self._name, str(error))
        finally:
            self._is_over.set()
