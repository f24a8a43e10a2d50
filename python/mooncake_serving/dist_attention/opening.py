"""A connection to another instance that is being made."""

import threading

from mooncake_kernels.errors import FailureKind, TransferError

from ..rpc import Peers


class Opening:
    """Connects on a thread of its own; waited for like a ``Ticket``.

    Args:
        peers: that will have the connection.
        name: of the instance.
        deadline_s: of connecting.
    """

    def __init__(self, peers: Peers, name: str, deadline_s: float):
        self._is_over = threading.Event()
        self._error: TransferError | None = TransferError(
            name, "it was not connected to", kind=FailureKind.DISCONNECTED
        )
        thread = threading.Thread(
            target=self._run,
            args=(peers, name, deadline_s),
            name=f"mk-loans-open {name}",
            daemon=True,
        )
        thread.start()

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

    def _run(self, peers: Peers, name: str, deadline_s: float) -> None:
        try:
            peers.lease(name, deadline_s).end()
            self._error = None
        except TransferError as error:
            self._error = error
        finally:
            self._is_over.set()
