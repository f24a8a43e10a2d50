"""A copy in parallel with a matrix product: what each of the two costs the other.

On the CPU they run on two threads, on a GPU on two streams. In every round each is timed alone and
in parallel with the other, in turn; while one is timed, the other runs without a pause. A slowdown
is the median of (time in parallel / time alone) of a round, with its quartiles. Copies: a plan
(for each of --engine and --max-sms), torch layer by layer, and one memcpy of as many bytes.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib and baselines

import mooncake_kernels as mk
from lib.harness import arguments, spread
from lib.kv_directions import Memory
from lib.kv_moves import Call
from lib.kv_options import add_options, directions, jobs, memory, way_name, ways
from lib.overlap import Side, alone, calibrated, overlapped
from lib.table import heading, save

MM_SIZE = {"cpu": 1024, "cuda": 8192}
MM_DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
SHAPES, RUNS = ["llama-8b", "llama-70b-tp8"], [4096]  # unless the command line says otherwise
WANTED_S, QUICK_S = 0.2, 0.02  # the duration of each of the four measurements of a round


def product(device: str, quick: bool) -> tuple[Call, int]:
    """Return a matrix product, and its floating-point operations."""
    size = MM_SIZE[device] // (2 if quick else 1)
    a, b = (torch.randn(size, size, device=device).to(MM_DTYPE[device]) for _ in range(2))
    out = torch.empty_like(a)
    if device == "cuda":
        torch.cuda.synchronize()  # it runs on another stream than the one that made them
    return lambda: torch.mm(a, b, out=out), 2 * size**3


def copies(
    direction: str, pools: Memory, options: argparse.Namespace
) -> list[tuple[str, dict[str, Any], Call | str]]:
    """Return what runs alongside the product: name, fields, and the call or why there is none."""
    found: list[tuple[str, dict[str, Any], Call | str]] = []
    for job in jobs(options):
        name = f"{direction} {job.name}"
        fields = {"direction": direction, "shape": job.shape.name, "bytes": 2 * job.num_bytes,
                  "run_bytes": job.shape.run_bytes, "ids": job.pattern}  # fmt: skip
        for i, (engine, max_sms) in enumerate(ways(options)):
            way = fields | {"copy": "CopyPlan", "engine": engine, "max_sms": max_sms}
            label = f"{name}, CopyPlan{way_name(engine, max_sms)}"
            try:
                (move,) = pools.moves(direction, job, engine, max_sms)
            except (mk.InvalidArgument, mk.Unavailable, MemoryError) as error:
                found.append((label, way, str(error)))
                continue
            move.check()
            found.append((label, way, move.ours))
            if i == 0:
                for copy, call in (("torch", move.by_torch), ("memcpy", move.memcpy)):
                    found.append((f"{name}, {copy}", fields | {"copy": copy}, call))
    return found


def measure(copy: Side, mm: Side, options: argparse.Namespace) -> dict[str, Any]:
    """Time both alone and in parallel with each other, in turn."""
    ways = {
        "copy": lambda: alone(copy), "mm": lambda: alone(mm),
        "copy_overlapped": lambda: overlapped(copy, mm),
        "mm_overlapped": lambda: overlapped(mm, copy),
    }  # fmt: skip
    rounds = [{name: way() for name, way in ways.items()} for _ in range(1 + options.repeat)][1:]
    row: dict[str, Any] = {}
    for name in ways:
        row[f"us_{name}"] = statistics.median(taken[name] for taken in rounds) * 1e6
    for side in ("copy", "mm"):
        ratios = [taken[f"{side}_overlapped"] / taken[side] for taken in rounds]
        row[f"{side}_slowdown"], row[f"{side}_slowdown_quartiles"] = spread(ratios)
    return row


def line(name: str, row: dict[str, Any]) -> str:
    text = f"{name:58} {row['gb_per_s']:8.2f} GB/s alone"
    for side, what in (("copy", "copy"), ("mm", "product")):
        low, high = row[f"{side}_slowdown_quartiles"]
        text += f"   {what} {row[f'{side}_slowdown']:.2f}x slower [{low:.2f}, {high:.2f}]"
    return text + "\n"


def main(options: argparse.Namespace) -> None:
    head, rows, left_out = heading("kv_with_mm", options), [], []
    pools, wanted = memory(options), QUICK_S if options.quick else WANTED_S
    call, operations = product(options.device, options.quick)
    streams = [torch.cuda.Stream() if options.device == "cuda" else None for _ in range(2)]
    mm = calibrated(Side(call, stream=streams[0]), wanted)
    for direction in (name for name in directions(options) if name != "both"):
        for name, fields, copy in copies(direction, pools, options):
            if isinstance(copy, str):
                left_out.append({"case": name, "left_out": copy})
                sys.stdout.write(f"{name:58} left out: {copy}\n")
                continue
            row = measure(calibrated(Side(copy, stream=streams[1]), wanted), mm, options)
            row["gb_per_s"] = fields["bytes"] / row["us_copy"] / 1e3
            row["mm_tflop_per_s"] = operations / row["us_mm"] / 1e6
            rows.append({"case": name, **fields, **row})
            sys.stdout.write(line(name, row))
            sys.stdout.flush()
            save(head, rows, options, left_out)


def few_cases(parser: argparse.ArgumentParser) -> None:
    add_options(parser)
    parser.set_defaults(shape=SHAPES, runs=RUNS, pattern=["random"], repeat=9)


if __name__ == "__main__":
    options = arguments(__doc__, few_cases, without=("seconds",))
    if options.quick:
        options.shape, options.runs = options.shape[:1], [256]
    main(options)
