"""A socket whose other side can neither keep us waiting nor fill our memory."""

import io
import socket
import time
from typing import Any

TIMEOUT_S = 3.0  # to connect; to take in a message; and to answer it with all that is said
MAX_BYTES = 32 << 20  # of an answer


class BoundedSocket(io.RawIOBase):
    """A connected socket that bounds what comes between two messages of ours, in time and bytes.

    A socket's own timeout is for each call: who sends a byte now and then is never too late. It
    has what http.client, http.server and redis-py use of a socket; ``TimeoutError`` and ``OSError``
    are what they know.
    """

    def __init__(self, connected: socket.socket):
        self._socket = connected
        self._timeout_s: float | None = None
        self._restart()

    def settimeout(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s

    def sendall(self, data: Any) -> None:
        self._socket.settimeout(TIMEOUT_S)  # of the whole call
        self._socket.sendall(data)
        self._restart()

    def recv_into(self, buffer: Any, num_bytes: int = 0, flags: int = 0) -> int:
        self._socket.settimeout(self._left_s())
        received = self._socket.recv_into(buffer, num_bytes, flags)
        self._count(received)
        return received

    def recv(self, num_bytes: int, flags: int = 0) -> bytes:
        self._socket.settimeout(self._left_s())
        received = self._socket.recv(num_bytes, flags)
        self._count(len(received))
        return received

    def makefile(self, mode: str = "rb", buffering: int = -1) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self.recv_into(buffer)

    def fileno(self) -> int:
        return self._socket.fileno()

    def shutdown(self, how: int) -> None:
        self._socket.shutdown(how)

    def close(self) -> None:
        self._socket.close()
        super().close()

    def _count(self, received: int) -> None:
        self._room -= received
        if self._room < 0:
            raise OSError(f"an answer of more than {MAX_BYTES} bytes")

    def _restart(self) -> None:
        self._until = time.monotonic() + TIMEOUT_S
        self._room = MAX_BYTES

    def _left_s(self) -> float:
        if self._timeout_s == 0:
            return 0  # redis-py looks whether there is anything to read
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"no whole answer within {TIMEOUT_S:g} s")
        return left_s
