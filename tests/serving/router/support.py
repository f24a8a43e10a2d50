"""Engines that only look like vLLM's, and a router in front of them, all on loopback."""

import json
import threading
from typing import Any

import anyio
import httpx
import zmq
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from mooncake_kernels.hashing import block_hashes
from mooncake_kernels.http_server import listen
from mooncake_serving.http_api import make_server
from mooncake_serving.router import make_app, parse_config
from mooncake_serving.store.events import BlockStored
from mooncake_serving.store.events.messages import encode
from mooncake_serving.store.events.replay import (
    KeptBatches,
    answer_replay,
    endpoint_of,
    listening,
)
from tests.waiting import eventually

BLOCK = 16
MODEL, ADAPTER = "llama", "llama-lora"
WAIT_S = 30.0
COUPLED = {"both-0": "both", "both-1": "both"}
APART = {"prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode", "decode-1": "decode"}


class Served:
    """An ASGI app on a port of its own, in a thread."""

    def __init__(self, app: Any, port: int = 0, client_s: float = WAIT_S):
        self._socket = listen("test", "127.0.0.1", port)
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._server = make_server(app, self._socket, client_s)
        self._server.config.timeout_graceful_shutdown = 1
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],))
        self._thread.start()
        eventually(lambda: self._server.started or not self._thread.is_alive())

    def kill(self) -> None:
        """Break all connections, and take no more. Idempotent."""
        if self._server.should_exit:
            self.close()
            return
        loop = next(iter(self._server.servers)).get_loop()

        def break_all() -> None:
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()

        loop.call_soon_threadsafe(break_all)
        self.close()

    @property
    def num_connections(self) -> int:
        return len(self._server.server_state.connections)

    def stop(self) -> None:
        """Begin to close."""
        self._server.should_exit = True

    def close(self) -> None:
        self.stop()
        self._thread.join()
        self._socket.close()


class Events:
    """Publishes KV events as vLLM does, with token ids."""

    def __init__(self):
        self._publish = listening(zmq.PUB, "test", "endpoint", "tcp://127.0.0.1:0", 1000)
        self._replay = listening(zmq.ROUTER, "test", "replay", "tcp://127.0.0.1:0", 1000)
        self.endpoint, self.replay = endpoint_of(self._publish), endpoint_of(self._replay)
        self._kept, self._next, self._lock = KeptBatches(1000), 0, threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def send(self, *events: Any, is_lost: bool = False, is_kept: bool = True) -> None:
        self.send_encoded(encode(events, 0, "map"), is_lost=is_lost, is_kept=is_kept)

    def send_encoded(self, payload: bytes, *, is_lost: bool = False, is_kept: bool = True) -> None:
        with self._lock:
            if is_kept:
                self._kept.add(self._next, payload, is_empty=False)
            if not is_lost:
                self.send_again(self._next, payload)
            self._next += 1

    def send_again(self, number: int, payload: bytes) -> None:
        """Send a batch of any number, which is not kept."""
        self._publish.send_multipart((b"kv", number.to_bytes(8, "big"), payload))

    def restart(self) -> None:
        """Number the batches from 0 again."""
        with self._lock:
            self._kept, self._next = KeptBatches(1000), 0

    def _answer(self) -> None:
        while not self._closing:
            if self._replay.poll(20):
                with self._lock:
                    answer_replay(self._replay, b"kv", self._kept)

    def close(self) -> None:
        self._closing = True
        self._thread.join()
        self._publish.close(linger=0)
        self._replay.close(linger=0)


def tokens_of(text: str) -> list[int]:
    return [ord(letter) % 512 for letter in text]


def stored(
    tokens: list[int], parent: int | None = None, size: int = BLOCK, lora: str | None = None
):
    """An event of blocks; an engine has hashes of its own."""
    own = [int(name) % 2**60 for name in block_hashes(tokens, size, seed=7).tolist()]
    count = len(tokens) // size * size
    return BlockStored(own, parent, tokens[:count], size, None, "GPU", lora)


class Engine:
    """A server with vLLM's routes, which answers each prompt with words that depend on it alone.

    Attributes:
        calls: the requests that generate, as (path, body, headers).
        gate: while it is not set, no request is answered.
        fail_with: a status with which requests fail.
        die_after: parts of a stream after which the connection breaks.
        stall_after: parts of a stream after which no more come until the caller leaves.
        num_left: requests whose caller has left.
        tokenizes: False: it answers 404; None: it never answers.
        serves: its models.
        first_event: of each stream, if there is one.
        load: further lines of its metrics.
        padding: letters behind each word of a stream.
        tokens_per_event: of a stream, by the usage at its end.
    """

    def __init__(
        self, *, is_prefill: bool = False, needs_params: bool = False, prefill_s: float = 0
    ):
        self.is_prefill, self.needs_params, self.prefill_s = is_prefill, needs_params, prefill_s
        self.calls: list[tuple[str, dict, dict]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.fail_with, self.die_after, self.stall_after = 0, -1, -1
        self.num_left = self.num_tokenized = 0
        self.tokenizes: bool | None = True
        self.serves, self.first_event, self.padding = [MODEL, ADAPTER], b"", 0
        self.load, self.tokens_per_event = "", 1
        self.events = Events()
        self.app = Starlette(
            routes=[
                Route("/health", lambda _: Response()),
                Route("/v1/models", self._models),
                Route("/metrics", self._metrics),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/v1/completions", self._generate, methods=["POST"]),
                Route("/v1/chat/completions", self._generate, methods=["POST"]),
                Route("/query", lambda _: JSONResponse({"0": {"engine_id": "engine-0"}})),
                *self._more_routes(),
            ]
        )
        self.server = Served(self.app)

    @property
    def url(self) -> str:
        return self.server.url

    def restart(self) -> None:
        self.server.kill()
        self.server = Served(self.app, self.server.port)

    def close(self) -> None:
        self.gate.set()
        self.server.kill()
        self.events.close()

    def _more_routes(self) -> list[Route]:
        return []

    async def _models(self, _: Request) -> Response:
        cards = [{"id": one, "parent": None if one == MODEL else MODEL} for one in self.serves]
        return JSONResponse({"object": "list", "data": cards})

    async def _metrics(self, _: Request) -> Response:
        return PlainTextResponse(
            '# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{block_size="16",'
            'num_gpu_blocks="1000"} 1.0\n' + self.load
        )

    async def _tokenize(self, request: Request) -> Response:
        body = await request.json()
        self.num_tokenized += 1
        if self.tokenizes is None:
            while not await request.is_disconnected():
                await anyio.sleep(0.005)
        if not self.tokenizes:
            return JSONResponse({"detail": "Not Found"}, 404)
        if "messages" in body:
            text = "".join(f"<{m['role']}>{m['content']}" for m in body["messages"])
        else:
            text = body["prompt"]
        return JSONResponse({"count": len(text), "tokens": tokens_of(text)})

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.calls.append((request.url.path, body, dict(request.headers)))
        if self.fail_with:
            return JSONResponse({"error": {"message": "it broke"}}, self.fail_with)
        if body.get("max_tokens") == 13:
            return JSONResponse({"error": {"message": "an unlucky number"}}, 400)
        params = body.get("kv_transfer_params")
        if self.needs_params and not (params and params.get("remote_engine_id")):
            return JSONResponse({"error": {"message": "there are no blocks"}}, 500)
        await anyio.sleep(self.prefill_s)
        while not self.gate.is_set():
            if await request.is_disconnected():
                self.num_left += 1
                return Response()
            await anyio.sleep(0.005)
        words = self._words(body)
        if body.get("stream"):
            tells = (body.get("stream_options") or {}).get("include_usage", False)
            events = self._stream(words, is_chat="messages" in body, tells_usage=tells)
            return StreamingResponse(events, media_type="text/event-stream")
        answer = {
            "id": "cmpl", "choices": [{"index": 0, "text": " ".join(words)}],
            "usage": {"prompt_tokens": 1, "completion_tokens": len(words)},
        }  # fmt: skip
        if self.is_prefill and params and params.get("do_remote_decode"):
            answer["kv_transfer_params"] = {
                "do_remote_prefill": True, "do_remote_decode": False,
                "remote_engine_id": "engine-0", "remote_block_ids": [1, 2, 3],
                "remote_host": "127.0.0.1", "remote_port": 5,
                "remote_request_id": request.headers["x-request-id"],
            }  # fmt: skip
        return JSONResponse(answer)

    async def _stream(self, words: list[str], *, is_chat: bool, tells_usage: bool):
        if self.first_event:
            yield self.first_event
        for index, word in enumerate(words):
            if index == self.die_after:
                raise ConnectionResetError("as a test wants it")
            if index == self.stall_after:
                await self._stall()
            text = word + "x" * self.padding
            part = {"delta": {"content": text}} if is_chat else {"text": text}
            event = json.dumps({"choices": [{"index": 0, **part}]})
            yield f"data: {event}\n\n".encode()
            await anyio.sleep(0)
        if tells_usage:
            usage = {"completion_tokens": len(words) * self.tokens_per_event}
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode()
        yield b"data: [DONE]\n\n"

    async def _stall(self) -> None:
        try:
            await anyio.sleep_forever()
        finally:  # cancelled, since the caller has left
            self.num_left += 1

    @staticmethod
    def _words(body: dict) -> list[str]:
        prompt = body.get("prompt") or json.dumps(body["messages"])
        count = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        return [f"{sum(map(hash, map(str, prompt))) % 1000}-{i}" for i in range(count)]


class RouterServer:
    """A router in a thread, with a client of it."""

    def __init__(self, content: dict[str, Any]):
        self.app = make_app(parse_config(content))
        self.router = self.app.state.router
        self.server = Served(self.app, client_s=self.router.config.client_s)
        self.client = httpx.Client(base_url=self.server.url, timeout=WAIT_S)

    def get(self, path: str) -> Any:
        return self.client.get(path).json()

    def complete(self, prompt: Any, max_tokens: int = 4, **more: Any) -> Any:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, **more}
        return self.client.post("/v1/completions", json=body)

    def last(self) -> dict[str, Any]:
        return self.get("/decisions?limit=1")["decisions"][0]

    def instance(self, name: str) -> dict[str, Any]:
        return next(i for i in self.get("/instances")["instances"] if i["name"] == name)

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        rows = (line.rpartition(" ") for line in self.client.get("/metrics").text.splitlines())
        return sum(float(value) for text, _, value in rows if text.partition("{")[0] == name)

    def close(self) -> None:
        self.client.close()
        self.server.close()
