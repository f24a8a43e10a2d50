"""The admin app behind a socket, in a thread of its own."""

from collections.abc import Collection
from os import PathLike
from pathlib import Path

from mooncake_kernels.closing import Closing
from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.http_server import (
    HttpServer,
    Limits,
    in_url,
    is_loopback,
    listen,
    listen_unix,
    resolve,
)

from ..store import Store
from .app import make_app
from .cluster import Cluster
from .security import MAX_BODY_BYTES

CLOSE_S = 5  # for requests in flight
LIMITS = Limits(connections=128, per_address=64, body_bytes=MAX_BODY_BYTES)


class AdminServer(Closing):
    """Serves a store's admin app until it is closed. A context manager.

    Callers need the token. There is none where only this user can connect (``socket``), and where
    that is wanted (``needs_token=False``).

    Args:
        store: see ``make_app``.
        host: address to listen on.
        port: port to listen on; 0: a free one.
        socket: listen on a Unix socket at this path instead, of mode 0600 in a folder of mode 0700.
        cluster: see ``make_app``.
        token: see ``make_app``.
        needs_token: False: every process of this machine may do everything; the host must be a
            loopback address.
        open_paths: see ``make_app``.
        limits: of the connections.

    Attributes:
        url: address of the server; ``unix://`` and the path for a socket.
        port: it listens on; 0 for a socket.

    Raises:
        InvalidArgument: there is no such host or port, there must be a token, or the socket or its
            folder is not this user's alone.
        OSError: the address is in use, ...
    """

    def __init__(
        self,
        store: Store,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        socket: str | PathLike[str] | None = None,
        cluster: Cluster | None = None,
        token: str | None = None,
        needs_token: bool = True,
        open_paths: Collection[str] = (),
        limits: Limits = LIMITS,
    ):
        if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port <= 65_535:
            raise InvalidArgument(f"AdminServer: port must be from 0 to 65535, got {port!r}")
        if not isinstance(host, str):
            raise InvalidArgument(f"AdminServer: host must be an address, got {host!r}")
        if not isinstance(socket, str | PathLike | None):
            raise InvalidArgument(f"AdminServer: socket must be a path or None, got {socket!r}")
        if token is None and socket is None:
            _check_openness(host, needs_token)
        app = make_app(store, cluster=cluster, token=token, host=host, open_paths=open_paths)
        self._path = None if socket is None else Path(socket).expanduser()
        if self._path is not None:
            listening = listen_unix("AdminServer", self._path)
            self.port, self.url = 0, f"unix://{self._path}"
        else:
            listening = listen("AdminServer", host, port)
            self.port = listening.getsockname()[1]
            self.url = f"http://{in_url(host)}:{self.port}"
        self._server = HttpServer(
            app, listening, name="store-admin", limits=limits, close_s=CLOSE_S
        )
        self._is_closed = False

    def close(self) -> None:
        """Answer the requests in flight, for at most 5 s, then stop. Idempotent.

        Requests that have not arrived whole are refused.
        """
        if not self._is_closed and self._path is not None:
            self._path.unlink(missing_ok=True)
        self._is_closed = True
        self._server.close()


def _check_openness(host: str, needs_token: bool) -> None:
    """Refuse a server without a token, unless it is wanted and of this machine only."""
    if not is_loopback(resolve("AdminServer", host)[1]):
        raise InvalidArgument(
            f"AdminServer: token must be given where others reach the host, got none and {host}"
        )
    if needs_token:
        raise InvalidArgument(
            "AdminServer: token must be given, or socket, or needs_token=False, with which every "
            "process of this machine may use it, got none of them"
        )
