"""The router's routes."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from mooncake_serving.http_api import HANDLERS, ErrorAnswer, Reply, invalid, json_answer

from .call import CHAT, COMPLETIONS, NO_JSON, are_token_ids
from .config import RouterConfig
from .decisions import MAX_KEPT
from .key_check import KeyCheck
from .page import page_routes
from .registration import Registration
from .router import Router

# In which engines are registered; Mooncake's Conductor speaks the latter.
JSON, MSGPACK = "application/json", "application/msgpack"
TENANTS = ("default", "")
FORMS: dict[str, Any] = {JSON: msgspec.json, MSGPACK: msgspec.msgpack}


def make_app(config: RouterConfig) -> Starlette:
    """Make the app of a router, to be served by any ASGI server that has lifespans.

    Raises:
        InvalidArgument: an endpoint of events is invalid.
        Unavailable: there is a registry, and redis-py is not installed.
    """
    router = Router(config)
    registration = Registration(router)
    routes, shared = _Routes(router, registration), registration.shared

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            await router.start()
            if shared is not None:
                await shared.start()
            yield
        finally:
            if shared is not None:
                await shared.close()
            await router.close()

    app = Starlette(
        lifespan=lifespan,
        routes=[
            *(
                Route(path, _Generate(router, path), methods=["POST"])
                for path in (CHAT, COMPLETIONS)
            ),
            *page_routes(),
            Route("/v1/models", routes.models),
            Route("/health", routes.health),
            Route("/metrics", routes.metrics),
            Route("/instances", routes.instances),
            Route("/decisions", routes.decisions),
            Route("/query", routes.query, methods=["POST"]),
            Route("/register", routes.register, methods=["POST"]),
            Route("/unregister", routes.unregister, methods=["POST"]),
        ],
        exception_handlers=HANDLERS,
    )
    # An admin is also a client.
    clients = [*config.api_keys, *config.admin_keys] if config.api_keys else []
    app.add_middleware(KeyCheck, keys=clients, admin_keys=config.admin_keys)
    if shared is not None:
        router.metrics.registry_is_up(lambda: not shared.failure)
    app.state.router = router
    return app


class _Generate:
    """The endpoint of requests that generate, as an ASGI app."""

    def __init__(self, router: Router, path: str):
        self._router, self._path = router, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send, self._router.config.client_s)
        await self._router.serve(self._path, scope, receive, reply)


class _Routes:
    """What is told of a router."""

    def __init__(self, router: Router, registration: Registration):
        self._router, self._registration = router, registration

    async def models(self, _: Request) -> Response:
        return json_answer({"object": "list", "data": self._router.health.models()})

    async def health(self, _: Request) -> Response:
        if self._router.placement.can_serve():
            return json_answer({"status": "ok"})
        raise ErrorAnswer(503, "no engines are up that could serve a request", "no_engine")

    async def metrics(self, _: Request) -> Response:
        return Response(self._router.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def instances(self, _: Request) -> Response:
        placement = self._router.placement
        costs = {
            "prefill": placement.prefill_cost.as_dict(),
            "decode": placement.decode_cost.as_dict(),
        }
        admission = self._router.config.admission
        rule = {name: getattr(admission, name) for name in ("rule", "ttft_s", "tbt_s", "decode_s")}
        told = {"instances": self._router.instances(), "costs": costs, "admission": rule}
        return json_answer(told)

    async def decisions(self, request: Request) -> Response:
        given = request.query_params.get("limit", "100")
        if not (given.isascii() and given.isdigit() and 0 < len(given) < 10):
            raise invalid("limit", f"an integer of at least 0, got {given[:20]!r}")
        count, copies = min(int(given), MAX_KEPT), self._router.copies
        told = {"decisions": self._router.log.last(count)}
        return json_answer(told if copies is None else told | {"copies": copies.last(count)})

    async def query(self, request: Request) -> Response:
        """Tell how much of a prompt each engine holds, as the conductor of Mooncake does."""
        async with self._router.bodies.read(request.scope, request.receive) as raw:
            try:
                query = msgspec.json.decode(raw or b"", type=_Query)
            except NO_JSON as error:
                what = f"the body must be a query: {error}"
                raise ErrorAnswer(400, what, "invalid_json") from None
        if not are_token_ids(query.token_ids):
            raise invalid("token_ids", "of token ids in [0, 2**32)")
        if query.tenant_id not in TENANTS:
            raise invalid("tenant_id", f"default here, got {query.tenant_id[:80]!r}")
        matched = self._router.placement.matched_tokens(query.token_ids, query.lora_name or "")
        if query.cache_salt:  # such blocks are not told apart, and those of others do not count
            matched = [0] * len(matched)
        tokens = {
            one.name: matched[number]
            for number, one in self._router.fleet.items()
            if query.instance_id in (one.name, None)
        }
        of_conductor = {
            name: {"longest_matched": count, "GPU": count, "DP": {"0": count}}
            for name, count in tokens.items()
        }
        ours = {name: {"matched_tokens": count} for name, count in tokens.items()}
        return json_answer({"data": ours, "default": of_conductor})

    async def register(self, request: Request) -> Response:
        return await self._change(request, self._registration.register)

    async def unregister(self, request: Request) -> Response:
        return await self._change(request, self._registration.unregister)

    async def _change(
        self, request: Request, change: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
    ) -> Response:
        """Have a change made that is described, and answered, in JSON or in MessagePack."""
        given = request.headers.get("content-type", "")
        kind = given.partition(";")[0].strip().lower()
        form = FORMS.get(kind)
        if form is None:
            what = f"the header Content-Type must be {JSON} or {MSGPACK}, got {given[:80]!r}"
            raise ErrorAnswer(415, what, "unsupported_media_type")
        async with self._router.bodies.read(request.scope, request.receive) as raw:
            try:
                body = form.decode(raw or b"", type=dict[str, Any])
            except NO_JSON as error:
                what = f"the body must be an object: {error}"
                raise ErrorAnswer(400, what, "invalid_json") from None
        answer = await change(body)
        return Response(form.encode(answer), media_type=kind)


class _Query(msgspec.Struct):
    token_ids: list[int]
    model: str = ""
    lora_name: str | None = None
    tenant_id: str = "default"
    instance_id: str | None = None
    cache_salt: str | None = None
