"""The router's routes, and who may use them."""

import hashlib
import secrets
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from .call import CHAT, COMPLETIONS, are_token_ids
from .config import RouterConfig
from .decisions import MAX_KEPT
from .errors import ErrorAnswer, invalid
from .reply import Reply
from .router import Router

OPEN_PATHS = ("/health", "/metrics")  # for those who watch it


def make_app(config: RouterConfig) -> Starlette:
    """Make the app of a router, to be served by any ASGI server that has lifespans.

    Raises:
        InvalidArgument: an endpoint of events is invalid.
    """
    router = Router(config)
    routes = _Routes(router)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            await router.start()
            yield
        finally:
            await router.close()

    app = Starlette(
        lifespan=lifespan,
        routes=[
            *(
                Route(path, _Generate(router, path), methods=["POST"])
                for path in (CHAT, COMPLETIONS)
            ),
            Route("/v1/models", routes.models),
            Route("/health", routes.health),
            Route("/metrics", routes.metrics),
            Route("/instances", routes.instances),
            Route("/decisions", routes.decisions),
            Route("/query", routes.query, methods=["POST"]),
        ],
        exception_handlers={
            ErrorAnswer: _answered,
            HTTPException: _refused,
            Exception: _unforeseen,
        },
    )
    if config.api_keys:
        app.add_middleware(KeyCheck, keys=config.api_keys, open_paths=OPEN_PATHS)
    app.state.router = router
    return app


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


class _Generate:
    """The endpoint of requests that generate, as an ASGI app."""

    def __init__(self, router: Router, path: str):
        self._router, self._path = router, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send, self._router.config.client_s)
        await self._router.serve(self._path, scope, receive, reply)


class _Routes:
    """What is told of a router."""

    def __init__(self, router: Router):
        self._router = router

    async def models(self, _: Request) -> Response:
        return _json({"object": "list", "data": self._router.health.models()})

    async def health(self, _: Request) -> Response:
        if self._router.placement.can_serve():
            return _json({"status": "ok"})
        raise ErrorAnswer(503, "no engines are up that could serve a request", "no_engine")

    async def metrics(self, _: Request) -> Response:
        return Response(self._router.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def instances(self, _: Request) -> Response:
        placement = self._router.placement
        costs = {
            "prefill": placement.prefill_cost.as_dict(),
            "decode": placement.decode_cost.as_dict(),
        }
        return _json({"instances": self._router.instances(), "costs": costs})

    async def decisions(self, request: Request) -> Response:
        given = request.query_params.get("limit", "100")
        if not (given.isascii() and given.isdigit() and 0 < len(given) < 10):
            raise invalid("limit", f"an integer of at least 0, got {given[:20]!r}")
        return _json({"decisions": self._router.log.last(min(int(given), MAX_KEPT))})

    async def query(self, request: Request) -> Response:
        """Tell how much of a prompt each engine holds, as the conductor of Mooncake does."""
        async with self._router.bodies.read(request.scope, request.receive) as raw:
            try:
                query = msgspec.json.decode(raw or b"", type=_Query)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                what = f"the body must be a query: {error}"
                raise ErrorAnswer(400, what, "invalid_json") from None
        if not are_token_ids(query.token_ids):
            raise invalid("token_ids", "of token ids in [0, 2**32)")
        tokens = self._router.placement.matched_tokens(query.token_ids, query.lora_name or "")
        names = [instance.name for instance in self._router.config.instances]
        return _json(
            {"data": {n: {"matched_tokens": t} for n, t in zip(names, tokens, strict=True)}}
        )


class _Query(msgspec.Struct):
    token_ids: list[int]
    model: str = ""
    lora_name: str | None = None


def _json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


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
    message = f"the router has failed: {type(error).__name__}"
    return await _answered(request, ErrorAnswer(500, message, "internal_error"))
