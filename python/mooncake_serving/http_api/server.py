"""The process of a server: its sockets, and uvicorn."""

import contextlib
import functools
import resource
import socket
from typing import Any

import uvicorn

from .header_deadline import HeaderDeadline

CLOSE_S = 30  # for requests in flight
KEEP_ALIVE_S = 75  # of idle connections of clients
MOST_MS = 2**31 - 1  # an int of C


def make_server(app: Any, listening: socket.socket, client_s: float) -> uvicorn.Server:
    """Make the server of an app, to be run with ``sockets=[listening]``.

    Args:
        app: of ASGI.
        listening: the socket.
        client_s: for the headers of a request, from the connection or, of a later one, its first
            byte on; and see ``prepare``.
    """
    prepare(listening, client_s)
    protocol: Any = functools.partial(HeaderDeadline, client_s)
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=CLOSE_S,
        )
    )


def raise_file_limit() -> None:
    """Raise the number of open files to what this process may have: a connection is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a hard limit that the system does not allow
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def prepare(listening: socket.socket, client_s: float) -> None:
    """Set what the connections of a listening socket inherit.

    They do not wait for an acknowledgement to send more: asyncio sees to that only for sockets
    whose protocol is given, which accepted ones here do not have, and the second write of an answer
    would wait 40 ms for a client that delays its acknowledgements. And they break when a client has
    taken nothing for ``client_s`` seconds: one that is closed still waits for what is not sent.
    """
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    milliseconds = max(1, min(int(client_s * 1000), MOST_MS))
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
