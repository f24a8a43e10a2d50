"""The other instances of a pool, as peers of the transfer engine."""

import threading

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

    def send(self, name: str, message: Message, descriptors: Descriptors = ()) -> Ticket:
        """Write data and then deliver a message, without waiting for either.

        Raises:
            TransferError: the instance cannot be reached.
        """
        notify = encode(message)
        try:
            peer = self._open(name)
            return self.transfer.write(peer, descriptors, deadline_s=self.deadline_s, notify=notify)
        except (Unavailable, InvalidArgument) as error:  # no such host; a peer that was dropped
            raise TransferError(name, str(error)) from None

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
