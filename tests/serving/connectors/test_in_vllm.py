"""The connector inside vLLM, on the CPU: the output equals that without it.

Each engine is a separate process, run by the Python that MK_TEST_VLLM names, in whose environment
vLLM is installed (`make test-vllm` makes one). Tokens are compared one by one.
"""

import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from mooncake_serving.store import Store
from tests.progress import run_to_its_end

ROOT = Path(__file__).parents[3]
ENGINE = Path(__file__).with_name("vllm_engine.py")
CHUNKS = {"max_num_batched_tokens": 128, "long_prefill_token_threshold": 40}


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
    def __init__(self, python: str, model: Path, folder: Path):
        self._python, self._model = python, str(model)
        self.config = {"pool": str(folder / "kv"), "capacity_bytes": 256 << 20}
        if not model.exists():
            self._run({"make": self._model})

    def serve(self, requests: list[list[int]], num_tokens: int = 24, **task) -> dict:
        named = {"model": self._model, "prompts": requests, "num_tokens": num_tokens}
        return self._run({"config": self.config, **named, **task})

    def _run(self, task: dict) -> dict:
        paths = os.pathsep.join([str(ROOT / "python"), str(ROOT)])
        command = [self._python, ENGINE, json.dumps(task)]
        done = run_to_its_end(command, os.environ | {"PYTHONPATH": paths})
        if done.returncode and not (task.get("dies") and done.returncode == -signal.SIGKILL):
            pytest.fail(f"exit status {done.returncode}\n{done.stdout}{done.stderr}", pytrace=False)
        told = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
        return json.loads(told[-1].removeprefix("ANSWER ")) if told else {}


@pytest.fixture(scope="module")
def make_engines(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Engines]:
    python = os.environ.get("MK_TEST_VLLM")
    if not python:
        pytest.skip("MK_TEST_VLLM names no Python that has vLLM: see `make test-vllm`")
    return partial(Engines, python, tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def engines(make_engines: Callable[[Path], Engines], tmp_path: Path) -> Engines:
    return make_engines(tmp_path)


def test_second_engine_loads_blocks_computed_by_the_first(engines):
    requests = prompts(24)
    alone = engines.serve(requests, config=None)
    first, second = engines.serve(requests), engines.serve(requests)
    assert first["tokens"] == second["tokens"] == alone["tokens"]
    assert first["num_cached"] == alone["num_cached"]
    assert second["num_cached"] == [blocks(tokens) for tokens in requests]


def test_cache_too_small_for_all_requests_preempts_and_reloads(engines):
    """Requests are preempted, come back, and load what they had computed; prompts in chunks."""
    requests = prompts(24)
    small = {"cache_bytes": 4 << 20, "options": {"max_num_batched_tokens": 128}}
    alone = engines.serve(requests, 200, config=None)
    first, second = (engines.serve(requests, 200, **small) for _ in range(2))
    assert first["tokens"] == second["tokens"] == alone["tokens"]
    assert second["num_cached"] == [blocks(tokens) for tokens in requests]


def test_conversation_continues_in_another_engine(engines):
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


def objects(pool: str) -> dict[tuple[int, int], torch.Tensor]:
    """All blocks of a pool, by their keys."""
    with Store.open(pool) as store:
        keys, _ = store.list_objects()
        pinned = ((tuple(key), store.pin_key(tuple(key))) for key in keys.tolist())
        return {key: torch.frombuffer(bytearray(one.to_bytes()), dtype=torch.float32)
                for key, one in pinned}  # fmt: skip


class Loss:
    """A pool that has the beginnings of some prompts, and what is right for them."""

    def __init__(self, engines: Engines):
        beginnings = prompts(12)
        rests = [tokens[:200] for tokens in prompts(12, seed=2)]
        self.prompts = [a + b for a, b in zip(beginnings, rests, strict=True)]
        engines.serve(beginnings, 1)
        self.pool = engines.config["pool"]
        engines.config["pool"] += "_right"
        self.answers = engines.serve(self.prompts)["tokens"]
        self.objects = objects(engines.config["pool"])


@pytest.fixture(scope="module")
def loss(make_engines, tmp_path_factory) -> Loss:
    return Loss(make_engines(tmp_path_factory.mktemp("loss")))


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "recompute"},
        {"policy": "recompute", "options": {"max_num_batched_tokens": 128}},
        {"policy": "fail"},
        {"policy": "fail", "options": CHUNKS},
        {"policy": "fail", "ahead": True},
    ],
)
def test_blocks_computed_on_lost_context_are_not_saved(engines, loss, options):
    """It is wrong: who finds it answers wrongly, and saves more of it."""
    shutil.copy(loss.pool, engines.config["pool"])
    answers = engines.serve(loss.prompts, loses=True, **options)["tokens"]
    saved = objects(engines.config["pool"])
    found = saved.keys() & loss.objects.keys()
    assert found
    for key in found:
        torch.testing.assert_close(saved[key], loss.objects[key], rtol=0, atol=0.01)
    for answer, right in zip(answers, loss.answers, strict=True):
        assert answer == right or (options["policy"] == "fail" and answer == [])


@pytest.mark.parametrize("option", [{"ahead": True}, {"options": CHUNKS}])
def test_unsupported_recompute_policy_is_rejected(engines, option):
    with pytest.raises(pytest.fail.Exception, match='kv_load_failure_policy must be "fail" with '):
        engines.serve(prompts(1), policy="recompute", **option)


@pytest.mark.parametrize("dies", [3, 9])
def test_engine_killed_while_saving_leaves_valid_blocks(engines, dies):
    requests = prompts(24)
    assert engines.serve(requests, dies=dies) == {}
    alone = engines.serve(requests, config=None)
    after = engines.serve(requests)
    assert after["tokens"] == alone["tokens"]
    assert sum(after["num_cached"]) > sum(alone["num_cached"])


def test_pool_smaller_than_one_prompt_does_not_change_answers(engines):
    requests = prompts(24)
    engines.config["capacity_bytes"] = 2 << 20
    alone = engines.serve(requests, config=None)
    assert [engines.serve(requests)["tokens"] for _ in range(2)] == [alone["tokens"]] * 2


def test_block_sizes_have_separate_objects(engines):
    requests = prompts(2)
    engines.serve(requests, 1)
    assert engines.serve(requests, 1, options={"block_size": 64})["num_cached"][0] == 0


def test_fresh_engine_loads_chunks_from_the_tier(engines, tmp_path):
    """By vLLM's own offloading: what the first has computed, the second finds in the store."""
    requests, tier = prompts(24), {"url": f"shm:{tmp_path}/kv?size=256MiB"}
    alone = engines.serve(requests, config=None)
    first, second = engines.serve(requests, tier=tier), engines.serve(requests, tier=tier)
    assert first["tokens"] == second["tokens"] == alone["tokens"]
    assert first["num_cached"] == alone["num_cached"]
    assert second["num_cached"] == [blocks(tokens) for tokens in requests]


def test_fresh_engine_loads_chunks_from_the_disk(engines, tmp_path):
    """The pool in front of the disk, and vLLM's own memory, hold a part of the chunks."""
    url = f"tiered:{tmp_path}?memory=8MiB&disk=256MiB&pool={tmp_path}/kv"
    requests, tier = prompts(24), {"url": url}
    alone = engines.serve(requests, config=None)
    first, second = (engines.serve(requests, tier=tier, cpu_bytes=8 << 20) for _ in range(2))
    assert first["tokens"] == second["tokens"] == alone["tokens"]
    assert sum(second["num_cached"]) > 2 * sum(first["num_cached"])
