"""Engines of vLLM that serve prompts and print the results: run by test_in_vllm.py.

  python vllm_engine.py TASKS     # [{"model": ..., "config": ..., "rounds": [{"prompts": ...}]}]

Runs in an environment with vLLM, not the one of the tests. The engines follow each other in one
process, for most of an engine's time goes into its imports.
"""

import gc
import itertools
import json
import mmap
import os
import signal
import sys
import threading
import time
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}  # fmt: skip


def make_models(folder: str) -> None:
    """Write models with random weights: a Llama of three layers; a Gemma of four, of which two see
    a window of 64 tokens; and an LFM2 of four, of which two are recurrent.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    rest = {"max_position_embeddings": 2048, "tie_word_embeddings": True, "initializer_range": 0.3}
    config = transformers.LlamaConfig(num_hidden_layers=3, **sizes, **heads, **rest)
    transformers.LlamaForCausalLM(config).float().save_pretrained(f"{folder}/llama")
    config = transformers.Gemma3TextConfig(
        num_hidden_layers=4,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
        **sizes,
        **heads,
        # With the words' own vectors, it repeats the last token, whatever came before.
        **(rest | {"tie_word_embeddings": False}),
    )
    transformers.Gemma3ForCausalLM(config).float().save_pretrained(f"{folder}/gemma")
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.Lfm2Config(
        num_hidden_layers=4,
        layer_types=["conv", "full_attention"] * 2,
        block_auto_adjust_ff_dim=False,
        **sizes,
        **heads,
        **rest,
    )
    transformers.Lfm2ForCausalLM(config).float().save_pretrained(f"{folder}/lfm2")
    with open(f"{folder}/lfm2/config.json", "r+") as file:  # vLLM reads more than that class writes
        values = json.load(file) | {"conv_dim": 128, "block_dim": 128}
        file.seek(0)
        json.dump(values, file)
        file.truncate()


def copy_states_without_triton() -> None:
    """Have vLLM copy the states of recurrent layers by the C library: its own copy is a kernel."""
    import ctypes

    from vllm.v1.worker import mamba_utils

    def copy(sources: Any, targets: Any, sizes: Any) -> None:
        pairs = zip(targets.tolist(), sources.tolist(), sizes.tolist())  # noqa: B905
        for target, source, size in pairs:
            ctypes.memmove(target, source, size)

    mamba_utils.batch_memcpy = copy


def lose_what_was_found(from_place: int) -> None:
    """Have the store lose blocks between the look-up and the load, from one of a prompt on."""
    from mooncake_serving.connectors.vllm.steps import object_names
    from mooncake_serving.connectors.vllm.worker import StoreWorker

    start = getattr(StoreWorker, "start_of_ours", StoreWorker.start)
    StoreWorker.start_of_ours = start

    def lose(worker: Any, step: Any) -> None:
        for load in step.loads:
            for blocks in load.blocks:
                lost = [h for p, h in zip(blocks.places, blocks.hashes) if p >= from_place]  # noqa: B905
                names = object_names(step.epoch, blocks.group, lost, [worker._shards.number])
                worker._opened(step.namespace).remove_each(names)
        start(worker, step)

    StoreWorker.start = lose


def die_while_it_saves(times: int) -> None:
    """Have the process killed a few microseconds after it has begun to save for that time."""
    from mooncake_serving.connectors.tier_store import TierStore

    put, count = TierStore.put_each, itertools.count(1)

    def put_or_die(store: Any, *arguments: Any) -> Any:
        if next(count) == times:
            threading.Timer(1e-4, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return put(store, *arguments)

    TierStore.put_each = put_or_die


def schedule_ahead(*, is_on: bool) -> None:
    """Have the next step scheduled while one computes: vLLM does so on GPUs, and not on the CPU."""
    from vllm.platforms.cpu import CpuPlatform

    update = getattr(CpuPlatform, "update_of_vllm", CpuPlatform.check_and_update_config.__func__)
    CpuPlatform.update_of_vllm = update

    def update_but_that(cls: Any, config: Any) -> None:
        update(cls, config)
        config.scheduler_config.async_scheduling = is_on

    CpuPlatform.check_and_update_config = classmethod(update_but_that)


def damage(path: str, most: int = 6) -> int:
    """Change a byte of some objects of a pool."""
    from mooncake_serving.store import Store

    num_damaged = 0
    with Store.open(path) as store, open(path, "r+b") as file:
        keys, _ = store.list_objects()
        memory = mmap.mmap(file.fileno(), 0)
        for key in keys.tolist()[:: max(len(keys) // most, 1)]:
            with store.pin_key(tuple(key)) as pinned:
                data = pinned.to_bytes()
            if (at := memory.find(data)) >= 0:
                memory[at + len(data) // 2] ^= 0xFF
                num_damaged += 1
        memory.close()
    return num_damaged


def settle(engine: Any, pool: str | None) -> None:
    """Let what is on its way be saved: as the loop of an engine in a process of its own does, and
    until a pool gets nothing more.
    """
    from mooncake_serving.store import Store

    while engine.llm_engine.engine_core.engine_core.scheduler.has_requests():
        engine.llm_engine.step()
    if pool is not None and os.path.exists(pool):
        with Store.open(pool) as store:
            seen: list[Any] = []
            while len(seen) < 5 or len(set(seen[-5:])) > 1:
                stats = store.stats()
                seen.append((stats.num_ready, stats.num_writing))
                time.sleep(0.05)


def configured(task: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {
        "model": task["model"], "skip_tokenizer_init": True, "dtype": "float32",
        "block_size": 32, "max_model_len": 1024, "max_num_seqs": 8, "enforce_eager": True,
        "kv_cache_memory_bytes": task.get("cache_bytes", 64 << 20), "disable_log_stats": False,
        **task.get("options", {}),
    }  # fmt: skip
    if task.get("tier"):
        options["kv_transfer_config"] = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "CpuTieringSpec",
                "spec_module_path": "tests.serving.connectors.vllm_cpu_spec",
                "cpu_bytes_to_use": task.get("cpu_bytes", 64 << 20),
                "secondary_tiers": [
                    {
                        "type": "StoreTier",
                        "module_path": "mooncake_serving.connectors.vllm.tier",
                        **task["tier"],
                    }
                ],
            },
        }
    elif task.get("config"):
        options["kv_transfer_config"] = {
            "kv_connector": "StoreConnector",
            "kv_connector_module_path": "mooncake_serving.connectors.vllm",
            "kv_role": task.get("role", "kv_both"),
            "kv_load_failure_policy": task.get("policy", "recompute"),
            "kv_connector_extra_config": task["config"],
        }
    return options


def serve(task: dict[str, Any]) -> list[dict[str, Any]]:
    """Return of each round the tokens, how many of each prompt's were not computed, and what the
    connector has counted since the engine began.
    """
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    if "loses" in task:
        lose_what_was_found(task["loses"])
    schedule_ahead(is_on=task.get("ahead", False))
    copy_states_without_triton()
    if task.get("dies"):
        die_while_it_saves(task["dies"])
    if "distributed_executor_backend" in task.get("options", {}):  # a NUMA node each, otherwise
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    engine = LLM(**configured(task))
    rounds = []
    url = (task.get("config") or {}).get("url", "")
    pool = url.removeprefix("shm:").partition("?")[0] if url.startswith("shm:") else None
    for one in task["rounds"]:
        if one.get("forgets"):  # what the engine itself has
            assert engine.reset_prefix_cache(), "blocks are still in use"
        if one.get("resets"):
            assert engine.reset_prefix_cache(reset_connector=True)
        if one.get("damages"):
            assert damage(pool)
        sampling = {"max_tokens": one["num_tokens"], "ignore_eos": True, "detokenize": False}
        prompts = [{"prompt_token_ids": tokens} for tokens in one["prompts"]]
        begin = time.monotonic()
        answers = engine.generate(
            prompts, SamplingParams(temperature=0, **sampling), use_tqdm=False
        )
        seconds = time.monotonic() - begin
        settle(engine, pool)
        rounds.append(
            {
                "tokens": [list(answer.outputs[0].token_ids) for answer in answers],
                "num_cached": [answer.num_cached_tokens for answer in answers],
                "seconds": seconds,
                "metrics": {
                    one.name.removeprefix("vllm:mooncake_kernels_"): one.value
                    for one in engine.get_metrics()
                    if "mooncake_kernels" in one.name and hasattr(one, "value")
                },
            }
        )
    engine.llm_engine.engine_core.shutdown()
    del engine
    gc.collect()
    cleanup_dist_env_and_memory()
    return rounds


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        told = json.load(file)
    if isinstance(told, dict):
        make_models(told["make"])
    else:
        for task in told:
            try:
                answer: Any = serve(task)
            except Exception as error:
                if not task.get("fails"):
                    raise
                answer = f"{type(error).__name__}: {error}"
            print("ANSWER " + json.dumps(answer), flush=True)  # noqa: T201 - to the test
