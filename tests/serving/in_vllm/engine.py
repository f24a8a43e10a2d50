"""What runs in vLLM's environment, each in a process of its own: see engines.py.

``llm`` is an engine in that process, which answers tasks; ``server`` is vLLM's own OpenAI server,
and ``model`` makes the model of both. They are called with their arguments, the lines that come,
and what sends an answer.
"""

import itertools
import json
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

# What an engine imports later anyway. None of it starts a thread.
import transformers
import vllm.entrypoints.openai.api_server
import vllm.model_executor.models.llama
import vllm.v1.attention.backends.cpu_attn
import vllm.v1.engine.core
import vllm.v1.worker.cpu_model_runner
import vllm.v1.worker.cpu_worker  # noqa: F401
from vllm import LLM, SamplingParams

VOCABULARY = 512


Say = Callable[[Any], None]


def model(arguments: dict[str, Any], _lines: Iterable[str], say: Say) -> None:
    """Write a Llama of three layers with random weights, and a word for each token."""
    import tokenizers
    import torch

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    rest = {"max_position_embeddings": 2048, "tie_word_embeddings": True, "initializer_range": 0.3}
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads, **rest)
    folder = arguments["folder"]
    transformers.LlamaForCausalLM(config).float().save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    say("made")


def server(arguments: list[str], _lines: Iterable[str], _say: Say) -> None:
    """``python -m vllm.entrypoints.openai.api_server`` with these arguments."""
    sys.argv = ["api_server", *arguments]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


def llm(arguments: dict[str, Any], lines: Iterable[str], say: Say) -> None:
    """Answer that the engine is ready, and then each task.

    Args:
        arguments: ``options`` of the engine; ``counts`` whether it counts what is read by NIXL's
            API; ``loses``, ``dies`` and ``ahead``: see below.
        lines: of tasks as JSON: ``prompts``, ``num_tokens``, and for each prompt ``params``,
            its kv_transfer_params. The cache on the device is empty before each. Answers have the
            tokens, how many of each prompt's were not computed, how long it took, and how many
            bytes were read.
        say: sends an answer.
    """
    if arguments.get("loses"):
        lose_what_was_found()
    if arguments.get("ahead"):
        schedule_ahead()
    if arguments.get("dies"):
        die_while_it_saves(arguments["dies"])
    agents = record_agents() if arguments.get("counts") else []
    options = {
        "skip_tokenizer_init": True, "dtype": "float32", "block_size": 32, "max_model_len": 1024,
        "max_num_seqs": 8, "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20,
        **arguments["options"],
    }  # fmt: skip
    engine = LLM(**options)
    say("ready")
    for line in lines:
        task = json.loads(line)
        sampling = [
            SamplingParams(
                temperature=0,
                max_tokens=task["num_tokens"],
                ignore_eos=True,
                detokenize=False,
                extra_args={"kv_transfer_params": params} if params else None,
            )
            for params in task["params"]
        ]
        prompts = [{"prompt_token_ids": tokens} for tokens in task["prompts"]]
        if not options.get("kv_transfer_config"):
            engine.reset_prefix_cache()
        started = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        answer = {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "num_cached": [output.num_cached_tokens for output in outputs],
            "params": [output.kv_transfer_params for output in outputs],
            "seconds": time.perf_counter() - started,
            "read": bytes_read(agents),
        }
        say(answer)
    engine.llm_engine.engine_core.shutdown()  # what is on its way is stored


def record_agents() -> list[Any]:
    """The agents of NIXL that are created from now on."""
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
