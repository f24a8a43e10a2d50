"""The connector inside vLLM, on the CPU: what comes is what comes without it.

Each engine is a process of its own, of the Python that MK_TEST_VLLM names, in whose environment
vLLM is installed (`make test-vllm` makes one). Tokens are compared one by one.
"""

import json
import os
import random
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ENGINE = Path(__file__).with_name("vllm_engine.py")
LIMIT_S = 300


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    """Of any lengths; many begin alike."""
    rng = random.Random(seed)
    common = [rng.randrange(5, 505) for _ in range(300)]
    rests = [[rng.randrange(5, 505) for _ in range(rng.randrange(1, 400))] for _ in range(count)]
    return [common[: rng.randrange(300)] + rest for rest in rests]


def blocks(tokens: list[int]) -> int:
    """Tokens of a prompt that are in full blocks, without the last token."""
    return (len(tokens) - 1) // 32 * 32


class Engines:
    def __init__(self, python: str, folder: Path):
        self._python, self._model = python, str(folder / "model")
        self.config = {"pool": str(folder / "kv"), "capacity_bytes": 256 << 20}
        self._run({"make": self._model})

    def serve(self, requests: list[list[int]], num_tokens: int = 24, **task) -> dict:
        named = {"model": self._model, "prompts": requests, "num_tokens": num_tokens}
        return self._run({"config": self.config, **named, **task})

    def _run(self, task: dict) -> dict:
        paths = os.pathsep.join([str(ROOT / "python"), str(ROOT)])
        done = subprocess.run(
            [self._python, ENGINE, json.dumps(task)],
            env=os.environ | {"PYTHONPATH": paths},
            text=True, capture_output=True, timeout=LIMIT_S,
        )  # fmt: skip
        if done.returncode and not (task.get("dies") and done.returncode == -signal.SIGKILL):
            pytest.fail(f"exit status {done.returncode}\n{done.stdout}{done.stderr}", pytrace=False)
        told = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
        return json.loads(told[-1].removeprefix("ANSWER ")) if told else {}


@pytest.fixture
def engines(tmp_path: Path) -> Engines:
    python = os.environ.get("MK_TEST_VLLM")
    if not python:
        pytest.skip("MK_TEST_VLLM names no Python that has vLLM: see `make test-vllm`")
    return Engines(python, tmp_path)


def test_what_one_engine_has_computed_another_one_loads(engines):
    requests = prompts(24)
    alone = engines.serve(requests, config=None)
    first, second = engines.serve(requests), engines.serve(requests)
    assert first["tokens"] == second["tokens"] == alone["tokens"]
    assert first["num_cached"] == alone["num_cached"]
    assert second["num_cached"] == [blocks(tokens) for tokens in requests]


def test_a_cache_that_is_too_small_for_all(engines):
    """Requests are preempted, come back, and load what they had computed; prompts in chunks."""
    requests = prompts(24)
    small = {"cache_bytes": 4 << 20, "options": {"max_num_batched_tokens": 128}}
    alone = engines.serve(requests, 200, config=None)
    first, second = (engines.serve(requests, 200, **small) for _ in range(2))
    assert first["tokens"] == second["tokens"] == alone["tokens"]
    assert second["num_cached"] == [blocks(tokens) for tokens in requests]


def test_a_conversation_goes_on_in_another_engine(engines):
    """Blocks that were filled by what was generated are there, too."""
    requests = prompts(4)
    answers = engines.serve(requests, 100)["tokens"]
    longer = [a + b for a, b in zip(requests, answers, strict=True)]
    found = engines.serve(longer, 1)["num_cached"]
    assert found == [blocks(tokens) for tokens in longer]


def test_prefill_here_and_decode_there(engines):
    requests = prompts(6)
    alone = engines.serve(requests, config=None)
    engines.serve(requests, 1, role="kv_producer")
    there = engines.serve(requests, role="kv_consumer")
    assert there["tokens"] == alone["tokens"]
    assert there["num_cached"] == [blocks(tokens) for tokens in requests]
    others = prompts(6, seed=2)
    engines.serve(others, role="kv_consumer")  # which saves nothing
    assert engines.serve(others, role="kv_producer")["num_cached"][0] == 0  # and loads nothing


def test_blocks_that_are_gone_before_they_are_loaded_are_computed(engines):
    """What was computed beside the blocks that did not come is wrong: nobody may find it."""
    requests = prompts(12)
    longer = [a + b[:200] for a, b in zip(requests, prompts(12, seed=2), strict=True)]
    engines.serve(requests, 1)
    expected = engines.serve(longer, config=None)["tokens"]
    assert engines.serve(longer, loses=True)["tokens"] == expected
    assert engines.serve(longer)["tokens"] == expected


@pytest.mark.parametrize("dies", [3, 9])
def test_an_engine_that_is_killed_while_it_saves(engines, dies):
    requests = prompts(24)
    assert engines.serve(requests, dies=dies) == {}
    alone = engines.serve(requests, config=None)
    after = engines.serve(requests)
    assert after["tokens"] == alone["tokens"]
    assert sum(after["num_cached"]) > sum(alone["num_cached"])


def test_a_pool_that_holds_less_than_one_prompt(engines):
    requests = prompts(24)
    engines.config["capacity_bytes"] = 2 << 20
    alone = engines.serve(requests, config=None)
    assert [engines.serve(requests)["tokens"] for _ in range(2)] == [alone["tokens"]] * 2


def test_other_sizes_of_blocks_are_other_objects(engines):
    requests = prompts(2)
    engines.serve(requests, 1)
    assert engines.serve(requests, 1, options={"block_size": 64})["num_cached"][0] == 0
