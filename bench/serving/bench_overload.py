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
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib

from lib import trace_load
from lib.harness import arguments, at_least
from lib.model_folder import Shape, write_model
from lib.serve_up import serve_up
from lib.table import heading, save

RULES = {"baseline": "baseline", "early": "early rejection", "predictive": "with prediction"}
MODEL = Shape(layers=6, hidden=384, ffn=1024, heads=6, kv_heads=6)
CALIBRATION = 24  # requests


def add_options(parser: argparse.ArgumentParser) -> None:
    trace_load.add_options(parser, requests=300)
    parser.add_argument(
        "--load", type=at_least(0.01, float), default=2.0, help="of what is possible"
    )
    parser.add_argument("--ttft", type=at_least(1, float), default=20.0, help="times that alone")
    parser.add_argument("--batch", type=at_least(1), default=6, help="within TBT")


def send(url: str, trace: Path, options: argparse.Namespace, *more: str) -> dict[str, Any]:
    """Replay a trace, and return what ``serve bench`` tells, with what the simulator predicts."""
    return trace_load.replay(url, trace, options, "--simulate", "--timeout=300", *more)


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
    write_model(folder, MODEL)
    trace = folder / "trace.jsonl"
    requests = trace_load.write_trace(options, trace)
    common = ("--num-blocks=4096", "--chunk-tokens=512", "--max-requests=256")
    common += (f"--threads={options.threads}",)
    with serve_up(folder, *common) as up:
        costs = calibrate(up.url, trace, options)["simulated"]["cluster"]["decode"]
        alone = send(up.url, trace, options, "--seed=97", "--concurrency=1", "--num-prompts=64")
    outputs = sum(options.scale_outputs * one.output_length for one in requests) / len(requests)
    tokens = trace_load.SCALE * sum(one.input_length for one in requests) / len(requests)
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
        with serve_up(folder, *common, *given) as up:
            calibrate(up.url, trace, options)
            told = send(up.url, trace, options, f"--speed={speed}", "--goodput", *goodput)
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
