"""A socket whose other side can neither block us indefinitely nor exhaust our memory."""

import io
import socket
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
        connected: the socket.
        num_received: bytes of the current answer.
    """

    def __init__(self, connected: socket.socket):
        self.num_received = 0
        self.connected = connected
        self._waits = True
        self._until: float | None = None  # while the timeout is that of a whole answer
        connected.settimeout(TIMEOUT_S)

    def settimeout(self, timeout_s: float | None) -> None:
        """0: receive only what is there. Anything else: wait, as bounded as ever."""
        self._waits = timeout_s != 0
        self._until = time.monotonic() + TIMEOUT_S
        self.connected.settimeout(TIMEOUT_S if self._waits else 0)

    def sendall(self, data: Any) -> None:
        self.connected.settimeout(TIMEOUT_S)  # the whole call
        self.connected.sendall(data)
        self._until = None
        self.num_received = 0

    def readinto(self, buffer: Any) -> int:
        if self._waits:
            now = time.monotonic()
            if self._until is None:
                self._until = now + TIMEOUT_S
            elif now < self._until:
                self.connected.settimeout(self._until - now)
            else:
                raise too_late()
        try:
            received = self.connected.recv_into(buffer)
        except TimeoutError:
            raise too_late() from None
        self.num_received += received
        if self.num_received > MAX_BYTES:
            raise too_much()
        return received

    def recv(self, num_bytes: int) -> bytes:
        return self.read(num_bytes) or b""

    def makefile(self, mode: str = "rb", buffering: int = -1) -> io.BufferedReader:
        return io.BufferedReader(self, buffering if buffering > 0 else io.DEFAULT_BUFFER_SIZE)

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.connected.fileno()

    def shutdown(self, how: int) -> None:
        self.connected.shutdown(how)

    def close(self) -> None:
        self.connected.close()
        super().close()


def too_late() -> TooLate:
    return TooLate(f"no whole answer within {TIMEOUT_S:g} s")


def too_much() -> OSError:
    return OSError(f"an answer of more than {MAX_BYTES} bytes")
