"""Bodies of requests: each has to come in time, and all together have limited memory."""

from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import anyio

from mooncake_kernels.http_server import BodyRefused, read_body

from .errors import ErrorAnswer, overloaded

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class Bodies:
    """Reads them.

    Args:
        max_bytes: of one.
        max_held_bytes: of those of all requests under way.
        client_s: in which one has to come.

    Attributes:
        num_bytes: of all requests under way.
    """

    def __init__(self, max_bytes: int, max_held_bytes: int, client_s: float):
        self._max_bytes, self._max_held_bytes = max_bytes, max_held_bytes
        self._client_s = client_s
        self.num_bytes = 0

    @asynccontextmanager
    async def read(self, scope: Scope, receive: Receive) -> AsyncIterator[bytes | None]:
        """Have a request's body while the block runs; None: the client has left.

        Raises:
            ErrorAnswer: it is too long, does not come, or the bodies of others take the memory.
        """
        held = 0

        def hold(num_bytes: int) -> bool:
            nonlocal held
            if self.num_bytes + num_bytes > self._max_held_bytes:
                return False
            self.num_bytes += num_bytes
            held += num_bytes
            return True

        try:
            yield await self._read(scope, receive, hold)
        finally:
            self.num_bytes -= held

    async def _read(
        self, scope: Scope, receive: Receive, hold: Callable[[int], bool]
    ) -> bytes | None:
        try:
            with anyio.fail_after(self._client_s):
                return await read_body(scope, receive, self._max_bytes, hold=hold)
        except BodyRefused as refused:
            if refused.status != 413:
                raise overloaded(str(refused)) from None
            raise ErrorAnswer(413, str(refused), "body_too_large") from None
        except TimeoutError:
            what = f"the body has not come within {self._client_s:g} s"
            headers = {"connection": "close"}
            raise ErrorAnswer(408, what, "body_too_slow", headers=headers) from None
