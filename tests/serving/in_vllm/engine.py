"""What runs in vLLM's environment, each in a process of its own: see engines.py.

``llm`` is an engine in that process, which answers tasks; ``server`` is vLLM's own OpenAI server,
and ``model`` makes the model of both. They are called with their arguments, the lines that come,
and what sends an answer.
"""

import itertools
import json
import mmap
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
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

from mooncake_serving.store import Store

METRICS = "vllm:mooncake_kernels_"
VOCABULARY = 512


Say = Callable[[Any], None]


def model(arguments: dict[str, Any], _lines: Iterable[str], say: Say) -> None:
    """Write a model with random weights: its ``kind`` is a name in MODELS."""
    import torch

    torch.manual_seed(0)
    MODELS[arguments["kind"]](arguments["folder"])
    say("made")


SIZES = {"vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
REST = {"max_position_embeddings": 2048, "tie_word_embeddings": True, "initializer_range": 0.3}


def write_llama(folder: str) -> None:
    """Three layers of full attention, and a word for each token."""
    import tokenizers

    config = transformers.LlamaConfig(num_hidden_layers=3, **SIZES, **HEADS, **REST)
    transformers.LlamaForCausalLM(config).float().save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


def write_gemma(folder: str) -> None:
    """Four layers, of which two see a window of 64 tokens."""
    layers = ["sliding_attention", "full_attention"] * 2
    # With the words' own vectors, it repeats the last token, whatever came before.
    rest = REST | {"tie_word_embeddings": False}
    config = transformers.Gemma3TextConfig(
        num_hidden_layers=4, sliding_window=64, layer_types=layers, **SIZES, **HEADS, **rest
    )
    transformers.Gemma3ForCausalLM(config).float().save_pretrained(folder)


def write_lfm2(folder: str) -> None:
    """Four layers, of which two are recurrent."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    layers = ["conv", "full_attention"] * 2
    config = transformers.Lfm2Config(
        num_hidden_layers=4, layer_types=layers, block_auto_adjust_ff_dim=False,
        **SIZES, **heads, **REST,
    )  # fmt: skip
    transformers.Lfm2ForCausalLM(config).float().save_pretrained(folder)
    path = Path(folder, "config.json")  # vLLM reads more than that class writes
    path.write_text(json.dumps(json.loads(path.read_text()) | {"conv_dim": 128, "block_dim": 128}))


MODELS = {"llama": write_llama, "gemma": write_gemma, "lfm2": write_lfm2}


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
            its kv_transfer_params. Before that, ``forgets`` empties the engine's own prefix cache
            (an engine without a connector always does), ``resets`` the connector's, too, and
            ``damages`` changes bytes in the pool of its store, and ``connects`` is whether the
            engine has its connector, or is for now one without. Answers have the tokens, why each
            request ended, how many of each prompt's tokens were not computed, how long it took,
            how many bytes were read, the metrics of our connector, the bytes that its hand-offs
            wrote, and the free blocks. ``aborts``: the first prompt's request is aborted while it
            is received, and the answer says how many blocks are ``in_use`` after that.
        say: sends an answer.
    """
    if "loses" in arguments:
        lose_what_was_found(arguments["loses"])
    if arguments.get("ahead"):
        schedule_ahead()
    if arguments.get("dies"):
        die_while_it_saves(arguments["dies"])
    copy_states_without_triton()
    agents = record_agents() if arguments.get("counts") else []
    options = {
        "skip_tokenizer_init": True, "dtype": "float32", "block_size": 32, "max_model_len": 1024,
        "max_num_seqs": 8, "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20,
        "disable_log_stats": False, **arguments["options"],
    }  # fmt: skip
    connector = options.get("kv_transfer_config")
    extra = (connector or {}).get("kv_connector_extra_config") or {}
    pool, name = pool_of(extra.get("url", "")), (connector or {}).get("kv_connector", "")
    hands_over = "handoff" in extra or name.startswith("Nixl")
    engine = LLM(**options)
    connectors = connectors_of(engine) if connector else None
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
        if not connector or task.get("forgets"):
            assert engine.reset_prefix_cache(), "blocks are still in use"
        if task.get("resets"):
            assert engine.reset_prefix_cache(reset_connector=True)
        if task.get("damages"):
            damage(pool)
        if connectors:
            connect(engine, connectors if task.get("connects", True) else (None, None))
        if task.get("aborts"):
            say({"in_use": abort(engine, prompts[0], sampling[0])})
            continue
        started = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        if not hands_over:  # blocks that no engine has asked for would be waited for
            settle(engine, pool)
        answer = {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "reasons": [output.outputs[0].finish_reason for output in outputs],
            "num_cached": [output.num_cached_tokens for output in outputs],
            "params": [output.kv_transfer_params for output in outputs],
            "seconds": seconds,
            "read": bytes_read(agents),
            "written": bytes_handed_over(),
            "num_free": num_free(engine),
            "metrics": {
                one.name.removeprefix(METRICS): one.value
                for one in engine.get_metrics()
                if one.name.startswith(METRICS) and hasattr(one, "value")
            },
        }
        say(answer)
    engine.llm_engine.engine_core.shutdown()  # what is on its way is stored


def connectors_of(engine: Any) -> tuple[Any, Any] | None:
    """Those of the scheduler and the worker, if both are in this process."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    core = getattr(engine.llm_engine.engine_core, "engine_core", None)
    worker = kv_transfer_state._KV_CONNECTOR_AGENT
    return (core.scheduler.connector, worker) if core is not None and worker is not None else None


def connect(engine: Any, connectors: tuple[Any, Any]) -> None:
    """Give an engine these connectors, or none."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    core = engine.llm_engine.engine_core.engine_core
    core.scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT = connectors


def pool_of(url: str) -> str | None:
    """The file of a store, if it is a pool in memory alone."""
    return url.removeprefix("shm:").partition("?")[0] if url.startswith("shm:") else None


def settle(engine: Any, pool: str | None) -> None:
    """Let what is on its way be saved: as the loop of an engine in a process of its own does, and
    until a pool gets nothing more.
    """
    core = getattr(engine.llm_engine.engine_core, "engine_core", None)
    while core is not None and core.scheduler.has_requests():
        engine.llm_engine.step()
    if pool is not None and os.path.exists(pool):
        with Store.open(pool) as store:
            seen: list[Any] = []
            while len(seen) < 5 or len(set(seen[-5:])) > 1:
                stats = store.stats()
                seen.append((stats.num_ready, stats.num_writing))
                time.sleep(0.05)


def damage(path: str, most: int = 6) -> None:
    """Change a byte of some objects of a pool."""
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
    assert num_damaged


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


def bytes_handed_over() -> dict[str, int]:
    """What this process has written for other engines, by transport."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    # The workers of an engine of several ranks are other processes.
    worker = has_kv_transfer_group() and getattr(get_kv_transfer_group(), "handoff_worker", None)
    if not worker:
        return {}
    transports = worker._engine.stats()["transports"]
    written = {name: counters["num_bytes_written"] for name, counters in transports.items()}
    return {name: count for name, count in written.items() if count}


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


def lose_what_was_found(from_place: int) -> None:
    """Have the store lose blocks between the look-up and the load, from one of a prompt on."""
    from mooncake_serving.connectors.vllm.steps import object_names
    from mooncake_serving.connectors.vllm.worker import StoreWorker

    start = StoreWorker.start

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


def copy_states_without_triton() -> None:
    """Have vLLM copy the states of recurrent layers by the C library: its own copy is a kernel."""
    import ctypes

    from vllm.v1.worker import mamba_utils

    def copy(sources: Any, targets: Any, sizes: Any) -> None:
        pairs = zip(targets.tolist(), sources.tolist(), sizes.tolist())  # noqa: B905
        for target, source, size in pairs:
            ctypes.memmove(target, source, size)

    mamba_utils.batch_memcpy = copy


def schedule_ahead() -> None:
    """Have the next step scheduled while one computes: vLLM does so on GPUs, and not on the CPU."""
    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config.__func__

    def update_but_that(cls: Any, config: Any) -> None:
        update(cls, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(update_but_that)
