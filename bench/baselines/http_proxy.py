"""A proxy that only passes requests on: what a router costs besides is its own.

python http_proxy.py PORT ENGINE
"""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route


def proxy(engine: str) -> Starlette:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    client = httpx.AsyncClient(base_url=engine, limits=limits, timeout=60, trust_env=False)

    async def complete(request: Request) -> StreamingResponse:
        headers = {"content-type": "application/json"}
        passed = client.build_request(
            "POST", request.url.path, content=await request.body(), headers=headers
        )
        answer = await client.send(passed, stream=True)

        async def parts() -> AsyncIterator[bytes]:
            async for part in answer.aiter_raw():
                yield part
            await answer.aclose()

        kind = answer.headers["content-type"]
        return StreamingResponse(parts(), answer.status_code, media_type=kind)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with client:
            yield

    return Starlette(
        routes=[Route("/v1/completions", complete, methods=["POST"])], lifespan=lifespan
    )


if __name__ == "__main__":
    uvicorn.run(proxy(sys.argv[2]), port=int(sys.argv[1]), log_level="warning", access_log=False)
