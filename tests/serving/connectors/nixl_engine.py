"""An engine of vLLM with its own NixlConnector, which serves what it reads: run by
test_nixl_in_vllm.py.

  python nixl_engine.py '{"model": ..., "role": "kv_producer", "port": ...}'

A line of stdin is a task, as JSON: prompts, how many tokens of each, and its kv_transfer_params.
Runs in an environment with vLLM, not the one of the tests.
"""

import json
import os
import sys
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1", "VLLM_HOST_IP": "127.0.0.1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}  # fmt: skip


def say(answer: dict[str, Any]) -> None:
    print("ANSWER " + json.dumps(answer), flush=True)  # noqa: T201 - to the test


def record_agents() -> list[Any]:
    """The agents that are created from now on."""
    from nixl._api import nixl_agent

    agents, start = [], nixl_agent.__init__

    def start_and_record(agent: Any, *arguments: Any, **options: Any) -> None:
        start(agent, *arguments, **options)
        agents.append(agent)

    nixl_agent.__init__ = start_and_record
    return agents


def bytes_read(agents: list[Any]) -> dict[str, int]:
    """What agents have read, by transport."""
    read: dict[str, int] = {}
    for agent in agents:
        for name, counters in agent.agent.engine.stats()["transports"].items():
            read[name] = read.get(name, 0) + counters["num_bytes_read"]
    return {name: count for name, count in read.items() if count}


def main(told: dict[str, Any]) -> None:
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(told["port"])
    os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
    agents = record_agents()
    from vllm import LLM, SamplingParams

    connector = {
        "kv_connector": "NixlConnector", "kv_role": told["role"], "kv_buffer_device": "cpu",
        "engine_id": told["role"], "kv_load_failure_policy": "fail",
    }  # fmt: skip
    engine = LLM(
        model=told["model"], skip_tokenizer_init=True, dtype="float32", block_size=32,
        max_model_len=1024, max_num_seqs=8, enforce_eager=True, kv_cache_memory_bytes=64 << 20,
        kv_transfer_config=connector if told["role"] else None,
    )  # fmt: skip
    import nixl._api

    say({"nixl": nixl._api.nixl_agent.__module__})
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
        answers = engine.generate(prompts, sampling, use_tqdm=False)
        say(
            {
                "tokens": [list(answer.outputs[0].token_ids) for answer in answers],
                "num_cached": [answer.num_cached_tokens for answer in answers],
                "params": [answer.kv_transfer_params for answer in answers],
                "read": bytes_read(agents),
            }
        )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
