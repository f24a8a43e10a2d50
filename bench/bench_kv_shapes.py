"""CopyPlan on the shapes that engines have: n runs, in every direction, beside what they do today.

H2H is within host memory, on the CPU. With a GPU: D2D, H2D and D2H (the host's memory is pinned),
and both of these at once on two streams. A run is what is contiguous: one id of one layer's keys or
values. Baselines: torch, layer by layer (index_select, copy_ where memory changes, index_copy_,
into tensors that are there already); memcpy, one contiguous copy of as many bytes; memcpy_loop on a
GPU, one cuMemcpyAsync a run. The ceiling is the faster of one large memcpy and torch's copy_ (1 GiB
on the CPU, 256 MiB on a GPU), measured in the same run. GB/s counts bytes read and written. "us of
the host" is what the caller's thread spends in a call.
"""

import argparse
from collections.abc import Iterator
from functools import partial

import torch
from harness import Case, LeftOut, arguments
from kv_directions import DIRECTIONS, Memory, ceiling, seconds_a_run, together
from kv_moves import Call, Move
from kv_shapes import NUM_RUNS, PATTERNS, SHAPES, Job
from table import report

import mooncake_kernels as mk

ENGINES = ["auto", "host", "cuda", "copy_engine", "two_hop", "tma", "triton"]
MAX_GIB = {"cpu": 2.0, "cuda": 16.0}  # of a cache to read and one to write


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--direction", nargs="+", choices=list(DIRECTIONS), help="default: all")
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=["auto"])
    parser.add_argument("--max-sms", nargs="+", type=int, default=[], help="a case for each")
    parser.add_argument("--max-gib", type=float, help="of the caches of a direction; default 2, 16")
    parser.add_argument("--shape", nargs="+", choices=[shape.name for shape in SHAPES])
    parser.add_argument("--runs", nargs="+", type=int, default=NUM_RUNS)
    parser.add_argument("--pattern", nargs="+", choices=PATTERNS, default=PATTERNS)


def jobs(options: argparse.Namespace) -> list[Job]:
    """Return the matrix; where two numbers of runs come to the same job, it is there once."""
    shapes = [shape for shape in SHAPES if shape.name in (options.shape or [shape.name])]
    matrix = [
        Job(shape, runs, pattern)
        for shape in shapes for runs in options.runs for pattern in options.pattern
    ]  # fmt: skip
    return list({job.name: job for job in matrix}.values())


def ways(options: argparse.Namespace) -> list[tuple[str, int | None]]:
    """Return the engines, and for each the numbers of multiprocessors that it may use."""
    return [(engine, sms) for engine in options.engine for sms in (options.max_sms or [None])]


def case(
    direction: str, job: Job, engine: str, max_sms: int | None, memory: Memory
) -> Case | LeftOut:
    name = f"{direction} {job.name}"
    name += f", {engine}" * (engine != "auto") + f", {max_sms} SMs" * (max_sms is not None)
    if job.pool_bytes > memory.num_bytes:
        needed = 2 * job.pool_bytes / 2**30
        return LeftOut(name, f"needs {needed:.1f} GiB, --max-gib is less")
    pairs = zip(memory.ends(direction), memory.staging(direction), strict=True)
    try:
        moves = [Move(job, *ends, staging, engine, max_sms) for ends, staging in pairs]
        for move in moves:
            move.ours()
    except (mk.InvalidArgument, mk.Unavailable) as error:
        return LeftOut(name, str(error))
    fields = {
        "direction": direction, "shape": job.shape.name, "source": job.shape.source,
        "layers": job.num_layers, "runs": job.num_runs, "run_bytes": job.shape.run_bytes,
        "ids": job.pattern, "engine": engine, "max_sms": max_sms,
    }  # fmt: skip
    ours, baselines = moves[0].ours, moves[0].baselines()
    if len(moves) > 1:
        queue = partial(together, streams=[torch.cuda.Stream() for _ in moves])
        ours = at_once(queue, [move.ours for move in moves])
        each = [move.baselines() for move in moves]
        baselines = {key: at_once(queue, [calls[key] for calls in each]) for key in each[0]}

    def check() -> None:
        for move in moves:
            move.check()

    num_bytes = 2 * job.num_bytes * len(moves)
    return Case(name, ours, baselines, check, num_bytes, fields=fields)


def at_once(queue: Call, calls: list[Call]) -> Call:
    return lambda: queue(calls)


def cases(options: argparse.Namespace) -> Iterator[Case | LeftOut]:
    on_gpu = options.device == "cuda"
    gib = options.max_gib or MAX_GIB[options.device]
    memory = Memory(int(gib * 2**30) // 2, on_gpu)
    here = [name for name in DIRECTIONS if (name != "H2H") == on_gpu]
    for direction in options.direction or here:
        top, lone = ceiling(direction, memory), seconds_a_run(direction, memory)
        for job in jobs(options):
            for engine, max_sms in ways(options):
                row = case(direction, job, engine, max_sms, memory)
                if isinstance(row, Case):
                    row.ceiling = top
                    row.fields["us_lone_run"] = lone * 1e6
                yield row
                del row


if __name__ == "__main__":
    options = arguments(__doc__, add_options)
    if options.quick:
        options.runs, options.pattern = options.runs[:2], options.pattern[:1]
        options.max_gib = options.max_gib or 0.25
    report("kv_shapes", cases(options), options)
