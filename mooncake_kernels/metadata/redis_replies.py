"""Read Redis's replies by its protocol (RESP2)."""

from collections.abc import Callable
from typing import Any

END = b"\r\n"
READ_BYTES = 1 << 16  # requested per read
MAX_LINE_BYTES = 1 << 16  # a number, a size, or an error


class Replies:
    """The consecutive replies on a connection.

    Args:
        receive: of a socket: returns at most that many bytes, and none at the end.
        error_of: makes an exception of the server's error text.
    """

    def __init__(self, receive: Callable[[int], bytes], error_of: Callable[[str], Exception]):
        self._receive = receive
        self._error_of = error_of
        self._data = b""
        self._at = 0  # start of the unread data

    def read(self, count: int) -> list[Any]:
        """Return the next replies: bytes, integers, lists, None, or exceptions.

        Raises:
            OSError: the connection ends too early; or as ``receive`` raises.
            ValueError: this is not the protocol.
        """
        replies = [self._reply() for _ in range(count)]
        if self._at == len(self._data):
            self._data, self._at = b"", 0
        return replies

    def is_empty(self) -> bool:
        """Whether nothing has arrived after the replies that were read."""
        return not self._data

    def _reply(self) -> Any:
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"$":
            return None if rest == b"-1" else self._string(_size(rest))
        if kind == b":":
            return int(rest)
        if kind == b"*":
            return None if rest == b"-1" else [self._reply() for _ in range(_size(rest))]
        if kind == b"+":
            return rest
        if kind == b"-":
            return self._error_of(rest.decode(errors="replace"))
        raise ValueError(f"no answer of Redis: {line[:100]!r}")

    def _line(self) -> bytes:
        end = self._data.find(END, self._at)
        while end < 0:
            unread = len(self._data) - self._at
            if unread > MAX_LINE_BYTES:
                raise ValueError(f"no answer of Redis: a line of more than {MAX_LINE_BYTES} bytes")
            self._receive_until(unread + 1)
            end = self._data.find(END)
        line = self._data[self._at : end]
        self._at = end + len(END)
        return line

    def _string(self, size: int) -> bytes:
        if len(self._data) - self._at < size + len(END):
            self._receive_until(size + len(END))
        end = self._at + size
        string = self._data[self._at : end]
        self._at = end + len(END)
        if self._data[end : self._at] != END:
            raise ValueError(f"no answer of Redis: a string of more than {size} bytes")
        return string

    def _receive_until(self, unread: int) -> None:
        """Receive until ``unread`` unread bytes are there."""
        parts = [self._data[self._at :]]
        missing = unread - len(parts[0])
        while missing > 0:
            part = self._receive(READ_BYTES)
            if not part:
                raise ConnectionError("the server has closed the connection")
            parts.append(part)
            missing -= len(part)
        self._data, self._at = b"".join(parts), 0


def _size(digits: bytes) -> int:
    size = int(digits)
    if size < 0:
        raise ValueError(f"no answer of Redis: a size of {size}")
    return size
