"""Overload: three rules of admission before real engines, and what the simulator predicts.

`serve up` with a small Llama of random weights is sent a trace at a multiple of what its decode
engine can do, once under each rule (arXiv 2407.00079, sections 7.1 to 7.4): the baseline, which
looks at the decode load only when a prompt is computed; early rejection; and with prediction. In a
row `refused` are requests, `wasted_prefills` those of them whose prompt had been computed; `good`
met both objectives. `simulated_...` is what the simulator predicts of the same run, with the costs
that the router has fitted by its end. t_d of the prediction is the decode time that the baseline
has measured.

Objectives are relative to this machine, by a first run at low load. TBT may be that of a step of
`--batch` requests; as many at once, without a pause, are what the decode engine can do. TTFT may be
`--ttft` times that of a request alone.

`--trace` is Mooncake's conversation trace; without it requests are generated from the profile of
the tests. Lengths are scaled so that a block is 16 tokens.
"""

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib

from lib.harness import arguments, at_least
from lib.table import heading, save
from mooncake_serving.__main__ import main
from mooncake_simulator.traces import TraceProfile, read_trace, synth_trace, write_mooncake

PROFILE = Path(__file__).parents[2] / "tests/simulator/conversation.profile.json"
RULES = {"baseline": "baseline", "early": "early rejection", "predictive": "with prediction"}
SCALE = 16 / 512
LAYERS, HIDDEN, FFN, HEADS, HEAD_DIM = 6, 384, 1024, 6, 64
VOCABULARY, CONTEXT = 256, 8192
CALIBRATION = 24  # requests


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", help="Mooncake's JSON lines")
    parser.add_argument("--requests", type=at_least(8), default=300, help="of each run")
    parser.add_argument(
        "--load", type=at_least(0.01, float), default=2.0, help="of what is possible"
    )
    parser.add_argument("--scale-outputs", type=at_least(0.001, float), default=0.25)
    parser.add_argument("--ttft", type=at_least(1, float), default=20.0, help="times that alone")
    parser.add_argument("--batch", type=at_least(1), default=6, help="within TBT")


def write_model(folder: Path) -> None:
    """Write a Llama of random weights, whose tokens are all texts: none is held back."""
    sizes = {
        "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT,
    }  # fmt: skip
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, **sizes,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    state = {"embed_tokens": (VOCABULARY, HIDDEN), "norm": (HIDDEN,)}
    for layer in range(LAYERS):
        for name, shape in {
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
            **{f"self_attn.{one}_proj": (HIDDEN, HIDDEN) for one in "qkvo"},
            "mlp.gate_proj": (FFN, HIDDEN),
            "mlp.up_proj": (FFN, HIDDEN),
            "mlp.down_proj": (HIDDEN, FFN),
        }.items():
            state[f"layers.{layer}.{name}"] = shape
    weights = {
        f"model.{name}.weight": torch.ones(shape) if len(shape) == 1 else 0.05 * torch.randn(shape)
        for name, shape in state.items()
    }
    save_file(weights, folder / "model.safetensors")
    letters = [chr(code) for code in range(33, 127)]
    words = [*letters, *(a + b for a in letters for b in letters)][:VOCABULARY]
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE({word: i for i, word in enumerate(words)}, []))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.save(str(folder / "tokenizer.json"))


@contextlib.contextmanager
def cluster(model: Path, threads: int, *more: str) -> Iterator[str]:
    """Start ``serve up``, and yield its URL."""
    command = [
        *(sys.executable, "-m", "mooncake_serving", "serve", "up", "--port=0", f"--model={model}"),
        *("--num-blocks=4096", "--chunk-tokens=512", "--max-requests=256", f"--threads={threads}"),
        *more,
    ]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if "ready at" not in line:
                errors.seek(0)
                raise RuntimeError(f"serve up has ended: {errors.read()[-2000:]}")
            yield line.split()[3].rstrip(":")
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate()


def send(url: str, trace: Path, options: argparse.Namespace, *more: str) -> dict[str, Any]:
    """Replay a trace, and return what ``serve bench`` tells."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        with contextlib.redirect_stdout(sys.stderr):
            main([
                "serve", "bench", f"--url={url}", f"--trace={trace}", f"--scale-lengths={SCALE}",
                f"--scale-outputs={options.scale_outputs}", "--simulate", "--timeout=300",
                f"--output-json={file.name}", *more,
            ])  # fmt: skip
        return json.load(file)


def calibrate(url: str, trace: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Have the router measure prefills alone, and steps of several requests; of other tokens."""
    few = f"--num-prompts={CALIBRATION}"
    send(url, trace, options, few, "--seed=98", "--concurrency=1")
    return send(url, trace, options, few, "--seed=99", "--concurrency=8")


def row_of(rule: str, told: dict[str, Any], setting: dict[str, float]) -> dict[str, Any]:
    """Return a row: what was measured, and what was simulated."""
    row: dict[str, Any] = {"case": RULES[rule], "requests": told["num_prompts"], **setting}
    names = ("refused", "wasted_prefills", "completed", "failed", "good")
    row |= {name: told[name] for name in names}
    row |= {f"simulated_{name}": told["simulated"][name] for name in names}
    for name in ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms"):
        row[name] = told[name]
        row[f"simulated_{name}"] = told["simulated"][name]
    reasons = {reason: one["count"] for reason, one in told["not_answered"].items()}
    return row | {"not_answered": reasons, "costs": told["simulated"]["cluster"]}


def decode_s(told: dict[str, Any]) -> float:
    """Return the mean seconds from the first token to the last of what was answered."""
    spans = [
        sum(gaps) for gaps, error in zip(told["itls"], told["errors"], strict=True) if not error
    ]
    return sum(spans) / max(1, len(spans))


def show(row: dict[str, Any]) -> str:
    def both(name: str) -> str:
        return f"{row[name]} (simulated {row[f'simulated_{name}']})"

    return (
        f"{row['case']:16} of {row['requests']}: refused {both('refused')}, after the prefill "
        f"{both('wasted_prefills')}, good {both('good')}\n"
    )


def run(options: argparse.Namespace, folder: Path) -> None:
    head, rows = heading("overload", options), []
    write_model(folder)
    if options.trace:
        requests = read_trace(options.trace)[: options.requests]
    else:
        requests = synth_trace(TraceProfile.load(PROFILE), options.requests)
    trace = folder / "trace.jsonl"
    write_mooncake(requests, trace)
    with cluster(folder, options.threads) as url:
        costs = calibrate(url, trace, options)["simulated"]["cluster"]["decode"]
        alone = send(url, trace, options, "--seed=97", "--concurrency=1", "--num-prompts=64")
    outputs = sum(options.scale_outputs * one.output_length for one in requests) / len(requests)
    tokens = SCALE * sum(one.input_length for one in requests) / len(requests)
    kv_tokens = options.batch * (tokens + outputs / 2)
    step_s = costs["base_s"] + costs["per_request_s"] * options.batch
    step_s += costs["per_kv_token_s"] * kv_tokens
    ttft_s = alone["mean_ttft_ms"] / 1000
    rate = options.load * options.batch / (step_s * outputs)
    setting = {
        "rate": rate,
        "prefill_load": rate * ttft_s,
        "ttft_s": options.ttft * ttft_s,
        "tbt_s": step_s,
    }
    span_s = (requests[-1].timestamp_ms - requests[0].timestamp_ms) / 1000
    speed = rate * span_s / len(requests)
    sys.stdout.write(f"{setting} speed={speed:.3f}\n")
    goodput = [f"ttft:{1000 * setting['ttft_s']}", f"tpot:{1000 * setting['tbt_s']}"]
    t_d = 10.0
    for rule in RULES:
        objectives = [f"--ttft-s={setting['ttft_s']}", f"--tbt-s={setting['tbt_s']}"]
        given = [f"--admission={rule}", f"--decode-s={t_d}", *objectives]
        with cluster(folder, options.threads, *given) as url:
            calibrate(url, trace, options)
            told = send(url, trace, options, f"--speed={speed}", "--goodput", *goodput)
        row = row_of(rule, told, {**setting, "decode_s": t_d})
        if rule == "baseline":
            t_d = max(0.001, decode_s(told))
        rows.append(row)
        sys.stdout.write(show(row))
        sys.stdout.flush()
        save(head, rows, options)


if __name__ == "__main__":
    chosen = arguments(__doc__, add_options, without=("device", "seconds"))
    if chosen.quick:
        chosen.requests = min(chosen.requests, 24)
    with tempfile.TemporaryDirectory(prefix="mooncake-overload-") as name:
        run(chosen, Path(name))
