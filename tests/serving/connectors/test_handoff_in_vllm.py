"""Hand-offs in vLLM: prefill and decode in two processes, compared with one alone.

Each engine is run by the Python that MK_TEST_VLLM names (`make test-vllm`).
"""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.metadata.support import free_port
from tests.serving.in_vllm.support import ROOT
from tests.serving.in_vllm.support import related_prompts as prompts
from tests.waiting import eventually

ENGINE = Path(__file__).with_name("vllm_engine.py")
SERVER = Path(__file__).with_name("handoff_engine.py")
PREFILL_ONLY = {"do_remote_decode": True, "do_remote_prefill": False}
TOKEN_BYTES = 3 * 2 * 2 * 64 * 4  # layers, key and value, heads, their size, float32


class Engine:
    """An engine in a process of its own."""

    def __init__(self, python: str, model: Path, folder: Path, role: str, told: dict):
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "python"), str(ROOT)])}
        self.port = free_port() if role == "kv_producer" else 0
        told |= {"model": str(model), "role": role, "port": self.port}
        self._log = (folder / f"{role}.log").open("w+")
        self.process = subprocess.Popen(
            [python, SERVER, json.dumps(told)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=env,
            start_new_session=True,
        )  # fmt: skip

    @property
    def log(self) -> str:
        """Its stderr, and the lines of its stdout that are no answers."""
        self._log.flush()
        return Path(self._log.name).read_text()

    def answer(self) -> dict:
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
            self._log.write(line)
        text = self.log[-8000:]
        pytest.fail(f"the engine has ended: {self.process.wait()}\n{text}", pytrace=False)

    def begin(self, requests: list, num_tokens: int, params: list | None = None, **options) -> None:
        task = {"prompts": requests, "num_tokens": num_tokens, **options}
        task["params"] = params or [None] * len(requests)
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()

    def serve(self, requests: list, num_tokens: int, params: list | None = None, **options) -> dict:
        self.begin(requests, num_tokens, params, **options)
        return self.answer()

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        self.process.stdin.close()
        self.process.stdout.close()
        self._log.close()


@pytest.fixture
def make_engine(tmp_path_factory):
    """Start engines of small models with random weights."""
    python = os.environ.get("MK_TEST_VLLM")
    if not python:
        pytest.skip("MK_TEST_VLLM names no Python that has vLLM: see `make test-vllm`")
    folder = tmp_path_factory.mktemp("handoff_engines")
    models, task = folder / "models", folder / "task.json"
    task.write_text(json.dumps({"make": str(models)}))
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "python"), str(ROOT)])}
    subprocess.run([python, ENGINE, task], check=True, env=env)
    started = []

    def start(
        role: str,
        kind: str = "llama",
        *,
        url: str = "",
        ahead: bool = False,
        llm: dict | None = None,
        **options,
    ) -> Engine:
        told = {"url": url, "ahead": ahead, "llm": llm or {}, "options": options}
        started.append(Engine(python, models / kind, folder, role, told))
        return started[-1]

    yield start
    for engine in started:
        engine.close()


def test_prefill_here_and_decode_there(make_engine):
    prefill, decode = make_engine("kv_producer", lease_s=10.0), make_engine("kv_consumer")
    for engine in (prefill, decode):
        engine.answer()
    num_free = [engine.serve([[7] * 5], 1)["num_free"] for engine in (prefill, decode)]

    # A proxy that has the prompt computed first, and passes on what it is answered.
    requests = prompts(6, 1)
    handed = prefill.serve(requests, 1, [PREFILL_ONLY] * len(requests))
    there = decode.serve(requests, 24, handed["params"])
    assert set(there["reasons"]) == {"length"}
    # The prefill engine alone; its cache has the prompts, and not one token that came after.
    expected = prefill.serve(requests, 24)["tokens"]
    assert there["tokens"] == expected
    assert handed["tokens"] == [tokens[:1] for tokens in expected]
    num_tokens = sum(len(tokens) - 1 for tokens in requests) - sum(there["num_cached"])
    num_bytes, _ = prefill.serve(requests[:1], 1)["written"]["shm"]
    assert num_bytes >= num_tokens * TOKEN_BYTES > 0

    # A proxy that sends a request to both at once: here the decode engine has it long before.
    requests = prompts(6, 2)
    ids = [f"both-{number}" for number in range(len(requests))]
    where = {"remote_host": "127.0.0.1", "remote_port": prefill.port, "do_remote_prefill": True}
    decode.begin(requests, 24, [{**where, "transfer_id": one} for one in ids])
    prefill.serve(requests, 1, [{**PREFILL_ONLY, "transfer_id": one} for one in ids])
    there = decode.answer()
    assert there["tokens"] == prefill.serve(requests, 24)["tokens"]

    # A prompt that is another one is an error, and not another answer.
    [one, other] = prompts(2, 3)
    handed = prefill.serve([one], 1, [PREFILL_ONLY])
    failed = decode.serve([other], 24, handed["params"])
    assert (failed["reasons"], failed["tokens"]) == (["error"], [[]])
    assert "the prompt here" in decode.log

    # An abort while a request is received; then no engine has blocks that no request has.
    decode.begin([one], 8, [{**where, "transfer_id": "aborted"}], aborts=True)
    assert decode.answer()["in_use"] == 0
    # Those of the prompt that was refused stay until the lease ends.
    end = time.monotonic() + 60
    for engine, count in zip((prefill, decode), num_free, strict=True):
        while engine.serve([[7] * 5], 1)["num_free"] != count:
            assert time.monotonic() < end
            time.sleep(0.5)

    # The prefill engine dies with one request handed over, and one asked for.
    requests = prompts(2, 4)
    handed = prefill.serve(requests, 1, [PREFILL_ONLY] * 2)
    expected = prefill.serve(requests[:1], 24)["tokens"]
    early = {**where, "transfer_id": "never"}
    decode.begin(requests, 24, [handed["params"][0], early])
    prefill.kill()
    there = decode.answer()
    assert there["reasons"][1] == "error"
    assert there["reasons"][0] == "error" or there["tokens"][0] == expected[0]
    failed = decode.serve(requests[1:], 24, handed["params"][1:])
    assert (failed["reasons"], failed["tokens"]) == (["error"], [[]])
    alone = decode.serve(requests[:1], 24)  # and lives on
    assert (alone["reasons"], alone["tokens"]) == (["length"], expected)
    reached = [line for line in decode.log.splitlines() if " reaches " in line]
    assert len(reached) == 1 and "by shm" in reached[0]


@pytest.mark.parametrize("num_senders, num_receivers", [(2, 1), (1, 2)])
def test_other_numbers_of_ranks(make_engine, num_senders, num_receivers):
    prefill = make_engine("kv_producer", llm={"tensor_parallel_size": num_senders})
    decode = make_engine("kv_consumer", llm={"tensor_parallel_size": num_receivers})
    for engine in (prefill, decode):
        engine.answer()
    requests = prompts(4, 1)
    handed = prefill.serve(requests, 1, [PREFILL_ONLY] * len(requests))
    there = decode.serve(requests, 16, handed["params"])
    assert set(there["reasons"]) == {"length"}
    # Sums over ranks are rounded in another way, which does not change these tokens.
    assert there["tokens"] == prefill.serve(requests, 16)["tokens"]
    [one, other] = prompts(2, 3)
    handed = prefill.serve([one], 1, [PREFILL_ONLY])
    failed = decode.serve([other], 16, handed["params"])
    assert (failed["reasons"], failed["tokens"]) == (["error"], [[]])


def test_engines_with_a_store_as_well(make_engine, tmp_path):
    """What a prefill engine has computed outlives it, and another one hands it over."""
    url = f"shm:{tmp_path}/kv?size=64MiB"
    prefill, decode = (make_engine(role, url=url) for role in ("kv_producer", "kv_both"))
    for engine in (prefill, decode):
        engine.answer()
    requests = prompts(4, 1)
    handed = prefill.serve(requests, 1, [PREFILL_ONLY] * len(requests))
    there = decode.serve(requests, 16, handed["params"])
    expected = prefill.serve(requests, 16)["tokens"]
    assert there["tokens"] == expected
    # Of a prompt that has not come nothing is saved, although vLLM counts it as computed.
    [one, other] = prompts(2, 3)
    handed = prefill.serve([one], 1, [PREFILL_ONLY])
    failed = decode.serve([other], 16, handed["params"])
    assert (failed["reasons"], failed["tokens"]) == (["error"], [[]])
    for engine in (prefill, decode):
        engine.serve([[7] * 5], 1)  # saves end with a step
    prefill.kill()

    prefill = make_engine("kv_both", url=url)
    prefill.answer()
    alone = prefill.serve([other], 16)
    pairs = enumerate(zip(one, other, strict=False))
    num_shared = next(i for i, (left, right) in pairs if left != right)
    assert alone["num_cached"] == [num_shared // 32 * 32], "what the prefill of `one` has saved"
    [longer] = [[*requests[0], *expected[0]]]
    handed = prefill.serve([longer], 1, [PREFILL_ONLY])
    assert handed["num_cached"][0] >= len(requests[0]) // 32 * 32, "loaded from the store"
    there = decode.serve([longer, other], 16, [handed["params"][0], None])
    assert there["tokens"] == [prefill.serve([longer], 16)["tokens"][0], alone["tokens"][0]]


@pytest.mark.parametrize("ahead", [False, True])
def test_sliding_windows(make_engine, ahead):
    """A Gemma; ahead, vLLM schedules a step while another one computes."""
    prefill, decode = (
        make_engine(role, "gemma", ahead=ahead, lease_s=10.0)
        for role in ("kv_producer", "kv_consumer")
    )
    for engine in (prefill, decode):
        engine.answer()
    num_free = {one: one.serve([[7] * 5], 1)["num_free"] for one in (prefill, decode)}

    def alone(requests: list) -> list:
        """What an engine answers that computes all itself."""
        assert eventually(lambda: prefill.serve([[7] * 5], 1)["num_free"] == num_free[prefill])
        return prefill.serve(requests, 24, forgets=True)["tokens"]

    requests = [[number, *one] for number, one in enumerate(prompts(6, 1))]
    handed = prefill.serve(requests, 1, [PREFILL_ONLY] * len(requests))
    there = decode.serve(requests, 24, handed["params"])
    assert set(there["reasons"]) == {"length"}
    expected = alone(requests)
    assert there["tokens"] == expected
    assert min(len(set(tokens)) for tokens in expected) > 2, "they depend on what came before"

    # The decode engine first, and the next turn of a conversation.
    turns = [a + b for a, b in zip(requests, expected, strict=True)]
    ids = [f"both-{number}" for number in range(len(turns))]
    where = {"remote_host": "127.0.0.1", "remote_port": prefill.port, "do_remote_prefill": True}
    decode.begin(turns, 24, [{**where, "transfer_id": one} for one in ids])
    prefill.serve(turns, 1, [{**PREFILL_ONLY, "transfer_id": one} for one in ids])
    there = decode.answer()
    assert set(there["reasons"]) == {"length"}
    assert there["tokens"] == alone(turns)
    assert sum(there["num_cached"]) > sum(map(len, requests)) - 32 * len(turns)

    # An abort while it is received.
    decode.begin(prompts(1, 9), 8, [{**where, "transfer_id": "aborted"}], aborts=True)
    assert decode.answer()["in_use"] == 0
    # A request of which the prefill engine generates more is refused there, and fails here.
    [one] = prompts(1, 5)
    assert prefill.serve([one], 4, [{**PREFILL_ONLY, "transfer_id": "t"}])["params"] == [None]
    failed = decode.serve([one], 24, [{**where, "transfer_id": "t"}])
    assert (failed["reasons"], failed["tokens"]) == (["error"], [[]])
    assert "max_tokens must be 1" in decode.log
    for engine, count in num_free.items():
        assert eventually(lambda: engine.serve([[7] * 5], 1)["num_free"] == count)  # noqa: B023
