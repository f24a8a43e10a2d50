"""Access to the admin server: for callers with the token, or on this machine."""

import ipaddress
import secrets
import socket
from collections.abc import Collection
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mooncake_kernels.errors import InvalidArgument

from .errors import problem

# Hosts that a local browser sends, unless a page has led it here under a name of its own.
LOCAL_NAMES = ["localhost", "127.0.0.1", "[::1]"]


class TokenCheck:
    """Middleware that admits only callers with the token, before anything of a request's body is
    read.

    Args:
        app: for whom.
        token: see ``check_token``.
        open_paths: what anyone may get.
    """

    def __init__(self, app: ASGIApp, token: str, open_paths: Collection[str]):
        self._app = app
        self._token = token.encode()
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in self._open_paths or self._knows(scope):
            await self._app(scope, receive, send)
            return
        refusal = problem(
            401,
            "the header Authorization must be 'Bearer <the token>'",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await refusal(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and secrets.compare_digest(given.encode(), self._token)


class HostCheck:
    """Middleware that admits only requests to names of this machine.

    Args:
        app: for whom.
        names: as the header ``Host`` has them, in lower case.
    """

    def __init__(self, app: ASGIApp, names: Collection[str]):
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._is_local(scope):
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("host", "")
        message = f"Host must be one of {', '.join(self._names)}, got {given!r:.80}"
        await problem(400, message, "Host")(scope, receive, send)

    def _is_local(self, scope: Scope) -> bool:
        host = Headers(scope=scope).get("host", "").lower()
        name = host if host.endswith("]") else host.rpartition(":")[0] or host  # without the port
        return name in self._names


def check_token(token: Any) -> None:
    """Refuse a token that is empty, or not printable ASCII."""
    if not (isinstance(token, str) and token and token.isascii() and token.isprintable()):
        raise InvalidArgument("make_app: token must be printable ASCII, got something else")


def in_url(host: str) -> str:
    """An address, as URLs and the header ``Host`` have it."""
    return f"[{host}]" if ":" in host else host


def resolve(host: str, port: int) -> tuple[int, tuple[Any, ...]]:
    """Resolve where to listen: the address family, and the address.

    Raises:
        InvalidArgument: there is no such host.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise InvalidArgument(
            f"AdminServer: host must be an address, got {host!r} ({error})"
        ) from None
    family, _, _, _, address = found[0]
    return family, address


def is_loopback(address: tuple[Any, ...]) -> bool:
    """Tell whether only processes of this machine can connect to the address."""
    return ipaddress.ip_address(address[0].partition("%")[0]).is_loopback
