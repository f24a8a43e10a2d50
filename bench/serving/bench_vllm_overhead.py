"""What the connector for vLLM costs when no prompt hits, and what a hit saves.

Engines of vLLM on this machine's processors, with a small Llama of random weights: one without a
connector, and two with ours on one `shm:` store, measured in turn, and started anew several times.
In a row "no hits", `us` is the time of a batch of prompts that no one has seen, each of which is
saved; `x_without` is how many times as fast that is as without the connector, and `x_cpu` the same
of the processors' time, which includes the threads that save. In a row "hit", `us` is the time to
the first token of a prompt that the other engine has computed; `x_cold` is how many times as fast
that is as to compute it, and `gb_per_s` the bytes of its blocks by the time that loading takes: how
much longer the request is than once more, when nothing has to be loaded.

`--vllm` is a Python with vLLM (tests/serving/in_vllm/make_vllm makes one). Without it all rows are
missing.
"""

import argparse
import importlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib
sys.path.insert(1, str(Path(__file__).resolve().parents[2]))  # tests

from lib.harness import arguments, spread
from lib.table import heading, save

BLOCK = 32  # tokens
LAYERS, HEADS, HEAD_DIM = 6, 4, 64
TOKEN_BYTES = LAYERS * 2 * HEADS * HEAD_DIM * 4  # key and value, float32
MODEL = f"""
import sys, torch, transformers
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=512, hidden_size=512, intermediate_size=1408, num_hidden_layers={LAYERS},
    num_attention_heads=8, num_key_value_heads={HEADS}, head_dim={HEAD_DIM},
    max_position_embeddings=2048, tie_word_embeddings=True)
transformers.LlamaForCausalLM(config).float().save_pretrained(sys.argv[1])
"""
TICK_S = 1 / os.sysconf("SC_CLK_TCK")  # of a processor's clock
IDLE_S = 0.1  # without a clock tick: threads have ended what they had to do


class Load(NamedTuple):
    """A batch of prompts: how many, their tokens, and those of each answer."""

    name: str
    prompts: int
    tokens: int
    answer: int


LOADS = [
    Load("no hits, prefill", 4, 512, 1),
    Load("no hits, prefill and decode", 8, 128, 64),
]
HITS = [256, 992]  # tokens
STARTS = 4  # a process of vLLM may be some percent slower than another all its life


class Hit(NamedTuple):
    """Seconds to the first token: computed, loaded; and how much longer than the engine's own."""

    cold: float
    warm: float
    loading: float


Batch = dict[str, tuple[float, float]]  # by engine: seconds, and those of processors


class Sides:
    """The engines by name: "without", "ours", and "other", which shares the store of ours."""

    def __init__(self, python: str, folder: Path, stack: ExitStack):
        support = importlib.import_module("tests.serving.in_vllm.support")  # which needs pytest
        vllm = stack.enter_context(support.Vllm(python, folder))
        model = str(folder / "small")
        subprocess.run([python, "-c", MODEL, model], check=True, capture_output=True)
        connector = {
            "kv_connector": "StoreConnector",
            "kv_connector_module_path": "mooncake_serving.connectors.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"url": f"shm:/dev/shm/mk-bench-{os.getpid()}?size=2GiB"},
        }
        stack.callback(Path(f"/dev/shm/mk-bench-{os.getpid()}").unlink, missing_ok=True)
        options = {"model": model, "kv_cache_memory_bytes": 256 << 20}
        self._engines = {
            name: vllm.engine(told, options=options, is_one_process=False)
            for name, told in {"without": None, "ours": connector, "other": connector}.items()
        }
        for engine in self._engines.values():
            engine.wait()
        self._rng = random.Random(0)

    def prompts(self, count: int, tokens: int) -> list[list[int]]:
        """Prompts that no engine has seen."""
        return [[self._rng.randrange(5, 505) for _ in range(tokens)] for _ in range(count)]

    def serve(self, name: str, prompts: list[list[int]], answer: int) -> tuple[float, float]:
        """Return the seconds that prompts take, and those of processors. It is idle then."""
        engine = self._engines[name]
        before = cpu_seconds(engine.pid)
        taken = engine.serve(prompts, answer)["seconds"]
        used = cpu_seconds(engine.pid)
        while True:
            time.sleep(IDLE_S)
            if (now := cpu_seconds(engine.pid)) == used:
                return taken, max(used - before, TICK_S)
            used = now


def cpu_seconds(pid: int) -> float:
    """What a process and those that it has started have computed so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    own = (int(fields[11]) + int(fields[12])) * TICK_S
    return own + sum(cpu_seconds(int(child)) for child in children)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vllm", default=os.environ.get("MK_TEST_VLLM"), help="a Python")


def main() -> None:
    options = arguments(__doc__, add_options, without=("device", "seconds"))
    head = heading("vllm_overhead", options)
    if not options.vllm:
        left_out = [{"case": "all", "left_out": "--vllm names no Python with vLLM"}]
        save(head, [], options, left_out)
        return
    starts = 1 if options.quick else STARTS
    rounds = -(-options.repeat // starts)
    cold: dict[Load, list[Batch]] = {load: [] for load in LOADS}
    warm: dict[int, list[Hit]] = {count: [] for count in HITS}
    for _ in range(starts):
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            sides = Sides(options.vllm, folder, stack)
            for load, batches in cold.items():
                batches += without_hits(sides, load, rounds)
            for count, hits in warm.items():
                hits += with_hits(sides, count, rounds)
    rows = [row_of_batches(*one) for one in cold.items()]
    rows += [row_of_hits(*one) for one in warm.items()]
    sys.stdout.write("".join(map(line, rows)))
    save(head, rows, options)


def without_hits(sides: Sides, load: Load, rounds: int) -> list[Batch]:
    """An engine with the connector and one without, going first equally often."""
    batches: list[Batch] = []
    for i in range(2 + rounds):
        names = ["ours", "without"] if i % 2 else ["without", "ours"]
        prompts = sides.prompts(load.prompts, load.tokens)
        batches.append({name: sides.serve(name, prompts, load.answer) for name in names})
    return batches[2:]  # without the first of each, in which memory is touched


def row_of_batches(load: Load, batches: list[Batch]) -> dict[str, Any]:
    """One row: prompts that no engine has seen."""
    seconds = statistics.median(one["ours"][0] for one in batches)
    row: dict[str, Any] = {
        "case": f"{load.name}, {load.prompts} x {load.tokens} tokens, {load.answer} generated",
        "us": seconds * 1e6,
        "tokens_per_s": load.prompts * (load.tokens + load.answer) / seconds,
        "rounds": len(batches),
    }
    for name, clock in (("without", 0), ("cpu", 1)):
        ratios = [one["without"][clock] / one["ours"][clock] for one in batches]
        row[f"x_{name}"], row[f"x_{name}_quartiles"] = spread(ratios)
    return row


def with_hits(sides: Sides, count: int, rounds: int) -> list[Hit]:
    """A prompt that the other engine has computed, and to compute it."""
    hits: list[Hit] = []
    for _ in range(2 + rounds):
        prompt = sides.prompts(1, count + 1)
        sides.serve("other", prompt, 1)
        cold = sides.serve("without", prompt, 1)[0]
        warm = sides.serve("ours", prompt, 1)[0]
        hits.append(Hit(cold, warm, max(warm - sides.serve("ours", prompt, 1)[0], 1e-6)))
    return hits[2:]


def row_of_hits(count: int, hits: list[Hit]) -> dict[str, Any]:
    """One row: a prompt that is in the store."""
    loading = statistics.median(one.loading for one in hits)
    row: dict[str, Any] = {
        "case": f"hit, {count} tokens",
        "us": statistics.median(one.warm for one in hits) * 1e6,
        "us_cold": statistics.median(one.cold for one in hits) * 1e6,
        "us_loading": loading * 1e6,
        "gb_per_s": count // BLOCK * BLOCK * TOKEN_BYTES / loading / 1e9,
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
