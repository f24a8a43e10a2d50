"""An engine of vLLM that serves some prompts and prints the results: run by test_in_vllm.py.

  python vllm_engine.py '{"model": ..., "config": {...}, "prompts": [[...], ...], ...}'

Runs in an environment with vLLM, not the one of the tests.
"""

import itertools
import json
import os
import signal
import sys
import threading
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip


def make_model(folder: str) -> None:
    """Write a Llama of three layers with random weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    rest = {"max_position_embeddings": 2048, "tie_word_embeddings": True, "initializer_range": 0.3}
    config = transformers.LlamaConfig(vocab_size=512, **sizes, **heads, **rest)
    transformers.LlamaForCausalLM(config).float().save_pretrained(folder)


def lose_what_was_found() -> None:
    """Have the store lose everything between the look-up and the load."""
    from mooncake_serving.connectors.vllm import StoreConnector

    load = StoreConnector.start_load_kv

    def lose(connector: Any, *arguments: Any, **options: Any) -> None:
        told = connector._told()
        if told.loads:
            connector._opened(told.namespace).remove_all()
        load(connector, *arguments, **options)

    StoreConnector.start_load_kv = lose


def die_while_it_saves(times: int) -> None:
    """Have the process killed a few microseconds after it has begun to save for that time."""
    from mooncake_serving.connectors.vllm.caches import Caches

    save, count = Caches.save, itertools.count(1)

    def save_or_die(caches: Any, *arguments: Any) -> None:
        if next(count) == times:
            threading.Timer(1e-4, os.kill, (os.getpid(), signal.SIGKILL)).start()
        save(caches, *arguments)

    Caches.save = save_or_die


def schedule_ahead() -> None:
    """Have the next step scheduled while one computes: vLLM does so on GPUs, and not on the CPU."""
    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config.__func__

    def update_but_that(cls: Any, config: Any) -> None:
        update(cls, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(update_but_that)


def serve(task: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens, and how many of each prompt's were not computed."""
    from vllm import LLM, SamplingParams

    if task.get("loses"):
        lose_what_was_found()
    if task.get("ahead"):
        schedule_ahead()
    if task.get("dies"):
        die_while_it_saves(task["dies"])
    options: dict[str, Any] = {
        "model": task["model"], "skip_tokenizer_init": True, "dtype": "float32",
        "block_size": 32, "max_model_len": 1024, "max_num_seqs": 8, "enforce_eager": True,
        "kv_cache_memory_bytes": task.get("cache_bytes", 64 << 20),
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
    engine = LLM(**options)
    sampling = {"max_tokens": task["num_tokens"], "ignore_eos": True, "detokenize": False}
    prompts = [{"prompt_token_ids": tokens} for tokens in task["prompts"]]
    answers = engine.generate(prompts, SamplingParams(temperature=0, **sampling), use_tqdm=False)
    if task.get("tier"):  # what is on its way is stored
        engine.llm_engine.engine_core.shutdown()
    return {
        "tokens": [list(answer.outputs[0].token_ids) for answer in answers],
        "num_cached": [answer.num_cached_tokens for answer in answers],
    }


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if told.get("make"):
        make_model(told["make"])
    else:
        print("ANSWER " + json.dumps(serve(told)), flush=True)  # noqa: T201 - to the test
