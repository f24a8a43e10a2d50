"""vLLM's own NixlConnector, unmodified, on ``compat.nixl``: prefill and decode in two processes.

Each engine is run by the Python that MK_TEST_VLLM names (`make test-vllm`). Tokens are compared
with those of one engine alone.
"""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.metadata.support import free_port
from tests.serving.connectors.test_in_vllm import ENGINE, ROOT, blocks, prompts

SERVER = Path(__file__).with_name("nixl_engine.py")
START = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip


class Engine:
    """An engine in a process of its own."""

    def __init__(self, python: str, model: Path, folder: Path, role: str, ucx_tls: str):
        paths = os.pathsep.join([str(folder), str(ROOT / "python"), str(ROOT)])
        env = os.environ | {"PYTHONPATH": paths, "UCX_TLS": ucx_tls}
        told = {"model": str(model), "role": role, "port": free_port()}
        self._log = (folder / f"{role or 'alone'}.log").open("w+")
        self.process = subprocess.Popen(
            [python, SERVER, json.dumps(told)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=env,
            start_new_session=True,
        )  # fmt: skip

    def answer(self) -> dict:
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
            self._log.write(line)
        self._log.flush()
        text = Path(self._log.name).read_text()[-8000:]
        pytest.fail(f"the engine has ended: {self.process.wait()}\n{text}", pytrace=False)

    def serve(self, requests: list, num_tokens: int, params: list | None = None) -> dict:
        task = {"prompts": requests, "num_tokens": num_tokens}
        task["params"] = params or [None] * len(requests)
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        self._log.close()


@pytest.fixture
def make_engine(tmp_path_factory):
    """Start an engine whose ``import nixl`` gives this project's package, as the drop-in does."""
    python = os.environ.get("MK_TEST_VLLM")
    if not python:
        pytest.skip("MK_TEST_VLLM names no Python that has vLLM: see `make test-vllm`")
    folder = tmp_path_factory.mktemp("nixl_engines")
    (folder / "nixl").mkdir()
    (folder / "nixl/__init__.py").write_text("from mooncake_serving.compat.nixl import *\n")
    for name in ("_api", "_bindings"):
        text = f"import sys\nimport mooncake_serving.compat.nixl.{name} as ours\n"
        (folder / f"nixl/{name}.py").write_text(f"{text}sys.modules[__name__] = ours\n")
    model = folder / "model"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([python, ENGINE, json.dumps({"make": str(model)})], check=True, env=env)
    started = []

    def start(role: str, ucx_tls: str = "all") -> Engine:
        started.append(Engine(python, model, folder, role, ucx_tls))
        return started[-1]

    yield start
    for engine in started:
        engine.close()


TOKEN_BYTES = 3 * 2 * 2 * 64 * 4  # layers, key and value, heads, their size, float32


@pytest.mark.parametrize("ucx_tls, transport", [("sm", "shm"), ("tcp", "tcp")])
def test_prefill_here_and_decode_there(make_engine, ucx_tls, transport):
    prefill, decode = make_engine("kv_producer", ucx_tls), make_engine("kv_consumer", ucx_tls)
    alone = make_engine("")
    for engine in (prefill, decode, alone):
        assert engine.answer()["nixl"] == "mooncake_serving.compat.nixl.agent"
    num_tokens = 0
    for seed in (1, 2):
        requests = prompts(6, seed)
        expected = alone.serve(requests, 24)["tokens"]
        handed = prefill.serve(requests, 1, [START] * len(requests))
        there = decode.serve(requests, 24, handed["params"])
        assert there["tokens"] == expected
        assert handed["tokens"] == [tokens[:1] for tokens in expected]
        # Blocks that it computed or read for earlier prompts are not read again.
        num_tokens += sum(map(blocks, requests)) - sum(there["num_cached"])
        assert {*there["read"]} == {transport}
        assert there["read"][transport] >= num_tokens * TOKEN_BYTES > 0
