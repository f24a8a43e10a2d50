"""A socket whose other side can neither block us indefinitely nor exhaust our memory."""

import io
import select
import socket
import ssl
import time
from typing import Any

TIMEOUT_S = 3.0  # to connect; to send a message; and to receive all of its answer
MAX_BYTES = 32 << 20  # of an answer


class TooLate(TimeoutError):
    """An answer, or the rest of one, did not arrive in time."""


class BoundedSocket(io.RawIOBase):
    """A connected socket that bounds, in time and bytes, what arrives between two sends.

    A socket's own timeout applies to each call, so a peer that sends a byte now and then never
    times out. This has the socket methods that http.client and redis-py use, and raises what they
    handle: ``TimeoutError`` and ``OSError``.

    Attributes:
        num_received: bytes of the current answer.
    """

    def __init__(self, connected: socket.socket):
        self.num_received = 0
        self._socket = connected
        self._waits = True
        self._until: float | None = None  # while the timeout is that of a whole answer
        self._input = select.poll()
        self._input.register(connected, select.POLLIN)
        connected.settimeout(TIMEOUT_S)

    def settimeout(self, timeout_s: float | None) -> None:
        """0: receive only what is there. Anything else: wait, as bounded as ever."""
        self._waits = timeout_s != 0
        self._until = time.monotonic() + TIMEOUT_S
        self._socket.settimeout(TIMEOUT_S if self._waits else 0)

    def sendall(self, data: Any) -> None:
        self._socket.settimeout(TIMEOUT_S)  # the whole call
        self._socket.sendall(data)
        self._until = None
        self.num_received = 0

    def readinto(self, buffer: Any) -> int:
        if self._waits:
            now = time.monotonic()
            if self._until is None:
                self._until = now + TIMEOUT_S
            elif now < self._until:
                self._socket.settimeout(self._until - now)
            else:
                raise _too_late()
        try:
            received = self._socket.recv_into(buffer)
        except TimeoutError:
            raise _too_late() from None
        self.num_received += received
        if self.num_received > MAX_BYTES:
            raise OSError(f"an answer of more than {MAX_BYTES} bytes")
        return received

    def recv(self, num_bytes: int) -> bytes:
        return self.read(num_bytes) or b""

    def is_quiet(self) -> bool:
        """Whether there is nothing to read, not even the end or an error. False if closed.

        If it is False, some of the input may be gone.
        """
        if self.closed or (isinstance(self._socket, ssl.SSLSocket) and self._socket.pending()):
            return False  # TLS may have read ahead
        if not self._input.poll(0):
            return True
        self._socket.settimeout(0)
        try:
            self._socket.recv(1)
        except ssl.SSLWantReadError:  # it was for TLS alone, as a ticket for a later session is
            return True
        except OSError:
            pass
        return False

    def makefile(self, mode: str = "rb", buffering: int = -1) -> io.BufferedReader:
        return io.BufferedReader(self, buffering if buffering > 0 else io.DEFAULT_BUFFER_SIZE)

    def readable(self) -> bool:
        return True

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


def _too_late() -> TooLate:
    return TooLate(f"no whole answer within {TIMEOUT_S:g} s")
