"""Who may use the router."""

import hashlib
import secrets
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from mooncake_serving.http_api import ErrorAnswer

from .page import PAGE_PATHS

OPEN_PATHS = ("/health", "/metrics", *PAGE_PATHS)  # for those who watch it
ADMIN_PATHS = ("/register", "/unregister")


class KeyCheck:
    """Middleware that admits only callers with a key, before anything of a body is read.

    Args:
        app: for whom.
        keys: one of which a caller needs, except for ``OPEN_PATHS``; none: no caller needs one.
        admin_keys: one of which is needed for ``ADMIN_PATHS``; none: nobody may.
    """

    def __init__(self, app: ASGIApp, keys: Collection[str], admin_keys: Collection[str]):
        self._app = app
        self._keys, self._admin_keys = (
            [_digest(key) for key in each] for each in (keys, admin_keys)
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = None if scope["type"] == "lifespan" else self._refuse(scope)
        if error is None:
            await self._app(scope, receive, send)
            return
        answer = Response(error.body(), error.status, dict(error.headers), "application/json")
        await answer(scope, receive, send)

    def _refuse(self, scope: Scope) -> ErrorAnswer | None:
        is_admin = scope["path"] in ADMIN_PATHS
        if is_admin and not self._admin_keys:
            what = f"{scope['path']} is closed: the router has no admin_keys_file"
            return ErrorAnswer(403, what, "forbidden")
        keys = self._admin_keys if is_admin else self._keys
        if not keys or scope["path"] in OPEN_PATHS or _has_key(scope, keys):
            return None
        message = (
            f"the header Authorization must be 'Bearer <an {'admin' if is_admin else 'API'} key>'"
        )
        headers = {"www-authenticate": "Bearer"}
        return ErrorAnswer(401, message, "invalid_api_key", headers=headers)


def _has_key(scope: Scope, digests: Collection[bytes]) -> bool:
    scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
    given = _digest(key)
    # All are compared, so that the time does not tell which one was nearly right.
    matches = [secrets.compare_digest(given, digest) for digest in digests]
    return scheme.lower() == "bearer" and any(matches)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
