"""Clients of HTTP servers that keep to no rule."""

import contextlib
import socket
from collections.abc import Iterator

from ..waiting import WAIT_S
from ..waiting import eventually as eventually


def connected(port: int, source: str = "127.0.0.1") -> socket.socket:
    """Connect from one of the addresses of this machine."""
    return socket.create_connection(("127.0.0.1", port), WAIT_S, source_address=(source, 0))


def answer(port: int, request: bytes, source: str = "127.0.0.1") -> bytes:
    """Send a request, and read all of its answer."""
    with connected(port, source) as connection:
        connection.sendall(request)
        return connection.makefile("rb").read()


def status(port: int, request: bytes, source: str = "127.0.0.1") -> int:
    """The same, but only the status; 0: closed without an answer."""
    words = answer(port, request, source).split(b" ", 2)
    return int(words[1]) if len(words) > 1 else 0


@contextlib.contextmanager
def silent(port: int, count: int, start: bytes, source: str = "127.0.0.1") -> Iterator[list]:
    """Connections that have sent the beginning of a request."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(connected(port, source)) for _ in range(count)]
        for one in made:
            with contextlib.suppress(OSError):  # dropped for a newer one
                one.sendall(start)
        yield made


def is_closed(connection: socket.socket) -> bool:
    """Wait until the other side has closed; False: it has not."""
    connection.settimeout(WAIT_S)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True
