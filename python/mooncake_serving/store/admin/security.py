"""Access to the admin server: by a token, or on this machine; and what a request may take."""

import secrets
from collections.abc import Collection
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.http_server import BodyRefused, CallerRefused, HostRule, read_body

from .models import problem

MAX_BODY_BYTES = 64 << 10  # of any request


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
    """Middleware that admits only requests to names of the server, by no page of another origin.

    Args:
        app: for whom.
        rule: which names.
    """

    def __init__(self, app: ASGIApp, rule: HostRule):
        self._app = app
        self._rule = rule

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            try:
                self._rule.check(scope["headers"])
            except CallerRefused as refused:
                answer = problem(refused.status, str(refused), refused.header)
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)


class BodyLimit:
    """Middleware that reads a request's body before the app does, of at most 64 KiB.

    Args:
        app: for whom.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sizes = (b"content-length", b"transfer-encoding")
        if scope["type"] != "http" or not any(name in sizes for name, _ in scope["headers"]):
            await self._app(scope, receive, send)
            return
        try:
            body = await read_body(scope, receive, MAX_BODY_BYTES)
        except BodyRefused as refused:
            await problem(refused.status, str(refused), "body")(scope, receive, send)
            return
        if body is None:  # the client is gone
            return
        unread = [body]

        async def receive_again() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            return await receive()

        await self._app(scope, receive_again, send)


def check_token(token: Any) -> None:
    """Refuse a token that is empty, or not printable ASCII."""
    if not (isinstance(token, str) and token and token.isascii() and token.isprintable()):
        raise InvalidArgument("make_app: token must be printable ASCII, got something else")
