"""Our connector inside vLLM, on the CPU: tokens are compared with those of an engine without it."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mooncake_serving.store import Store
from tests.serving.in_vllm.support import (
    BLOCK,
    EngineEnded,
    Vllm,
    num_in_blocks,
    random_prompts,
    related_prompts,
)

CHUNKS = {"max_num_batched_tokens": 128, "long_prefill_token_threshold": 40}
LONG, SHORT = 80, 24  # tokens of an answer


def all_blocks(prompts: list[list[int]]) -> list[int]:
    return [num_in_blocks(tokens) for tokens in prompts]


def short(tokens: list[list[int]]) -> list[list[int]]:
    return [answer[:SHORT] for answer in tokens]


PROMPTS = related_prompts(16)
LOST_PROMPTS = [
    a + b[:200] for a, b in zip(related_prompts(12), related_prompts(12, seed=2), strict=True)
]


class Engines:
    """Starts engines, whose stores are files of a folder."""

    def __init__(self, vllm: Vllm, folder: Path):
        self._vllm, self.folder = vllm, folder

    def start(
        self,
        store: str | None = None,
        *,
        size: str = "256MiB",
        role: str = "kv_both",
        policy: str = "recompute",
        kind: str = "llama",
        options: dict[str, Any] | None = None,
        **arguments: Any,
    ):
        """An engine with our connector on a store: a name in the folder, or a URL; None: without.

        Args:
            store: see above.
            size: of the pool.
            role: kv_role.
            policy: kv_load_failure_policy.
            kind: of the model.
            options: of the engine.
            arguments: see ``engine.llm``.
        """
        url = store if store is None or ":" in store else f"shm:{self.folder}/{store}?size={size}"
        connector = url and {
            "kv_connector": "StoreConnector",
            "kv_connector_module_path": "mooncake_serving.connectors.vllm",
            "kv_role": role,
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": {"url": url},
        }
        options = {**self._vllm.options_of(kind), **(options or {})}
        return self._vllm.engine(connector, options=options, **arguments)

    def start_on_tier(self, url: str, cpu_bytes: int = 64 << 20):
        """An engine with vLLM's own offloading, and a store behind it."""
        tier = {"type": "StoreTier", "module_path": "mooncake_serving.connectors.vllm.tier"}
        connector = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "CpuTieringSpec",
                "spec_module_path": "on_cpu",
                "cpu_bytes_to_use": cpu_bytes,
                "secondary_tiers": [{**tier, "url": url}],
            },
        }
        return self._vllm.engine(connector)


@pytest.fixture(scope="module")
def engines(vllm, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(vllm, tmp_path_factory.mktemp("stores"))


@pytest.fixture(scope="module")
def right(alone) -> list[list[int]]:
    """What an engine without the connector answers."""
    return alone.serve(PROMPTS, LONG)["tokens"]


@pytest.fixture(scope="module")
def computed(alone) -> list[int]:
    """Tokens of each prompt that an engine without the connector finds in its own cache."""
    return alone.serve(PROMPTS, SHORT)["num_cached"]


@pytest.fixture(scope="module")
def first(engines, right) -> dict[str, dict]:
    """What an engine answers that finds nothing, then what it has saved itself."""
    engine = engines.start("first").wait()
    turns = [a + b for a, b in zip(PROMPTS[:4], right[:4], strict=True)]
    answers = {
        "cold": engine.serve(PROMPTS, LONG),
        "warm": engine.serve(PROMPTS, LONG, forgets=True),
        "turns": engine.serve(turns, 1, forgets=True),
        "damaged": engine.serve(PROMPTS, SHORT, damages=True, forgets=True),
        "reset": engine.serve(PROMPTS, SHORT, resets=True),
    }
    engine.end()
    return answers


def test_cold_and_warm_engine_answer_alike(right, computed, first):
    assert first["cold"]["tokens"] == first["warm"]["tokens"] == right
    assert first["cold"]["num_cached"] == computed
    assert first["warm"]["num_cached"] == all_blocks(PROMPTS)


def test_metrics_count_what_is_loaded_and_saved(first):
    cold, warm, damaged = (first[name]["metrics"] for name in ("cold", "warm", "damaged"))
    assert cold["loads"] == 0 < cold["saved_blocks"] and cold["unsaved_blocks"] == 0
    assert warm["loaded_blocks"] == sum(all_blocks(PROMPTS)) // BLOCK and warm["failed_loads"] == 0
    assert warm["loaded_bytes"] == warm["loaded_blocks"] * 3 * 2 * 2 * 64 * BLOCK * 4
    assert damaged["failed_loads"] > 0


def test_conversation_finds_what_was_generated(right, first):
    turns = [a + b for a, b in zip(PROMPTS[:4], right[:4], strict=True)]
    assert first["turns"]["num_cached"] == all_blocks(turns)


def test_damaged_blocks_are_computed_again(right, first):
    assert first["damaged"]["tokens"] == short(right)
    assert sum(first["damaged"]["num_cached"]) > 0


def test_reset_engine_finds_nothing(right, computed, first):
    assert first["reset"]["tokens"] == short(right)
    assert first["reset"]["num_cached"] == computed


def test_cache_too_small_for_all_requests_preempts_and_reloads(engines, right, computed):
    """Requests are preempted, come back, and load what they had computed; prompts in chunks."""
    options = {"kv_cache_memory_bytes": 4 << 20, "max_num_batched_tokens": 128}
    engine = engines.start("small", options=options).wait()
    cold, warm = engine.serve(PROMPTS, LONG), engine.serve(PROMPTS, LONG, forgets=True)
    assert cold["tokens"] == warm["tokens"] == right
    assert sum(warm["num_cached"]) > sum(computed)
    engine.kill()


def test_pool_smaller_than_one_prompt_does_not_change_answers(engines, right):
    engine = engines.start("tiny", size="2MiB").wait()
    for forgets in (False, True):
        assert engine.serve(PROMPTS, SHORT, forgets=forgets)["tokens"] == short(right)
    engine.kill()


def test_another_process_loads_what_the_first_has_computed(engines, right, first):
    others = related_prompts(4, seed=2)
    started = [
        engines.start("first"),
        engines.start("first", options={"block_size": 64}),
        engines.start("pd", role="kv_producer"),
        engines.start("pd", role="kv_consumer"),
    ]
    again, large, prefill, decode = (engine.wait() for engine in started)
    prefill.serve(PROMPTS, 1)
    for engine in (again, decode):
        warm = engine.serve(PROMPTS, SHORT)
        assert warm["tokens"] == short(right)
        assert warm["num_cached"] == all_blocks(PROMPTS)
    # Blocks of another size are other objects.
    assert large.serve(PROMPTS[:1], 1)["num_cached"] == [0]
    # The consumer saves nothing of the others, and the producer loads nothing.
    decode.serve(others, 1)
    assert prefill.serve(others, 1)["num_cached"][0] == 0
    assert prefill.serve(PROMPTS[:1], 1, forgets=True)["num_cached"] == [0]
    for engine in started:
        engine.kill()


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


@pytest.fixture(scope="module")
def right_objects(engines) -> dict[tuple[int, int], torch.Tensor]:
    """Those of LOST_PROMPTS, of an engine that loses none; another fills a pool with beginnings."""
    started = engines.start("right"), engines.start("begun")
    for engine, prompts in zip(started, (LOST_PROMPTS, related_prompts(12)), strict=True):
        engine.wait().serve(prompts, SHORT)
        engine.end()
    return objects(engines.folder / "right")


@pytest.mark.parametrize("loss", LOSSES)
def test_blocks_lost_between_lookup_and_load(engines, alone, right_objects, loss):
    """Nothing wrong is answered, nor saved: who finds it answers wrongly, and saves more of it."""
    shutil.copy(engines.folder / "begun", engines.folder / "lost")
    engine = engines.start("lost", **loss).wait()
    answers = engine.serve(LOST_PROMPTS, SHORT)["tokens"]
    engine.end()
    saved = objects(engines.folder / "lost")
    found = saved.keys() & right_objects.keys()
    assert found
    for key in found:
        torch.testing.assert_close(saved[key], right_objects[key], rtol=0, atol=0.01)
    expected = alone.serve(LOST_PROMPTS, SHORT)["tokens"]
    assert all(answer in ([], one) for answer, one in zip(answers, expected, strict=True))
    assert (answers.count([]) > 0) == (loss["policy"] == "fail")


def test_engine_killed_while_saving_leaves_valid_blocks(engines, right, computed):
    engine = engines.start("dies", dies=9).wait()
    with pytest.raises(EngineEnded):
        engine.serve(PROMPTS, SHORT)
    engine = engines.start("dies").wait()
    after = engine.serve(PROMPTS, SHORT)
    assert after["tokens"] == short(right)
    assert sum(after["num_cached"]) > sum(computed)
    engine.kill()


def test_sliding_windows_load_their_tail(engines):
    """A Gemma, of whose layers one half sees 64 tokens: two groups with block tables of their own,
    so that blocks of a running request are freed while they are saved."""
    options = {"max_num_batched_tokens": 128}
    started = [
        engines.start(kind="gemma", options=options),
        engines.start("gemma", kind="gemma", options=options),
        engines.start("gemma", kind="gemma"),
    ]
    plain, engine, other = (engine.wait() for engine in started)
    right = plain.serve(PROMPTS, LONG)["tokens"]
    cold, warm = engine.serve(PROMPTS, LONG), engine.serve(PROMPTS, LONG, forgets=True)
    there = other.serve(PROMPTS, SHORT)
    assert cold["tokens"] == warm["tokens"] == right
    assert there["tokens"] == short(right)
    assert warm["num_cached"] == there["num_cached"] == all_blocks(PROMPTS)
    for engine in started:
        engine.kill()


def test_recurrent_layers_load_their_last_state(engines):
    """An LFM2, of whose layers one half has a state instead of keys and values."""
    options = {"max_num_batched_tokens": 256}
    started = [engines.start(store, kind="lfm2", options=options) for store in (None, "lfm2")]
    plain, engine = (engine.wait() for engine in started)
    prompts = random_prompts(6, seed=1)
    right = plain.serve(prompts, SHORT)["tokens"]
    cold, warm = engine.serve(prompts, SHORT), engine.serve(prompts, SHORT, forgets=True)
    assert cold["tokens"] == warm["tokens"] == right
    assert warm["num_cached"] == all_blocks(prompts)
    assert warm["metrics"]["loads"] - cold["metrics"]["loads"] == len(prompts)
    for engine in started:
        engine.kill()


def test_two_workers_have_a_part_of_each_block(engines, right):
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    engine = engines.start("two", options=options).wait()
    cold, warm = engine.serve(PROMPTS, SHORT), engine.serve(PROMPTS, SHORT, forgets=True)
    assert cold["tokens"] == warm["tokens"] == short(right)
    assert warm["num_cached"] == all_blocks(PROMPTS)
    engine.kill()


def test_disk_behind_the_pool(engines, right):
    folder = engines.folder
    url = f"tiered:{folder}/disk?memory=8MiB&disk=256MiB&pool={folder}/disk_pool"
    engine = engines.start(url).wait()
    cold, warm = engine.serve(PROMPTS, SHORT), engine.serve(PROMPTS, SHORT, forgets=True)
    assert cold["tokens"] == warm["tokens"] == short(right)
    assert sum(warm["num_cached"]) > 2 * sum(cold["num_cached"])
    engine.kill()


def test_fresh_engine_loads_chunks_from_the_tier(engines, right, computed):
    """By vLLM's own offloading: what the first has computed, the second finds in the store."""
    folder = engines.folder
    tier = f"shm:{folder}/tier?size=256MiB"
    disk = f"tiered:{folder}/t?memory=8MiB&disk=256MiB&pool={folder}/t_p"
    answers = []
    for url, cpu_bytes in ((tier, 64 << 20), (tier, 64 << 20), (disk, 8 << 20), (disk, 8 << 20)):
        engine = engines.start_on_tier(url, cpu_bytes).wait()
        answers.append(engine.serve(PROMPTS, SHORT))
        engine.end()
    assert [answer["tokens"] for answer in answers] == [short(right)] * 4
    first, second, third, fourth = (answer["num_cached"] for answer in answers)
    assert first == computed
    assert second == all_blocks(PROMPTS)
    assert sum(fourth) > 2 * sum(third)
