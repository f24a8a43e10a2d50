"""Answers of routes, and who may use them."""

import hashlib
import secrets
from collections.abc import Collection
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, ExceptionHandler, Receive, Scope, Send

from .errors import ErrorAnswer


class KeyCheck:
    """Middleware that admits only callers with a key, before anything of a body is read.

    Args:
        app: for whom.
        keys: one of which a caller needs.
        open_paths: what anyone may get.
    """

    def __init__(self, app: ASGIApp, keys: Collection[str], open_paths: Collection[str]):
        self._app, self._open_paths = app, open_paths
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in self._open_paths or self._knows(scope):
            await self._app(scope, receive, send)
            return
        message = "the header Authorization must be 'Bearer <an API key>'"
        headers = {"www-authenticate": "Bearer"}
        error = ErrorAnswer(401, message, "invalid_api_key", headers=headers)
        await Response(error.body(), 401, headers, "application/json")(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = _digest(key)
        # All are compared, so that the time does not tell which one was nearly right.
        matches = [secrets.compare_digest(given, digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(matches)


def json_answer(content: Any) -> Response:
    """Answer with JSON."""
    return Response(msgspec.json.encode(content), media_type="application/json")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


async def _answered(_: Request, error: Exception) -> Response:
    assert isinstance(error, ErrorAnswer)
    return Response(error.body(), error.status, dict(error.headers), media_type="application/json")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "refused")
    message = f"{request.method} {request.url.path[:80]}: {error.detail}"
    headers = dict(error.headers or {})
    return await _answered(request, ErrorAnswer(error.status_code, message, code, headers=headers))


async def _unforeseen(request: Request, error: Exception) -> Response:
    message = f"the server has failed: {type(error).__name__}"
    return await _answered(request, ErrorAnswer(500, message, "internal_error"))


# For Starlette: every error has OpenAI's form.
HANDLERS: dict[Any, ExceptionHandler] = {
    ErrorAnswer: _answered,
    HTTPException: _refused,
    Exception: _unforeseen,
}
