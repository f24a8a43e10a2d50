"""An engine of vLLM that hands requests over, which serves what it reads: run by
test_handoff_in_vllm.py.

  python handoff_engine.py '{"model": ..., "role": ..., "port": ..., "url": "",
      "ahead": false, "options": {}, "llm": {}}'

A line of stdin is a task, as JSON: prompts, how many tokens of each, and its kv_transfer_params.
Runs in an environment with vLLM, not the one of the tests.
"""

import json
import os
import sys
import time
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1", "VLLM_HOST_IP": "127.0.0.1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several ranks on one NUMA node
}  # fmt: skip


def say(answer: dict[str, Any]) -> None:
    print("ANSWER " + json.dumps(answer), flush=True)  # noqa: T201 - to the test


def written() -> dict[str, list[int]]:
    """Bytes and requests of this process's writes, by transport."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():  # the workers are other processes
        return {}
    transports = get_kv_transfer_group().handoff_worker._engine.stats()["transports"]
    return {
        name: [counters["num_bytes_written"], counters["num_requests"]]
        for name, counters in transports.items()
        if counters["num_bytes_written"]
    }


def num_free(engine: Any) -> int | None:
    """Blocks of the cache that no request has, after a step that frees what was reported."""
    core = getattr(engine.llm_engine.engine_core, "engine_core", None)
    return (
        None if core is None else core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    )


def abort(engine: Any, prompt: dict[str, Any], sampling: Any) -> int:
    """Abort a request while it is received; returns the blocks that are in use after that."""
    before = num_free(engine)
    engine.llm_engine.add_request("aborted", prompt, sampling)
    for _ in range(3):
        engine.llm_engine.step()
    assert num_free(engine) < before
    engine.llm_engine.abort_request(["aborted"])
    end = time.monotonic() + 60
    core = engine.llm_engine.engine_core.engine_core
    while num_free(engine) < before and time.monotonic() < end:
        core.step_fn()
    return before - num_free(engine)


def main(told: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    from tests.serving.connectors.vllm_engine import copy_states_without_triton, schedule_ahead

    copy_states_without_triton()
    schedule_ahead(is_on=told["ahead"])
    connector = {
        "kv_connector": "StoreConnector",
        "kv_connector_module_path": "mooncake_serving.connectors.vllm",
        "kv_role": told["role"], "engine_id": told["role"], "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {
            "handoff": {"host": "127.0.0.1", "port": told["port"], "silence_s": 5.0,
                        "slot_bytes": 8 << 20, **told["options"]},
            **({"url": told["url"]} if told["url"] else {}),
        },
    }  # fmt: skip
    options = {
        "model": told["model"], "skip_tokenizer_init": True, "dtype": "float32", "block_size": 32,
        "max_model_len": 1024, "max_num_seqs": 8, "enforce_eager": True,
        "kv_cache_memory_bytes": 64 << 20, "max_num_batched_tokens": 128,
        "kv_transfer_config": connector, **told["llm"],
    }  # fmt: skip
    engine = LLM(**options)
    say({})
    for line in sys.stdin:
        task = json.loads(line)
        options = {"temperature": 0, "ignore_eos": True, "detokenize": False}
        sampling = [
            SamplingParams(
                max_tokens=task["num_tokens"],
                extra_args={"kv_transfer_params": params} if params else None,
                **options,
            )
            for params in task["params"]
        ]
        prompts = [{"prompt_token_ids": tokens} for tokens in task["prompts"]]
        if task.get("aborts"):
            say({"in_use": abort(engine, prompts[0], sampling[0])})
            continue
        if task.get("forgets"):  # what it has in its cache
            assert engine.reset_prefix_cache(), "blocks are still in use"
        answers = engine.generate(prompts, sampling, use_tqdm=False)
        say(
            {
                "tokens": [list(answer.outputs[0].token_ids) for answer in answers],
                "reasons": [answer.outputs[0].finish_reason for answer in answers],
                "num_cached": [answer.num_cached_tokens for answer in answers],
                "params": [answer.kv_transfer_params for answer in answers],
                "written": written(),
                "num_free": num_free(engine),
            }
        )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
