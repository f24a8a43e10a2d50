"""The body of a request: no longer than allowed, and awaited only as long as the server stays."""

import re
from collections.abc import Callable

from .asgi import Receive, Scope
from .connections import STATE, Connection


class BodyRefused(Exception):
    """A body that is too long, or that there is no time or memory for; the message says why.

    Attributes:
        status: of the answer.
    """

    def __init__(self, status: int, why: str):
        super().__init__(why)
        self.status = status


async def read_body(
    scope: Scope,
    receive: Receive,
    max_bytes: int,
    *,
    hold: Callable[[int], bool] | None = None,
) -> bytes | None:
    """Read the whole body of a request.

    Args:
        scope: of the request.
        receive: of the request.
        max_bytes: that it may have.
        hold: reserves memory for that many bytes, and returns whether there is enough. None: the
            ``HttpServer`` that serves the request does, or no one.

    Returns:
        The body; None: the client is gone.

    Raises:
        BodyRefused: it is longer, the requests under way take too much memory, or the server stops
            before the body is there.
    """
    connection: Connection | None = scope.get("state", {}).get(STATE)
    if hold is None and connection is not None:
        hold = connection.hold
    announced = b"".join(value for name, value in scope["headers"] if name == b"content-length")
    if re.fullmatch(b"[0-9]{1,20}", announced) and int(announced) > max_bytes:
        raise BodyRefused(
            413, f"the body must have at most {max_bytes} bytes, got {int(announced)}"
        )
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        part: bytes = message.get("body", b"")
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise BodyRefused(413, f"the body must have at most {max_bytes} bytes, got more")
        if hold is not None and not hold(len(part)):
            raise BodyRefused(503, "the requests under way take too much memory")
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)
