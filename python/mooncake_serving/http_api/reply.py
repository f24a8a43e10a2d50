"""The answer to a client, over ASGI."""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import anyio

from .errors import ErrorAnswer

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class ClientStalled(Exception):
    """A client does not read its answer."""


class Reply:
    """Sends one answer.

    Args:
        send: of ASGI.
        client_s: after which a client is given up that takes nothing.

    Attributes:
        status: that was sent; 0: nothing was sent yet.
        is_whole: whether all of it was sent.
    """

    def __init__(self, send: Send, client_s: float):
        self._send, self._client_s = send, client_s
        self.status, self.is_whole = 0, False

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Send the status and the headers."""
        self.status = status
        raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, part: bytes, *, is_last: bool = False) -> None:
        """Send a part of the body.

        Raises:
            ClientStalled: there is no room for it, since the client does not read.
        """
        try:
            with anyio.fail_after(self._client_s):
                await self._send(
                    {"type": "http.response.body", "body": part, "more_body": not is_last}
                )
        except TimeoutError:
            raise ClientStalled(f"the client has read nothing for {self._client_s:g} s") from None
        self.is_whole = is_last

    async def whole(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Send all of an answer."""
        await self.begin(status, {**headers, "content-length": str(len(body))})
        await self.write(body, is_last=True)

    async def error(self, error: ErrorAnswer, headers: Mapping[str, str] | None = None) -> None:
        """Send an error: as an answer, or at the end of a stream that has begun.

        A stream then ends without ``[DONE]``: what has come is not the whole answer.
        """
        if self.status:
            await self.write(error.event(), is_last=True)
            return
        all_headers = {"content-type": "application/json", **(headers or {}), **error.headers}
        await self.whole(error.status, all_headers, error.body())
