"""A socket whose other side can neither block us indefinitely nor exhaust our memory."""

import io
import select
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any

TIMEOUT_S = 3.0  # to connect; to send a message; and to receive all of its answer
MAX_BYTES = 32 << 20  # of an answer


class TooLate(TimeoutError):
    """An answer, or the rest of one, did not arrive in time."""


class BoundedSocket(io.RawIOBase):
    """A connected socket that bounds, in time and bytes, what arrives between two sends.

    A socket's own timeout applies to each call, so a peer that sends a byte now and then never
    times out. This has the socket methods that http.client, http.server and redis-py use, and
    raises what they handle: ``TimeoutError`` and ``OSError``.
    """

    def __init__(self, connected: socket.socket):
        self._socket = connected
        self._input = select.poll()
        self._input.register(connected, select.POLLIN)
        self._num_pending = getattr(connected, "pending", int)  # TLS may have read ahead
        self._timeout_s: float | None = None
        self._set_s = connected.gettimeout()
        self._restart()

    def settimeout(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s

    def sendall(self, data: Any) -> None:
        self._wait_for(TIMEOUT_S)  # the whole call
        self._socket.sendall(data)
        self._restart()

    def recv_into(self, buffer: Any, num_bytes: int = 0, flags: int = 0) -> int:
        received = self._receive(self._socket.recv_into, buffer, num_bytes, flags)
        self._count(received)
        return received

    def recv(self, num_bytes: int, flags: int = 0) -> bytes:
        received = self._receive(self._socket.recv, num_bytes, flags)
        self._count(len(received))
        return received

    def has_input(self) -> bool:
        """Whether something can be read, even the end or an error. True if closed."""
        return bool(self.closed or self._num_pending() or self._input.poll(0))

    def makefile(self, mode: str = "rb", buffering: int = -1) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self.recv_into(buffer)

    def fileno(self) -> int:
        return self._socket.fileno()

    def detach(self) -> int | None:
        """Give up the connection, and return its descriptor; None: it is encrypted, and is kept."""
        if isinstance(self._socket, ssl.SSLSocket):
            return None
        return self._socket.detach()

    def shutdown(self, how: int) -> None:
        self._socket.shutdown(how)

    def close(self) -> None:
        self._socket.close()
        super().close()

    def _receive(self, receive: Callable[..., Any], *arguments: Any) -> Any:
        self._wait_for(self._left_s())
        try:
            return receive(*arguments)
        except TimeoutError:
            raise _too_late() from None

    def _count(self, received: int) -> None:
        self._room -= received
        if self._room < 0:
            raise OSError(f"an answer of more than {MAX_BYTES} bytes")

    def _restart(self) -> None:
        self._until: float | None = None
        self._room = MAX_BYTES

    def _left_s(self) -> float:
        if self._timeout_s == 0:
            return 0  # redis-py checks whether there is anything to read
        if self._until is None:
            self._until = time.monotonic() + TIMEOUT_S
            return TIMEOUT_S
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            raise _too_late()
        return left_s

    def _wait_for(self, seconds: float) -> None:
        """Set the timeout of the next call, usually that of the previous one."""
        if seconds != self._set_s:
            self._socket.settimeout(seconds)
            self._set_s = seconds


def _too_late() -> TooLate:
    return TooLate(f"no whole answer within {TIMEOUT_S:g} s")
