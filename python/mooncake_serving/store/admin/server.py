"""The admin app behind a socket, in a thread of its own."""

import asyncio
import socket
import threading
from collections.abc import Callable

import uvicorn
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mooncake_kernels.closing import Closing
from mooncake_kernels.errors import InvalidArgument

from ..store import Store
from .app import make_app
from .cluster import Cluster
from .security import in_url, is_loopback, resolve

CLOSE_S = 5  # for requests in flight
POLL_S = 0.1  # while the rest of a body is waited for


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
            BodyWait(app, lambda: self._server.should_exit),
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=CLOSE_S,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="store-admin", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Answer the requests in flight, for at most 5 s, then stop. Idempotent.

        Requests that have not arrived whole are refused.
        """
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()


class BodyWait:
    """Middleware that waits for the rest of a request's body only as long as the server stays.

    Args:
        app: for whom.
        is_closing: whether the server is to stop.
    """

    def __init__(self, app: ASGIApp, is_closing: Callable[[], bool]):
        self._app = app
        self._is_closing = is_closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_whole = scope["type"] != "http"

        async def receive_while_open() -> Message:
            nonlocal is_whole
            if is_whole:
                return await receive()
            message = asyncio.ensure_future(receive())
            try:
                while not (await asyncio.wait([message], timeout=POLL_S))[0]:
                    if self._is_closing():
                        raise HTTPException(503, "the server stops before the body is there")
            finally:
                message.cancel()
            is_whole = not message.result().get("more_body")
            return message.result()

        await self._app(scope, receive_while_open, send)
