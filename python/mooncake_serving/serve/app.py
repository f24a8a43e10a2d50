"""The OpenAI server of one engine."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from mooncake_serving.http_api import (
    HANDLERS,
    Bodies,
    ClientStalled,
    ErrorAnswer,
    Reply,
    json_answer,
)

from .answer_text import AnswerText
from .answers import Answer
from .calls import CHAT, COMPLETIONS, TOKENIZE, Call, Served, read_call, read_tokens
from .job import EXACT, REUSE, SEMANTIC
from .metrics import EngineMetrics
from .worker import Worker

logger = logging.getLogger(__name__)

MAX_BODY_BYTES, MAX_HELD_BYTES = 16 << 20, 512 << 20
CLIENT_S = 60.0  # a client is given up that sends or takes nothing for so long


def make_app(served: Served, worker: Worker, failed: Callable[[], None]) -> Starlette:
    """Make the app of an engine, to be served by an ASGI server that has lifespans.

    Args:
        served: what it serves.
        worker: not started yet; the app closes it.
        failed: called if the worker ends by an error.
    """
    server = _Server(served, worker)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        worker.start(asyncio.get_running_loop(), failed)
        try:
            yield
        finally:
            await asyncio.to_thread(worker.close)

    generate = [
        Route(path, _Generate(server, path), methods=["POST"]) for path in (CHAT, COMPLETIONS)
    ]
    return Starlette(
        lifespan=lifespan,
        routes=[
            *generate,
            Route(TOKENIZE, server.tokenize, methods=["POST"]),
            Route("/v1/models", server.models),
            Route("/health", server.health),
            Route("/metrics", server.metrics),
        ],
        exception_handlers=HANDLERS,
    )


class _Generate:
    """The endpoint of requests that generate, as an ASGI app."""

    def __init__(self, server: "_Server", path: str):
        self._server, self._path = server, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send, CLIENT_S)
        try:
            try:
                async with self._server.bodies.read(scope, receive) as raw:
                    if raw is not None:  # a long prompt takes seconds to read
                        served = self._server.served
                        call = await asyncio.to_thread(read_call, self._path, raw, served)
                        await self._server.answer(call, receive, reply)
            except ErrorAnswer as error:
                await reply.error(error)
        except ClientStalled as stalled:
            logger.warning("%s", stalled)


class _Server:
    """Answers requests by a worker."""

    def __init__(self, served: Served, worker: Worker):
        self.served, self.worker = served, worker
        self._metrics = EngineMetrics(worker)
        self.bodies = Bodies(MAX_BODY_BYTES, MAX_HELD_BYTES, CLIENT_S)
        self._created = int(time.time())

    async def answer(self, call: Call, receive: Receive, reply: Reply) -> None:
        """Have a request computed, and answer it, unless its client leaves.

        Raises:
            ErrorAnswer: it has failed.
            ClientStalled: its client does not read.
        """
        self.worker.submit(call.job)
        client_left = asyncio.ensure_future(receive())  # nothing else can come
        task = asyncio.ensure_future(self._answer(call, reply))
        try:
            await asyncio.wait({task, client_left}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            self.worker.end(call.job, "abort")  # no effect on one that has ended
            client_left.cancel()
            task.cancel()
            await asyncio.wait({task})

    async def _answer(self, call: Call, reply: Reply) -> None:
        answer = Answer(call, self.served.name)
        text = AnswerText(self.served.tokenizer, call.stops)
        parts: list[str] = []
        reason: str | None = None
        while reason is None:
            output = await call.job.outputs.get()
            if isinstance(output, ErrorAnswer):
                raise output
            answer.num_generated += 1
            reason = output.finish_reason
            part = "" if reason == "stop" else text.push(output.token_id)
            if reason is not None:
                part += text.finish()
            if text.is_stopped:
                reason = "stop"
                self.worker.end(call.job, reason)
            if not call.is_stream:
                parts.append(part)
                continue
            event = answer.part(part, reason)
            if not reply.status:
                await reply.begin(200, {"content-type": "text/event-stream; charset=utf-8"})
                event = answer.begin() + event
            if event:
                await reply.write(event)
        if call.is_stream:
            await reply.write(answer.end(), is_last=True)
            return
        body = answer.whole("".join(parts), reason)
        await reply.whole(200, {"content-type": "application/json"}, body)

    async def tokenize(self, request: Request) -> Response:
        async with self.bodies.read(request.scope, request.receive) as raw:
            tokens = await asyncio.to_thread(read_tokens, raw or b"", self.served)
        return json_answer(
            {"count": len(tokens), "max_model_len": self.served.max_tokens, "tokens": tokens}
        )

    async def models(self, _: Request) -> Response:
        card: dict[str, Any] = {
            "id": self.served.name,
            "object": "model",
            "created": self._created,
            "owned_by": "mooncake-kernels",
            "max_model_len": self.served.max_tokens,
            REUSE: [EXACT, SEMANTIC] if self.served.is_semantic else [EXACT],
        }
        if self.served.receives:
            card[f"received_{REUSE}"] = [EXACT, SEMANTIC]
        return json_answer({"object": "list", "data": [card]})

    async def health(self, _: Request) -> Response:
        if not self.worker.is_alive:
            raise ErrorAnswer(503, "the engine has ended", "no_engine")
        return json_answer({"status": "ok"})

    async def metrics(self, _: Request) -> Response:
        return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)
