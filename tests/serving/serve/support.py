"""Engine servers in this process, as ``serve engine`` makes them, ``serve up``, and clients."""

import argparse
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from mooncake_serving.serve import options as serve_options
from mooncake_serving.serve.app import make_app
from mooncake_serving.serve.engine import load, make_engine
from mooncake_serving.serve.worker import Worker
from mooncake_serving.store.events import EventPublisher
from tests.serving.router.support import Served as HttpServer
from tests.waiting import eventually

COMMAND = [sys.executable, "-m", "mooncake_serving", "serve"]
WAIT_S = 60.0
BLOCK = 8


def engine_options(folder: Path, *more: str) -> argparse.Namespace:
    """Parse options of ``serve engine``, for the tiny model."""
    parser = argparse.ArgumentParser()
    serve_options.add_commands(parser)
    small = [f"--block-size={BLOCK}", "--num-blocks=128", "--chunk-tokens=32", "--threads=1"]
    given = [f"--model={folder}", "--name=tiny", "--batch-invariant", *small, *more]
    return parser.parse_args(["engine", *given])


class Up:
    """A running ``serve up`` of the tiny model, with further options.

    Attributes:
        process: of the command.
        err: a file with what it and its servers log.
        url, client: of the router.
    """

    def __init__(self, folder: Path, tmp_path: Path, *more: str):
        small = ["--block-size=8", "--num-blocks=128", "--chunk-tokens=32", "--batch-invariant"]
        self._out, self.err = tmp_path / "out", tmp_path / "err"
        with self._out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                [*COMMAND, "up", "--port=0", f"--model={folder}", "--name=tiny", *small, *more],
                stdout=out,
                stderr=err,
            )
        eventually(lambda: "curl" in self.out or self.process.poll() is not None)
        assert "serve: ready at " in self.out, self.err.read_text()
        self.url = self.out.split()[3].rstrip(":")
        self.client = httpx.Client(base_url=self.url, timeout=WAIT_S)

    @property
    def out(self) -> str:
        return self._out.read_text()

    def pid_of(self, role: str) -> int | None:
        """The number of a server's process; None while there is none."""
        for pid in self.children():
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if f"--role={role}".encode() in words or role.encode() in words:
                return pid
        if role == "stage" and (prefill := self.pid_of("prefill")) is not None:
            return next((pid for pid in self.children(prefill) if _is_stage(pid)), None)
        return None

    def children(self, pid: int | None = None) -> list[int]:
        pid = pid or self.process.pid
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def complete(self, prompt: str, **more) -> httpx.Response:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 10, "temperature": 0, **more}
        return self.client.post("/v1/completions", json=body)

    def close(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait()


def _is_stage(pid: int) -> bool:
    """Whether a process is a stage of a pipeline: of ``multiprocessing``."""
    return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()


class EngineServer:
    """An engine on a port of its own.

    Attributes:
        worker: of the engine.
        client: of the server.
        url: of the server.
        publisher: of its events, if it has ``events``.
    """

    def __init__(self, folder: Path, *more: str, events: bool = False):
        options = engine_options(folder, *more)
        model, served = load(options)
        self.publisher = None
        if events:
            endpoint = "tcp://127.0.0.1:0"
            self.publisher = EventPublisher(endpoint, replay_endpoint=endpoint)
        make = partial(make_engine, options, model, self.publisher)
        self.worker = Worker(make, options.max_waiting)
        self.server = HttpServer(make_app(served, self.worker, lambda: None))
        self.url = self.server.url
        self.client = httpx.Client(base_url=self.url, timeout=WAIT_S)

    @property
    def num_free_blocks(self) -> int:
        return self.worker.engine.allocator.num_free

    def complete(self, prompt: Any, max_tokens: int = 8, **more: Any) -> httpx.Response:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        return self.client.post("/v1/completions", json={**body, **more})

    def chat(self, content: str, max_tokens: int = 8, **more: Any) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        body = {"model": "tiny", "messages": messages, "max_tokens": max_tokens, "temperature": 0}
        return self.client.post("/v1/chat/completions", json={**body, **more})

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        rows = (line.rpartition(" ") for line in self.client.get("/metrics").text.splitlines())
        return sum(float(value) for text, _, value in rows if text.partition("{")[0] == name)

    def close(self) -> None:
        self.client.close()
        self.server.kill()
        if self.publisher is not None:
            self.publisher.close()


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, which is whole."""
    lines = [line for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def text_of(events: list[dict[str, Any]]) -> str:
    """The text of a stream's events."""
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)
