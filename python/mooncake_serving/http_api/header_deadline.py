"""A deadline for the headers of requests, which uvicorn lacks."""

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol


class HeaderDeadline(asyncio.Protocol):
    """A connection that is closed if the client does not send a request's headers in time.

    The time counts from the connection, and for later requests from their first byte: uvicorn
    closes a connection that is idle after an answer. What comes of a body after its answer counts
    as the beginning of another request.

    Args:
        client_s: for the headers of a request.
        config, server_state, app_state, _loop: what uvicorn gives its protocols.
    """

    def __init__(
        self,
        client_s: float,
        config: Any,
        server_state: Any,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ):
        self._client_s = client_s
        self._loop = _loop or asyncio.get_running_loop()
        self._inner: Any = AutoHTTPProtocol(config, server_state, app_state, _loop)  # type: ignore[call-arg]
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._inner.connection_made(transport)
        self._timer = self._loop.call_later(self._client_s, transport.close)

    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)
        request = self._inner.cycle  # the last one whose headers have come
        if request is not None and not request.response_complete:
            self._stop_timer()
        elif self._timer is None:
            self._timer = self._loop.call_later(self._client_s, self._inner.transport.close)

    def eof_received(self) -> None:
        self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_timer()
        self._inner.connection_lost(error)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
