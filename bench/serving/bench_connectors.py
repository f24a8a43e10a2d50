"""vLLM's own NixlConnector on this project, and on NIXL's wheel, in turn.

Prefill and decode are two engines of vLLM on this machine's processors, with a small Llama of
random weights. A row is a prompt that one has computed and the other loads: `us` is how much longer
a request for one token takes than the same request once more, when nothing has to be loaded.
`x_wheel` is how many times as fast as with the wheel that is.

`--vllm` is a Python with vLLM (tests/serving/in_vllm/make_vllm makes one), `--wheels` a folder with
the wheel: `pip install --no-deps --target FOLDER nixl nixl-cu12`. Without them the rows, or the
columns of the wheel, are missing.
"""

import argparse
import importlib
import os
import random
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib
sys.path.insert(1, str(Path(__file__).resolve().parents[2]))  # tests

from lib.harness import arguments, folder, spread
from lib.processes import free_port
from lib.table import heading, save

TOKENS = [128, 992]
TOKEN_BYTES = 3 * 2 * 2 * 64 * 4  # layers, key and value, heads, their size, float32


class Nixl:
    """NixlConnector, which pulls."""

    def __init__(self, vllm: Any, stack: ExitStack):
        self.engines = []
        for role in ("kv_producer", "kv_consumer"):
            connector = {
                "kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu",
                "kv_load_failure_policy": "fail",
            }  # fmt: skip
            channel = {
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            }
            self.engines.append(vllm.engine(connector, channel))
            stack.callback(self.engines[-1].kill)
        for engine in self.engines:
            engine.wait()

    def params(self, prompt: list[int]) -> dict[str, Any]:
        """Have a prompt computed, and say where it is."""
        there = {"do_remote_decode": True, "do_remote_prefill": False}
        return self.engines[0].serve([prompt], 1, [there])["params"][0]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vllm", default=os.environ.get("MK_TEST_VLLM"), help="a Python")
    parser.add_argument("--wheels", type=folder, help="a folder")


def main() -> None:
    options = arguments(__doc__, add_options, without=("device", "seconds"))
    head, rows, left_out = heading("connectors", options), [], []
    if not options.vllm:
        left_out.append({"case": "all", "left_out": "--vllm names no Python with vLLM"})
        save(head, rows, options, left_out)
        return
    support = importlib.import_module("tests.serving.in_vllm.support")  # which needs pytest
    with ExitStack() as stack:
        places = {"ours": None, "wheel": options.wheels}
        vllms = {}
        for name, packages in places.items():
            if name == "ours" or packages is not None:
                made = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                vllms[name] = stack.enter_context(support.Vllm(options.vllm, made, packages))
        sides = {}
        for name, vllm in vllms.items():
            try:
                sides[name] = Nixl(vllm, stack)
            except (support.EngineEnded, OSError) as error:
                if name == "ours":
                    raise
                why = str(error).strip().splitlines()[-1]
                left_out.append({"case": "wheel", "left_out": why})
        for count in TOKENS:
            rows.append(row := measure(sides, count, options))
            text = f"{row['case']:30} {row['us']:10.1f} us {row['gb_per_s']:6.2f} GB/s"
            if "x_wheel" in row:
                text += f"   {row['x_wheel']:.2f}x the wheel"
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
            save(head, rows, options, left_out)
    for row in left_out:
        sys.stdout.write(f"{row['case']:30} left out: {row['left_out']}\n")
    save(head, rows, options, left_out)


def measure(sides: dict[str, Any], count: int, options: Any) -> dict[str, Any]:
    """One row: each side in turn, going first equally often."""
    rng = random.Random(count)
    taken: list[dict[str, float]] = []
    for i in range(1 + options.repeat):
        names = list(sides)
        names = names[i % len(names) :] + names[: i % len(names)]
        one: dict[str, float] = {}
        for name in names:
            prompt = [rng.randrange(5, 505) for _ in range(count + 1)]
            params = sides[name].params(prompt)
            decode = sides[name].engines[1]
            loading = decode.serve([prompt], 1, [params])["seconds"]
            one[name] = max(loading - decode.serve([prompt], 1)["seconds"], 1e-6)
        taken.append(one)
    taken = taken[1:]  # without the first, which connects
    seconds = statistics.median(one["ours"] for one in taken)
    row: dict[str, Any] = {
        "case": f"pull, {count} tokens",
        "us": seconds * 1e6,
        "gb_per_s": count * TOKEN_BYTES / seconds / 1e9,
        "rounds": len(taken),
    }
    if "wheel" in sides:
        row["x_wheel"], row["x_wheel_quartiles"] = spread([t["wheel"] / t["ours"] for t in taken])
    return row


if __name__ == "__main__":
    main()
