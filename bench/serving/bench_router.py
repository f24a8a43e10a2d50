"""The router beside a bare proxy and no proxy at all, in front of engines that answer at once.

The engines are a loop of this process, which also sends the requests; the router, or the proxy, is
a process on a core of its own. A request has 512 token ids of which 384 are common to all, and is
answered by a stream of 8 tokens. `one at a time` are times of a request; `in parallel` is how many
a second go through that core, with 32 under way. `router` is Algorithm 1 with everything switched
on but objectives; its engines do both, or (`handoff`) one prefills and one decodes, which is two
requests to engines for one of a client. `1000 engines` all are at this process, by the addresses of
the loopback, and are looked at every 2 seconds.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib and baselines

from lib.harness import arguments, spread
from lib.processes import free_port, pin
from lib.table import heading, save

PROXY = Path(__file__).parents[1] / "baselines/http_proxy.py"
COMMON, OWN, TOKENS = 384, 128, 8
PARALLEL = 32
MODEL = "mock"
START_S = 180.0
EVENT = b'data: {"choices": [{"index": 0, "text": "word "}]}\n\n'
DONE = b"data: [DONE]\n\n"
PARTS = [EVENT] * TOKENS + [DONE, b""]
STREAM = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in PARTS)
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
METRICS = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="100000"} 1.0\n'
MODELS = json.dumps({"object": "list", "data": [{"id": MODEL, "parent": None}]}).encode()
PREFILLED = json.dumps(
    {
        "choices": [{"index": 0, "text": "word"}],
        "kv_transfer_params": {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "e",
            "remote_block_ids": [1], "remote_host": "127.0.0.1", "remote_port": 5,
        },
    }
).encode()  # fmt: skip


class Engine(asyncio.Protocol):
    """A connection to an engine, which answers each request at once."""

    def __init__(self) -> None:
        self._bytes = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._bytes += data
        while (end := self._bytes.find(b"\r\n\r\n")) >= 0:
            head, size = self._bytes[:end], 0
            for line in head.split(b"\r\n"):
                if line.lower().startswith(b"content-length:"):
                    size = int(line[15:])
            if len(self._bytes) < end + 4 + size:
                return
            body, self._bytes = self._bytes[end + 4 : end + 4 + size], self._bytes[end + 4 + size :]
            self._transport.write(self._answer(head.split(b" ", 2)[1], body))

    def _answer(self, path: bytes, body: bytes) -> bytes:
        is_prefill = b'"do_remote_decode":true' in body.replace(b" ", b"")
        if path == b"/v1/completions" and not is_prefill:
            return STREAM_HEAD + STREAM
        whole = {b"/metrics": METRICS, b"/v1/models": MODELS, b"/v1/completions": PREFILLED}
        content = whole.get(path, b"")
        return (
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
            % (len(content), content)
        )


class Client:
    """A connection that sends one request after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer

    async def complete(self, request: bytes) -> None:
        """Send a request, and read its answer, a stream, to its end.

        Raises:
            RuntimeError: it is another one.
        """
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200") or b"chunked" not in head:
            raise RuntimeError(f"a request was answered by {head[:500]!r}")
        content = b""
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            content += (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readexactly(2)
        if content != EVENT * TOKENS + DONE:
            raise RuntimeError(f"a request was answered by {content[:500]!r}")

    def close(self) -> None:
        self._writer.close()


class Load(NamedTuple):
    """What was measured: seconds of each request one at a time, and requests a second."""

    seconds: list[float]
    per_s: float


def requests(count: int, seed: int) -> Iterator[bytes]:
    draw = random.Random(seed)
    common = [random.Random(0).randrange(30_000) for _ in range(COMMON)]
    for _ in range(count):
        prompt = common + [draw.randrange(30_000) for _ in range(OWN)]
        body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "stream": True}
        content = json.dumps(body).encode()
        yield (
            b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(content), content)
        )


async def load(port: int, options: argparse.Namespace, seed: int) -> Load:
    clients = [Client(*await asyncio.open_connection("127.0.0.1", port)) for _ in range(PARALLEL)]
    seconds = []
    for request in requests(options.requests, seed):
        begun_s = time.perf_counter()
        await clients[0].complete(request)
        seconds.append(time.perf_counter() - begun_s)
    queue = requests(options.requests * 4, seed + 1)

    async def work(client: Client) -> int:
        count = 0
        for request in queue:
            await client.complete(request)
            count += 1
        return count

    begun_s = time.perf_counter()
    total = sum(await asyncio.gather(*map(work, clients)))
    per_s = total / (time.perf_counter() - begun_s)
    for client in clients:
        client.close()
    return Load(seconds, per_s)


def router_file(engine_port: int, port: int, num_engines: int, *, apart: bool) -> str:
    lines = [
        f'port = {port}\nconnector = "nixl"\nblock_size = 16\n',
        f"max_instances = {num_engines}\n",
    ]
    for number in range(num_engines):
        role = ("prefill", "decode")[number % 2] if apart else "both"
        host = f"127.0.{1 + number // 250}.{1 + number % 250}"
        url = f"http://{host}:{engine_port}"
        lines.append(f'[[instance]]\nname = "e{number}"\nrole = "{role}"\nurl = "{url}"\n')
    return "".join(lines)


@contextmanager
def process(command: list[str], core: int, port: int) -> Iterator[int]:
    """Start a server, wait until it listens, and keep it on a core; yields its port."""
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen([sys.executable, *command], stdout=log, stderr=log)
        try:
            pin(server.pid, [core])
            yield port
            if server.poll() is not None:
                log.seek(0)
                raise RuntimeError(f"{command} has ended: {log.read()[-2000:]}")
        finally:
            server.terminate()
            server.wait()


async def until_up(port: int, path: str) -> None:
    """Wait until a server answers."""
    url, until = f"http://127.0.0.1:{port}{path}", time.monotonic() + START_S

    def ask() -> bool:
        try:
            return urllib.request.urlopen(url, timeout=5).status == 200
        except urllib.error.HTTPError as error:
            return error.code == 404  # the proxy
        except OSError:
            return False

    while not await asyncio.to_thread(ask):
        if time.monotonic() > until:
            raise RuntimeError(f"{url} does not answer")
        await asyncio.sleep(0.2)


async def main(options: argparse.Namespace, folder: Path) -> None:
    head, rows = heading("router", options), []
    cores = sorted(os.sched_getaffinity(0))
    core = cores[-1]
    os.sched_setaffinity(0, cores[:1])
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Engine, "0.0.0.0", 0)
    engine_port = server.sockets[0].getsockname()[1]
    with ExitStack() as stack:
        ports = {"direct": engine_port}
        port = free_port()
        command = [str(PROXY), str(port), f"http://127.0.0.1:{engine_port}"]
        ports["proxy"] = stack.enter_context(process(command, core, port))
        await until_up(port, "/")
        kinds = {"router": (2, False), "handoff": (2, True)}
        if not options.quick:
            kinds[f"{options.engines} engines"] = (options.engines, False)
        for name, (num_engines, apart) in kinds.items():
            port = free_port()
            file = folder / f"{name}.toml"
            file.write_text(router_file(engine_port, port, num_engines, apart=apart))
            command = ["-m", "mooncake_serving.router", "--config", str(file)]
            ports[name] = stack.enter_context(process(command, core, port))
            await until_up(port, "/health")
        found: dict[str, list[Load]] = {name: [] for name in ports}
        for number in range(1 + options.repeat):
            for name, port in ports.items():
                measured = await load(port, options, number)
                if number:  # the first warms up
                    found[name].append(measured)
        proxies = found["proxy"]
        for name, those in found.items():
            times = [1000 * statistics.median(one.seconds) for one in those]
            added = spread(
                [
                    mine - 1000 * statistics.median(one.seconds)
                    for mine, one in zip(times, proxies, strict=True)
                ]
            )
            rate = spread([one.per_s for one in those])
            row = {
                "case": name, "ms": statistics.median(times),
                "ms_over_proxy": added[0], "ms_over_proxy_quartiles": added[1],
                "per_s": rate[0], "per_s_quartiles": rate[1],
            }  # fmt: skip
            rows.append(row)
            sys.stdout.write(
                f"{name:16} {row['ms']:6.2f} ms, {row['ms_over_proxy']:+.2f} ms beside the proxy"
                f"   {row['per_s']:7.0f} requests/s\n"
            )
        save(head, rows, options)
    server.close()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(repeat=5)
    parser.add_argument("--requests", type=int, default=500, help="one at a time; 4 times as many")
    parser.add_argument("--engines", type=int, default=1000, help="of the last row")


if __name__ == "__main__":
    chosen = arguments(__doc__, add_options, without=("device", "seconds"))
    if chosen.quick:
        chosen.requests, chosen.repeat = 40, 1
    with tempfile.TemporaryDirectory(prefix="mooncake-router-") as name:
        asyncio.run(main(chosen, Path(name)))
