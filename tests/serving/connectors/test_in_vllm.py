"""The connector inside vLLM, on the CPU: the output equals that without it.

Engines run in processes of the Python that MK_TEST_VLLM names, in whose environment vLLM is
installed (`make test-vllm` makes one); several follow each other in one process, and serve several
rounds of prompts. Tokens are compared one by one.
"""

import json
import os
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch

from mooncake_serving.store import Store
from tests.progress import run_to_its_end

ROOT = Path(__file__).parents[3]
ENGINE = Path(__file__).with_name("vllm_engine.py")
CHUNKS = {"max_num_batched_tokens": 128, "long_prefill_token_threshold": 40}
LONG, SHORT = 200, 24  # tokens of an answer


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    """Of any lengths; many begin alike."""
    rng = random.Random(seed)
    common = [rng.randrange(5, 505) for _ in range(300)]
    rests = [[rng.randrange(5, 505) for _ in range(rng.randrange(1, 400))] for _ in range(count)]
    return [common[: rng.randrange(300)] + rest for rest in rests]


def blocks(tokens: list[int]) -> int:
    """Tokens of a prompt that are in full blocks, without the last token."""
    return (len(tokens) - 1) // 32 * 32


def all_blocks(requests: list[list[int]]) -> list[int]:
    return [blocks(tokens) for tokens in requests]


def short(tokens: list[list[int]]) -> list[list[int]]:
    return [answer[:SHORT] for answer in tokens]


PROMPTS = prompts(16)
LOST_PROMPTS = [a + b[:200] for a, b in zip(prompts(12), prompts(12, seed=2), strict=True)]


def a_round(requests: list[list[int]], num_tokens: int = SHORT, **options) -> dict:
    return {"prompts": requests, "num_tokens": num_tokens, **options}


class Vllm:
    """Runs engines, in a folder for their stores."""

    def __init__(self, python: str, models: Path, folder: Path):
        self._python, self._models, self.folder = python, models, folder
        if not models.exists():
            self._run({"make": str(models)})

    def config(self, name: str, size: str = "256MiB") -> dict:
        return {"url": f"shm:{self.folder}/{name}?size={size}"}

    def serve(self, *tasks: dict) -> list:
        """Return of each engine what it answers in each of its rounds."""
        return self._run(
            [{"model": f"{self._models}/{t.pop('kind', 'llama')}", **t} for t in tasks]
        )

    def _run(self, told: dict | list[dict]) -> list:
        paths = os.pathsep.join([str(ROOT / "python"), str(ROOT)])
        tasks = self.folder / "tasks.json"
        tasks.write_text(json.dumps(told))
        command = [self._python, ENGINE, tasks]
        done = run_to_its_end(command, os.environ | {"PYTHONPATH": paths})
        dies = isinstance(told, list) and any(task.get("dies") for task in told)
        if done.returncode and not (dies and done.returncode == -signal.SIGKILL):
            pytest.fail(f"exit status {done.returncode}\n{done.stdout}{done.stderr}", pytrace=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
        return [json.loads(line.removeprefix("ANSWER ")) for line in lines]


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Vllm:
    python = os.environ.get("MK_TEST_VLLM")
    if not python:
        pytest.skip("MK_TEST_VLLM names no Python that has vLLM: see `make test-vllm`")
    folder = tmp_path_factory.mktemp("vllm")
    return Vllm(python, folder / "models", folder)


@pytest.fixture(scope="module")
def alone(vllm) -> list:
    """What engines without the connector answer."""
    return vllm.serve({"rounds": [a_round(PROMPTS, LONG), a_round(LOST_PROMPTS)]})[0]


@pytest.fixture(scope="module")
def first(vllm, alone) -> list:
    """The engines of a process: one that finds nothing, then what it has saved itself, and one
    whose cache is too small for all requests.
    """
    turns = [a + b for a, b in zip(PROMPTS[:4], alone[0]["tokens"][:4], strict=True)]
    small = {"cache_bytes": 4 << 20, "options": {"max_num_batched_tokens": 128}}
    return vllm.serve(
        {
            "config": vllm.config("first"),
            "rounds": [
                a_round(PROMPTS, LONG),
                a_round(PROMPTS, LONG, forgets=True),
                a_round(turns, 1, forgets=True),
                a_round(PROMPTS, damages=True, forgets=True),
                a_round(PROMPTS, resets=True),
            ],
        },
        {
            "config": vllm.config("small"),
            "rounds": [a_round(PROMPTS, LONG), a_round(PROMPTS, LONG, forgets=True)],
            **small,
        },
        {
            "config": vllm.config("tiny", "2MiB"),
            "rounds": [a_round(PROMPTS), a_round(PROMPTS, forgets=True)],
        },
        {"config": vllm.config("first"), "rounds": [a_round(PROMPTS[:2], 1)],
         "options": {"block_size": 64}},
    )  # fmt: skip


def test_cold_and_warm_engine_answer_alike(alone, first):
    cold, warm, *_ = first[0]
    assert cold["tokens"] == warm["tokens"] == alone[0]["tokens"]
    assert cold["num_cached"] == alone[0]["num_cached"]
    assert warm["num_cached"] == all_blocks(PROMPTS)


def test_metrics_count_what_is_loaded_and_saved(first):
    cold, warm, _, damaged, _ = [answers["metrics"] for answers in first[0]]
    assert cold["loads"] == 0 < cold["saved_blocks"] and cold["unsaved_blocks"] == 0
    assert warm["loaded_blocks"] == sum(all_blocks(PROMPTS)) // 32 and warm["failed_loads"] == 0
    assert warm["loaded_bytes"] == warm["loaded_blocks"] * 3 * 2 * 2 * 64 * 32 * 4
    assert damaged["failed_loads"] > 0


def test_conversation_finds_what_was_generated(alone, first):
    turns = [a + b for a, b in zip(PROMPTS[:4], alone[0]["tokens"][:4], strict=True)]
    assert first[0][2]["num_cached"] == all_blocks(turns)


def test_damaged_blocks_are_computed_again(alone, first):
    damaged = first[0][3]
    assert damaged["tokens"] == short(alone[0]["tokens"])
    assert sum(damaged["num_cached"]) > 0


def test_reset_engine_finds_nothing(alone, first):
    after = first[0][4]
    assert after["tokens"] == short(alone[0]["tokens"])
    assert after["num_cached"] == alone[0]["num_cached"]


def test_cache_too_small_for_all_requests_preempts_and_reloads(alone, first):
    """Requests are preempted, come back, and load what they had computed; prompts in chunks."""
    cold, warm = first[1]
    assert cold["tokens"] == warm["tokens"] == alone[0]["tokens"]
    assert sum(warm["num_cached"]) > sum(alone[0]["num_cached"])


def test_pool_smaller_than_one_prompt_does_not_change_answers(alone, first):
    for answers in first[2]:
        assert answers["tokens"] == short(alone[0]["tokens"])


def test_block_sizes_have_separate_objects(first):
    assert first[3][0]["num_cached"][0] == 0


def test_another_process_loads_what_the_first_has_computed(vllm, alone, first):
    others = prompts(4, seed=2)
    (warm,), _, (there, _), (not_loaded,) = vllm.serve(
        {"config": vllm.config("first"), "rounds": [a_round(PROMPTS)]},
        {"config": vllm.config("pd"), "role": "kv_producer", "rounds": [a_round(PROMPTS, 1)]},
        {
            "config": vllm.config("pd"),
            "role": "kv_consumer",
            "rounds": [a_round(PROMPTS), a_round(others, 1)],
        },
        {"config": vllm.config("pd"), "role": "kv_producer", "rounds": [a_round(others, 1)]},
    )
    assert warm["tokens"] == there["tokens"] == short(alone[0]["tokens"])
    assert warm["num_cached"] == there["num_cached"] == all_blocks(PROMPTS)
    # The consumer has saved nothing of the others, and the producer loads nothing.
    assert not_loaded["num_cached"][0] == 0


def objects(pool: Path) -> dict[tuple[int, int], torch.Tensor]:
    """All blocks of a pool, by their keys."""
    with Store.open(pool) as store:
        keys, _ = store.list_objects()
        pinned = ((tuple(key), store.pin_key(tuple(key))) for key in keys.tolist())
        return {key: torch.frombuffer(bytearray(one.to_bytes()), dtype=torch.float32)
                for key, one in pinned}  # fmt: skip


LOSSES = [
    {"loses": 0, "policy": "recompute"},
    {"loses": 2, "policy": "recompute", "options": CHUNKS},
    {"loses": 2, "policy": "recompute", "ahead": True},
    {"loses": 2, "policy": "fail", "ahead": True},
]


def test_blocks_lost_between_lookup_and_load(vllm, alone):
    """Nothing wrong is answered, nor saved: who finds it answers wrongly, and saves more of it."""
    vllm.serve(
        {"config": vllm.config("begun"), "rounds": [a_round(prompts(12), 1)]},
        {"config": vllm.config("right"), "rounds": [a_round(LOST_PROMPTS)]},
    )
    right = objects(vllm.folder / "right")
    tasks = []
    for i, loss in enumerate(LOSSES):
        shutil.copy(vllm.folder / "begun", vllm.folder / f"loss{i}")
        tasks.append({"config": vllm.config(f"loss{i}"), "rounds": [a_round(LOST_PROMPTS)], **loss})
    for i, ((answers,), loss) in enumerate(zip(vllm.serve(*tasks), LOSSES, strict=True)):
        saved = objects(vllm.folder / f"loss{i}")
        found = saved.keys() & right.keys()
        assert found
        for key in found:
            torch.testing.assert_close(saved[key], right[key], rtol=0, atol=0.01)
        num_failed = 0
        for answer, wanted in zip(answers["tokens"], alone[1]["tokens"], strict=True):
            num_failed += answer == []
            assert answer in ([], wanted)
        assert (num_failed > 0) == (loss["policy"] == "fail")


def test_engine_killed_while_saving_leaves_valid_blocks(vllm, alone):
    config = vllm.config("dies")
    assert vllm.serve({"config": config, "dies": 9, "rounds": [a_round(PROMPTS)]}) == []
    [[after]] = vllm.serve({"config": config, "rounds": [a_round(PROMPTS)]})
    assert after["tokens"] == short(alone[0]["tokens"])
    assert sum(after["num_cached"]) > sum(alone[0]["num_cached"])


def test_sliding_windows_load_their_tail(vllm):
    """A Gemma, of whose layers one half sees 64 tokens: two groups with block tables of their own,
    so that blocks of a running request are freed while they are saved."""
    gemma = {"kind": "gemma", "options": {"max_num_batched_tokens": 128}}
    (plain,), (cold, warm, *_), (there,) = vllm.serve(
        {"rounds": [a_round(PROMPTS, LONG)], **gemma},
        {
            "config": vllm.config("gemma"),
            "rounds": [a_round(PROMPTS, LONG), a_round(PROMPTS, LONG, forgets=True)],
            **gemma,
        },
        {"config": vllm.config("gemma"), "rounds": [a_round(PROMPTS)], "kind": "gemma"},
    )
    assert cold["tokens"] == warm["tokens"] == plain["tokens"]
    assert short(plain["tokens"]) == there["tokens"]
    assert warm["num_cached"] == there["num_cached"] == all_blocks(PROMPTS)


def test_recurrent_layers_load_their_last_state(vllm):
    """An LFM2, of whose layers one half has a state instead of keys and values. On the CPU, vLLM
    answers otherwise with hits in its own cache than without, so the store is compared with those.
    """
    options = {"max_num_batched_tokens": 256, "enable_prefix_caching": True}
    requests = PROMPTS[:4]
    (plain,), (cold, own, loaded) = vllm.serve(
        {"kind": "lfm2", "options": options, "rounds": [a_round(requests)]},
        {
            "kind": "lfm2",
            "options": options,
            "config": vllm.config("lfm2"),
            "rounds": [a_round(requests), a_round(requests), a_round(requests, forgets=True)],
        },
    )
    assert cold["tokens"] == plain["tokens"]
    assert loaded["num_cached"] == own["num_cached"] and sum(own["num_cached"]) > 0
    assert loaded["tokens"] == own["tokens"]
    assert own["metrics"]["loads"] == 0 < loaded["metrics"]["loads"]


def test_two_workers_have_a_part_of_each_block(vllm, alone):
    two = {"options": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}}
    [[cold, warm]] = vllm.serve(
        {
            "config": vllm.config("two"),
            "rounds": [a_round(PROMPTS), a_round(PROMPTS, forgets=True)],
            **two,
        }
    )
    assert cold["tokens"] == warm["tokens"] == short(alone[0]["tokens"])
    assert warm["num_cached"] == all_blocks(PROMPTS)


def test_disk_behind_the_pool(vllm, alone):
    url = f"tiered:{vllm.folder}/disk?memory=8MiB&disk=256MiB&pool={vllm.folder}/disk_pool"
    rounds = [a_round(PROMPTS), a_round(PROMPTS, forgets=True)]
    [[cold, warm]] = vllm.serve({"config": {"url": url}, "rounds": rounds})
    assert cold["tokens"] == warm["tokens"] == short(alone[0]["tokens"])
    assert sum(warm["num_cached"]) > 2 * sum(cold["num_cached"])


def test_fresh_engine_loads_chunks_from_the_tier(vllm, alone):
    """By vLLM's own offloading: what the first has computed, the second finds in the store."""
    tier = {"tier": {"url": f"shm:{vllm.folder}/tier?size=256MiB"}, "rounds": [a_round(PROMPTS)]}
    disk = {
        "tier": {"url": f"tiered:{vllm.folder}/t?memory=8MiB&disk=256MiB&pool={vllm.folder}/t_p"},
        "rounds": [a_round(PROMPTS)],
        "cpu_bytes": 8 << 20,
    }
    (first,), (second,), (third,), (fourth,) = vllm.serve(tier, tier, disk, disk)
    for answers in (first, second, third, fourth):
        assert answers["tokens"] == short(alone[0]["tokens"])
    assert first["num_cached"] == alone[0]["num_cached"]
    assert second["num_cached"] == all_blocks(PROMPTS)
    assert sum(fourth["num_cached"]) > 2 * sum(third["num_cached"])
