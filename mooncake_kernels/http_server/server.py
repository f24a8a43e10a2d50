"""An ASGI app behind a socket, in a thread of its own."""

import asyncio
import functools
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

import uvicorn

from ..closeable import Closeable
from .asgi import App, Message, Receive, Scope, Send
from .body import BodyRefused
from .connections import STATE, Admission, Connection, Limits

POLL_S = 0.1  # while the rest of a body is awaited
BACKLOG = 128  # connections that the event loop takes at once, before it drops any
QUEUE = 1024  # that the kernel keeps for it: beyond them one is a second late, or refused


class HttpServer(Closeable):
    """Serves an app until it is closed. A context manager.

    Args:
        app: of ASGI. It reads a body by ``read_body``.
        listening: a socket that listens; it is closed with this.
        name: of the thread.
        limits: see ``Limits``.
        close_s: how long requests in flight are waited for at the end.
    """

    def __init__(
        self,
        app: App,
        listening: socket.socket,
        *,
        name: str,
        limits: Limits | None = None,
        close_s: int = 5,
    ):
        self._admission = Admission(limits or Limits())
        protocol: Any = functools.partial(Connection, self._admission)
        self._socket = listening
        config = uvicorn.Config(
            _Phases(app, self._is_closing),
            http=protocol,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=close_s,
        )
        self._server: uvicorn.Server = _Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([listening],), name=name, daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Answer the requests in flight, for at most ``close_s``, then stop. Idempotent.

        Requests that have not arrived whole are refused.
        """
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def _is_closing(self) -> bool:
        return self._server.should_exit


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or []:
            listening.listen(QUEUE)


class _Phases:
    """Tells a connection how far its request is, and has it closed after the answer."""

    def __init__(self, app: App, is_closing: Callable[[], bool]):
        self._app, self._is_closing = app, is_closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: Connection = scope["state"][STATE]
        has_body = any(n in (b"content-length", b"transfer-encoding") for n, _ in scope["headers"])
        connection.headers_arrived(has_body=has_body)
        is_whole = not has_body

        async def receive_in_time() -> Message:
            nonlocal is_whole
            if is_whole:
                return await receive()
            message = asyncio.ensure_future(receive())
            try:
                while not (await asyncio.wait([message], timeout=POLL_S))[0]:
                    if self._is_closing():
                        raise BodyRefused(503, "the server stops before the body is there")
            finally:
                message.cancel()
            if not message.result().get("more_body"):
                is_whole = True
                connection.body_arrived()
            return message.result()

        async def send_and_close(message: Message) -> None:
            if message["type"] == "http.response.start":
                connection.answer_begins()
                headers = [*message.get("headers", []), (b"connection", b"close")]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive_in_time, send_and_close)


def silence_uvicorn() -> None:
    """Have a program that is only a server not log each malformed request of a stranger."""
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
