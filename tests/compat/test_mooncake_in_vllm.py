"""vLLM's own ``MooncakeStoreConnector`` on our store, by the drop-in and a master, on the CPU.

Runs where MK_TEST_VLLM names a Python that has vLLM (`make test-vllm` makes one).
"""

import contextlib
import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mooncake_kernels import drop_in

from ..metadata.support import free_port, redis_program

ROOT = Path(__file__).parents[2]
ENGINE = Path(__file__).with_name("vllm_engine.py")
MODEL = ROOT / "tests/serving/connectors/vllm_engine.py"  # which can make one
PACKAGE = "mooncake_serving.compat.mooncake"
WAIT_S = 600
PLUGIN = "[vllm.general_plugins]\ncpu = vllm_engine:register\n"


class Engine:
    """A process that answers, with all that it starts."""

    def __init__(self, command: list[str], environ: dict[str, str], log: Path):
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environ,
                start_new_session=True,
            )
        self._log, self._lines = log, queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout:
            if line.startswith("ANSWER "):
                self._lines.put(json.loads(line.removeprefix("ANSWER ")))
        self._lines.put(None)

    def answer(self):
        told = self._lines.get(timeout=WAIT_S)
        assert told is not None, self._log.read_text()[-4000:]
        return told

    def ask(self, prompts: list[list[int]]):
        self._process.stdin.write(json.dumps(prompts) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(WAIT_S)


def test_one_engine_finds_what_another_has_computed(tmp_path):
    python = os.environ.get("MK_TEST_VLLM")
    if not python:
        pytest.skip("MK_TEST_VLLM names no Python that has vLLM: see `make test-vllm`")
    redis_program()
    site, info, port = tmp_path / "site", tmp_path / "plugin/cpu-0.dist-info", free_port()
    site.mkdir()
    dropped = drop_in.DropIn(drop_in.TARGETS["mooncake"], site)
    dropped.write(goes_first=False)
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu\nVersion: 0\n")
    (info / "entry_points.txt").write_text(PLUGIN)
    extra = tmp_path / "extra"  # the directory's client, from the environment of the tests
    extra.mkdir()
    (extra / "redis").symlink_to(Path(pytest.importorskip("redis").__file__).parent)
    paths = [dropped.folder, info.parent, ENGINE.parent, ROOT / "python", ROOT, extra]
    config = tmp_path / "mooncake.json"
    config.write_text(
        json.dumps(
            {
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": f"127.0.0.1:{port}",
                "global_segment_size": "128MB",
                "local_buffer_size": "16MB",
                "protocol": "tcp",
            }
        )
    )
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "MOONCAKE_CONFIG_PATH": str(config),
    }
    model = str(tmp_path / "model")
    subprocess.run(
        [python, MODEL, json.dumps({"make": model})], env=environ, check=True, timeout=WAIT_S
    )
    rng = random.Random(1)
    command = [python, str(ENGINE), model]
    with contextlib.ExitStack() as stack:
        words = "--host", "127.0.0.1", "--port", str(port), "--directory-port", str(free_port())
        master = subprocess.Popen([sys.executable, "-m", f"{PACKAGE}.master", *words])
        stack.callback(master.wait, WAIT_S)
        stack.callback(master.terminate)
        engines = []
        for name in ("one", "other"):
            engines.append(Engine(command, environ, tmp_path / name))
            stack.callback(engines[-1].kill)
        assert [engine.answer() for engine in engines] == ["ready", "ready"]
        for wait_s in (1, 3, 9):  # one saves in the background, and the other must not save itself
            lengths = [rng.randrange(99, 600) for _ in range(4)]
            prompts = [[rng.randrange(5, 505) for _ in range(length)] for length in lengths]
            computed = engines[0].ask(prompts)
            assert [cached for cached, _ in computed] == [0, 0, 0, 0]
            time.sleep(wait_s)
            found = engines[1].ask(prompts)
            assert [tokens for _, tokens in found] == [tokens for _, tokens in computed]
            if all(cached for cached, _ in found):
                break
        assert [cached for cached, _ in found] == [(length - 1) // 32 * 32 for length in lengths]
