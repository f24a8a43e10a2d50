"""Engines of vLLM in processes of their own, and what these tests give to them."""

import contextlib
import functools
import http.client
import json
import os
import queue
import random
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mooncake_kernels import drop_in
from tests.metadata.support import free_port
from tests.progress import work_of

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
IDLE_S = 120.0  # without a clock tick or a read: the process waits for what never comes
LIMIT_S = 1800.0
POLL_S = 0.2
BLOCK = 32  # tokens
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "1",
    "VLLM_HOST_IP": "127.0.0.1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip
# vLLM's kernel for CPUs takes queries [tokens, heads, size], as of an LFM2, for those of one head:
# an answer then depends on what else a step computes.
OPTIONS = {
    "lfm2": {
        "enable_prefix_caching": True,
        "compilation_config": {"custom_ops": ["-rotary_embedding"]},
    }
}


def random_prompts(count: int, seed: int) -> list[list[int]]:
    """Prompts that have nothing in common, of any lengths above two blocks."""
    rng = random.Random(seed)
    return [[rng.randrange(5, 505) for _ in range(rng.randrange(70, 400))] for _ in range(count)]


def related_prompts(count: int, seed: int = 1) -> list[list[int]]:
    """Prompts of any lengths, many of which begin alike."""
    rng = random.Random(seed)
    common = [rng.randrange(5, 505) for _ in range(300)]
    rests = [[rng.randrange(5, 505) for _ in range(rng.randrange(1, 400))] for _ in range(count)]
    return [common[: rng.randrange(300)] + rest for rest in rests]


def num_in_blocks(tokens: Sequence[int]) -> int:
    """Tokens of a prompt that are in full blocks, without the last token."""
    return (len(tokens) - 1) // BLOCK * BLOCK


class EngineEnded(AssertionError):
    """An engine's process ended, or made no progress; with the end of its log."""


def wait_for(condition: Callable[[], bool], process: "Process | Vllm") -> None:
    """Wait for a condition as long as a process, or another one of its session, makes progress.

    Raises:
        EngineEnded: it does not.
    """
    started = since = time.monotonic()
    seen: object = None
    while not condition():
        now, done = time.monotonic(), work_of(process.pid)
        if done != seen:
            seen, since = done, now
        if now - since > IDLE_S or now - started > LIMIT_S:
            raise EngineEnded(f"it made no progress\n{process.tail()}")


class Process:
    """A process that engines.py has forked, with all that it starts.

    Args:
        vllm: where it runs.
        run: a function of engine.py.
        arguments: of it.
        env: variables that it has in addition.
    """

    def __init__(self, vllm: "Vllm", run: str, arguments: Any, env: dict[str, str]):
        self.log = vllm.new_log(run)
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(vllm.socket))
        self._connection = connection
        self._lines, self._tasks = connection.makefile("r"), connection.makefile("w")
        told = {"run": run, "arguments": arguments, "env": env, "log": str(self.log)}
        self.tell(told)
        self.pid = int(self._lines.readline())
        self._answers: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in self._lines:
                self._answers.put(line)
        self._kill()  # what it has started, while no other process can have its id
        self._answers.put("")

    def answer(self) -> Any:
        """The next answer.

        Raises:
            EngineEnded: there will be none.
        """
        line = None

        def has_come() -> bool:
            nonlocal line
            with contextlib.suppress(queue.Empty):
                line = self._answers.get(timeout=POLL_S)
            return line is not None

        wait_for(has_come, self)
        if not line:
            raise EngineEnded(self.tail())
        return json.loads(line)

    def tell(self, task: Any) -> None:
        self._tasks.write(json.dumps(task) + "\n")
        self._tasks.flush()

    def tail(self) -> str:
        return self.log.read_text()[-8000:]

    @property
    def has_ended(self) -> bool:
        return not self._reader.is_alive()

    def end(self) -> None:
        """Tell it to end, and wait until it has."""
        self._connection.shutdown(socket.SHUT_WR)
        self._reader.join(IDLE_S)
        self.kill()

    def kill(self) -> None:
        """End it, and all that it has started, by SIGKILL. Idempotent."""
        if not self.has_ended:
            self._kill()
            self._reader.join(IDLE_S)
        self._connection.close()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class Engine(Process):
    """An ``LLM``, which answers tasks."""

    def wait(self) -> "Engine":
        assert self.answer() == "ready"
        return self

    def serve(
        self,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        params: Sequence[dict | None] | None = None,
        **before: bool,
    ) -> dict[str, Any]:
        """See ``engine.llm`` for what can be done before."""
        self.begin(prompts, num_tokens, params, **before)
        return self.answer()

    def begin(
        self,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        params: Sequence[dict | None] | None = None,
        **before: bool,
    ) -> None:
        params = [None] * len(prompts) if params is None else params
        self.tell({"prompts": prompts, "num_tokens": num_tokens, "params": params, **before})


class Answer(NamedTuple):
    """What a server has answered.

    Attributes:
        status: of HTTP; 0: it closed the connection.
        tokens: that were generated.
        params: the request's kv_transfer_params as the server returns them.
    """

    status: int
    tokens: list[int]
    params: dict | None


class Server(Process):
    """vLLM's OpenAI server."""

    port = 0

    def wait(self) -> "Server":
        """Wait until it serves."""

        def serves() -> bool:
            if self.has_ended:
                raise EngineEnded(self.tail())
            with contextlib.suppress(OSError):
                return self.get("/health") is not None
            time.sleep(POLL_S)
            return False

        wait_for(serves, self)
        return self

    def get(self, path: str) -> str:
        url = f"http://127.0.0.1:{self.port}{path}"
        with urllib.request.urlopen(url, timeout=IDLE_S) as response:
            return response.read().decode()

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        rows = (line.rpartition(" ") for line in self.get("/metrics").splitlines())
        return sum(float(value) for text, _, value in rows if text.partition("{")[0] == name)

    def complete(
        self,
        prompt: Sequence[int],
        num_tokens: int,
        params: dict | None = None,
        request_id: str = "",
    ) -> Answer:
        try:
            with self._post(prompt, num_tokens, params, request_id) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            return Answer(error.code, [], None)
        except OSError:
            return Answer(0, [], None)
        tokens = answer["choices"][0]["token_ids"]
        return Answer(response.status, tokens, answer.get("kv_transfer_params"))

    def kill_while_it_completes(
        self, prompt: Sequence[int], num_tokens: int, params: dict | None = None
    ) -> list[int]:
        """Kill it when it has sent the first token; return the tokens that have come."""
        tokens: list[int] = []
        with self._post(prompt, num_tokens, params, stream=True) as response:
            with contextlib.suppress(OSError, http.client.HTTPException):
                for line in response:
                    if line.startswith(b"data: {"):
                        tokens += json.loads(line[6:])["choices"][0]["token_ids"]
                        self.kill()
        return tokens

    def _post(
        self,
        prompt: Sequence[int],
        num_tokens: int,
        params: dict | None,
        request_id: str = "",
        **more: Any,
    ) -> Any:
        body = {
            "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, **more,
        }  # fmt: skip
        if params is not None:
            body["kv_transfer_params"] = params
        headers = {"Content-Type": "application/json"}
        if request_id:
            headers["X-Request-Id"] = request_id
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        return urllib.request.urlopen(request, timeout=IDLE_S)


@contextlib.contextmanager
def proxy(serve: Callable[[dict], object]) -> Iterator[Server]:
    """A program that serves as ``server`` in the names that it is given."""
    names: dict[str, Any] = {}
    thread = threading.Thread(target=serve, args=(names,), daemon=True)
    thread.start()
    while "server" not in names:
        assert thread.is_alive(), "the proxy has ended"
        time.sleep(POLL_S)
    server = Server.__new__(Server)
    server.port = names["server"].server_port
    try:
        yield server
    finally:
        names["server"].shutdown()
        names["server"].server_close()
        thread.join()


class Vllm:
    """An environment with vLLM, and a process there that forks engines. A context manager.

    ``import mooncake`` and ``import nixl`` give this project's packages there, by the drop-in.

    Args:
        python: of the environment.
        folder: for all files.
        packages: a folder whose packages are imported instead, if there are such.
    """

    def __init__(self, python: str, folder: Path, packages: Path | None = None):
        self.folder = folder
        self.socket = folder / "engines"
        self._started: list[Process] = []
        site, info = folder / "site", folder / "plugin/cpu-0.dist-info"
        site.mkdir()
        dropped = [drop_in.DropIn(target, site) for target in drop_in.TARGETS.values()]
        for one in dropped:
            one.write(goes_first=False)
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu\nVersion: 0\n")
        (info / "entry_points.txt").write_text("[vllm.general_plugins]\ncpu = on_cpu:register\n")
        first = [] if packages is None else [packages]
        paths = [*first, *(one.folder for one in dropped), info.parent, HERE, ROOT / "python", ROOT]
        env = os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
        self._log = self.new_log("engines").open("w")
        self._process = subprocess.Popen(
            [python, str(HERE / "engines.py"), str(self.socket)],
            stdin=subprocess.PIPE, stdout=self._log, stderr=self._log, env=env,
            start_new_session=True,
        )  # fmt: skip
        try:
            wait_for(self._listens, self)
            self.model = self.model_of("llama")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Vllm":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @functools.cached_property
    def version(self) -> tuple[int, ...]:
        program = "import importlib.metadata as m; print(m.version('vllm-cpu'))"
        command = [self._process.args[0], "-c", program]
        found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return tuple(map(int, found.split(".")[:2]))

    def tail(self) -> str:
        return Path(self._log.name).read_text()[-8000:]

    def _listens(self) -> bool:
        time.sleep(POLL_S)
        if self._process.poll() is not None:
            raise EngineEnded(self.tail())
        return self.socket.exists()

    def model_of(self, kind: str) -> str:
        """A folder with a model of that kind; see ``engine.MODELS``."""
        folder = self.folder / kind
        if not folder.exists():
            made = Process(self, "model", {"kind": kind, "folder": str(folder)}, {})
            self._started.append(made)
            assert made.answer() == "made"
            made.end()
        return str(folder)

    def options_of(self, kind: str) -> dict[str, Any]:
        """Options of an engine with a model of that kind. Skips the test if vLLM has no kernel."""
        if kind == "lfm2" and self.version < (0, 32):
            pytest.skip("vLLM computes recurrent layers in float32 on a CPU from 0.32 on")
        return {"model": self.model_of(kind), **OPTIONS.get(kind, {})}

    def new_log(self, name: str) -> Path:
        return self.folder / f"{name}-{len(list(self.folder.glob('*.log')))}.log"

    def engine(
        self,
        connector: dict | None = None,
        env: dict[str, str] | None = None,
        options: dict[str, Any] | None = None,
        *,
        is_one_process: bool = True,
        **arguments: Any,
    ) -> Engine:
        """Start an ``LLM`` with a kv_transfer_config; see ``engine.llm`` for the rest."""
        options = {"model": self.model, "kv_transfer_config": connector} | (options or {})
        env = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(not is_one_process))} | (env or {})
        return self._keep(Engine(self, "llm", {"options": options, **arguments}, env))

    def server(
        self,
        connector: dict | None = None,
        env: dict[str, str] | None = None,
        ranks: int = 1,
        **more: Any,
    ) -> Server:
        """Start an OpenAI server with a kv_transfer_config; ``more`` are further options of it."""
        port = free_port()
        options = {
            "model": self.model, "served-model-name": "llama", "dtype": "float32",
            "block-size": BLOCK, "max-model-len": 1024, "max-num-seqs": 8,
            "kv-cache-memory-bytes": 64 << 20, "tensor-parallel-size": ranks,
            "host": "127.0.0.1", "port": port, **more,
        }  # fmt: skip
        if connector:
            options["kv-transfer-config"] = json.dumps(connector)
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        server = self._keep(Server(self, "server", [*words, "--enforce-eager"], env or {}))
        server.port = port
        return server

    def _keep(self, process: Any) -> Any:
        self._started.append(process)
        return process

    def close(self) -> None:
        for process in self._started:
            process.kill()
        self._process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()


def at_once(call: Any, arguments: Sequence[tuple]) -> list[Any]:
    """The results of calls that are made at the same time."""
    with ThreadPoolExecutor(len(arguments)) as executor:
        return list(executor.map(lambda some: call(*some), arguments))
