"""The admin app behind a socket, in a thread of its own."""

import socket
import threading

import uvicorn

from mooncake_kernels.closing import Closing
from mooncake_kernels.errors import InvalidArgument

from ..store import Store
from .app import make_app
from .cluster import Cluster
from .security import in_url, is_loopback, resolve

CLOSE_S = 5


class AdminServer(Closing):
    """Serves a store's admin app until it is closed. A context manager.

    Args:
        store: see ``make_app``.
        host: address to listen on.
        port: port to listen on; 0: a free one.
        cluster: see ``make_app``.
        token: see ``make_app``; required unless the host is a loopback address.

    Attributes:
        url: address of the server.

    Raises:
        InvalidArgument: there is no such host or port, or it is not loopback and there is no token.
        OSError: the address is in use, ...
    """

    def __init__(
        self,
        store: Store,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        cluster: Cluster | None = None,
        token: str | None = None,
    ):
        if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port <= 65_535:
            raise InvalidArgument(f"AdminServer: port must be from 0 to 65535, got {port!r}")
        if not isinstance(host, str):
            raise InvalidArgument(f"AdminServer: host must be an address, got {host!r}")
        family, address = resolve(host, port)
        if token is None and not is_loopback(address):
            raise InvalidArgument(
                f"AdminServer: token must be given where others reach the host, got none and {host}"
            )
        app = make_app(store, cluster=cluster, token=token, host=host)
        self._socket = socket.create_server(address, family=family)
        port = self._socket.getsockname()[1]
        self.url = f"http://{in_url(host)}:{port}"
        config = uvicorn.Config(
            app, log_config=None, access_log=False, timeout_graceful_shutdown=CLOSE_S
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="store-admin", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Answer the requests in flight, then stop. Idempotent.

        It waits for the rest of a request that has not arrived whole, for at most 5 s.
        """
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
