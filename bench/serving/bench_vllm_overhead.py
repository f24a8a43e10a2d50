"""What the connector for vLLM costs when no prompt hits, and what a hit saves.

An engine of vLLM on this machine's processors has our connector on a `shm:` store, and has none, in
turn: the same process, the same model with random weights and the same memory, so that nothing
else differs. In a row "no hits", `us` is the time of a batch of prompts that no one has seen, until
the last answer; `x_without` is how many times as fast that is as without the connector, and `x_cpu`
the same of the processors' time, in which is also what saves after the answers, until all is saved.
In a row "hit", `us` is the time to the first token of a prompt that is in the store, and not in the
engine's own cache; `x_cold` is how many times as fast that is as to compute it, and `gb_per_s` the
bytes of its blocks by the time that loading takes: how much longer the request is than once more,
when nothing has to be loaded.

Two models: one of Qwen2.5-0.5B's layers, and a small one that has 10 times as many bytes of cache
for what a token is to compute: the worse case.

`--vllm` is a Python with vLLM (tests/serving/in_vllm/make_vllm makes one). Without it all rows are
missing.
"""

import argparse
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib
sys.path.insert(1, str(Path(__file__).resolve().parents[2]))  # tests

from lib.harness import arguments, spread
from lib.processes import TICK_S, cpu_seconds
from lib.table import heading, save

BLOCK = 32  # tokens


class Model(NamedTuple):
    """What decides on the computation and the cache of a token."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int

    @property
    def token_bytes(self) -> int:
        return self.layers * 2 * self.kv_heads * 64 * 4  # key and value, float32


MODELS = {"0.5B": Model(24, 896, 4864, 14, 2), "small": Model(6, 512, 1408, 8, 4)}
WRITE = """
import json, sys, torch, transformers
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=512, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=True,
    **json.loads(sys.argv[2]))
transformers.LlamaForCausalLM(config).float().save_pretrained(sys.argv[1])
"""


class Load(NamedTuple):
    """A batch of prompts: how many, their tokens, and those of each answer."""

    name: str
    prompts: int
    tokens: int
    answer: int


LOADS = [
    Load("no hits, prefill", 1, 512, 1),
    Load("no hits, prefill and decode", 4, 64, 32),
]
HITS = [256, 992]  # tokens


class Hit(NamedTuple):
    """Seconds to the first token: computed, loaded; and how much longer than the engine's own."""

    cold: float
    warm: float
    loading: float


Batch = dict[bool, tuple[float, float]]  # whether connected: seconds, and those of processors


class Side:
    """The engine, with its connector or without."""

    def __init__(self, python: str, model: Model, stack: ExitStack):
        support = importlib.import_module("tests.serving.in_vllm.support")  # which needs pytest
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        vllm = stack.enter_context(support.Vllm(python, folder))
        config = {
            "num_hidden_layers": model.layers,
            "hidden_size": model.hidden,
            "intermediate_size": model.intermediate,
            "num_attention_heads": model.heads,
            "num_key_value_heads": model.kv_heads,
        }
        path = str(folder / "model")
        command = [python, "-c", WRITE, path, json.dumps(config)]
        subprocess.run(command, check=True, capture_output=True)
        pool = Path(f"/dev/shm/mk-bench-{os.getpid()}")
        connector = {
            "kv_connector": "StoreConnector",
            "kv_connector_module_path": "mooncake_serving.connectors.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"url": f"shm:{pool}?size=2GiB"},
        }
        stack.callback(pool.unlink, missing_ok=True)
        options = {"model": path, "kv_cache_memory_bytes": 256 << 20}
        self._engine = vllm.engine(connector, options=options)
        self._engine.wait()
        self._rng = random.Random(0)

    def prompts(self, count: int, tokens: int) -> list[list[int]]:
        """Prompts that no one has seen."""
        return [[self._rng.randrange(5, 505) for _ in range(tokens)] for _ in range(count)]

    def serve(
        self, prompts: list[list[int]], answer: int, connects: bool, forgets: bool = True
    ) -> tuple[float, float]:
        """Return the seconds that prompts take, and those of processors. It is idle then.

        ``forgets``: the engine's own prefix cache is empty before.
        """
        before = cpu_seconds(self._engine.pid)
        told = {"connects": connects, "forgets": forgets}
        taken = self._engine.serve(prompts, answer, **told)["seconds"]
        return taken, max(cpu_seconds(self._engine.pid) - before, TICK_S)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vllm", default=os.environ.get("MK_TEST_VLLM"), help="a Python")


def main() -> None:
    options = arguments(__doc__, add_options, without=("device", "seconds"))
    head = heading("vllm_overhead", options)
    if not options.vllm:
        left_out = [{"case": "all", "left_out": "--vllm names no Python with vLLM"}]
        save(head, [], options, left_out)
        return
    rows = []
    for name, model in MODELS.items():
        with ExitStack() as stack:
            side = Side(options.vllm, model, stack)
            for load in LOADS:
                rows.append(row_of_batches(name, load, without_hits(side, load, options.repeat)))
                sys.stdout.write(line(rows[-1]))
            for count in HITS:
                rows.append(row_of_hits(name, count, with_hits(side, count, options.repeat)))
                sys.stdout.write(line(rows[-1]))
    save(head, rows, options)


def without_hits(side: Side, load: Load, rounds: int) -> list[Batch]:
    """With the connector and without, going first equally often."""
    batches: list[Batch] = []
    for i in range(2 + rounds):
        prompts = side.prompts(load.prompts, load.tokens)
        turns = [True, False] if i % 2 else [False, True]
        batches.append({turn: side.serve(prompts, load.answer, turn) for turn in turns})
    return batches[2:]  # without the first of each, in which memory is touched


def row_of_batches(model: str, load: Load, batches: list[Batch]) -> dict[str, Any]:
    """One row: prompts that no engine has seen."""
    seconds = statistics.median(one[True][0] for one in batches)
    row: dict[str, Any] = {
        "case": f"{model}, {load.name}, {load.prompts} x {load.tokens} + {load.answer} tokens",
        "us": seconds * 1e6,
        "tokens_per_s": load.prompts * (load.tokens + load.answer) / seconds,
        "rounds": len(batches),
    }
    for name, clock in (("without", 0), ("cpu", 1)):
        ratios = [one[False][clock] / one[True][clock] for one in batches]
        row[f"x_{name}"], row[f"x_{name}_quartiles"] = spread(ratios)
    return row


def with_hits(side: Side, count: int, rounds: int) -> list[Hit]:
    """A prompt that is in the store, and to compute it."""
    hits: list[Hit] = []
    for _ in range(2 + rounds):
        prompt = side.prompts(1, count + 1)
        side.serve(prompt, 1, connects=True)
        cold = side.serve(prompt, 1, connects=False)[0]
        warm = side.serve(prompt, 1, connects=True)[0]
        own = side.serve(prompt, 1, connects=True, forgets=False)[0]
        hits.append(Hit(cold, warm, max(warm - own, 1e-6)))
    return hits[2:]


def row_of_hits(model: str, count: int, hits: list[Hit]) -> dict[str, Any]:
    """One row: a prompt that is in the store."""
    loading = statistics.median(one.loading for one in hits)
    row: dict[str, Any] = {
        "case": f"{model}, hit, {count} tokens",
        "us": statistics.median(one.warm for one in hits) * 1e6,
        "us_cold": statistics.median(one.cold for one in hits) * 1e6,
        "us_loading": loading * 1e6,
        "gb_per_s": count // BLOCK * BLOCK * MODELS[model].token_bytes / loading / 1e9,
        "rounds": len(hits),
    }
    row["x_cold"], row["x_cold_quartiles"] = spread([one.cold / one.warm for one in hits])
    return row


def line(row: dict[str, Any]) -> str:
    """Return one row of the table."""
    text = f"{row['case']:60} {row['us']:10.1f} us"
    for name in ("tokens_per_s", "gb_per_s"):
        if name in row:
            text += f" {row[name]:8.2f} {name.replace('_per_', '/')}"
    for name in ("without", "cpu", "cold"):
        if f"x_{name}" in row:
            low, high = row[f"x_{name}_quartiles"]
            text += f"   {row[f'x_{name}']:.3f}x {name} [{low:.3f}, {high:.3f}]"
    return text + "\n"


if __name__ == "__main__":
    main()
