"""CopyPlan on the shapes that engines have: n runs, in every direction, against today's ways.

H2H is within host memory, on the CPU. With a GPU: D2D, H2D and D2H (the host's memory is pinned),
and both of these at once on two streams. A run is a contiguous range: one id of one layer's keys or
values. Baselines: torch, layer by layer (index_select, copy_ where memory changes, index_copy_,
into preallocated tensors); memcpy, one contiguous copy of as many bytes; memcpy_loop, one memcpy a
run, in C (on a GPU one cuMemcpyAsync). The ceiling is the faster of one large memcpy and
torch's copy_ (1 GiB on the CPU, 256 MiB on a GPU), measured before each shape; copies that fit the
cache can exceed it. GB/s counts bytes read and written. "us of the host" is what the caller's
thread spends in a call.
"""

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from itertools import groupby, product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib and baselines

import mooncake_kernels as mk
from lib.harness import Case, LeftOut, arguments
from lib.kv_directions import Memory, ceiling, seconds_a_run, together
from lib.kv_moves import Call
from lib.kv_options import add_options, directions, jobs, memory, way_name, ways
from lib.kv_shapes import Job
from lib.table import report

CACHED_BYTES = 4 << 20  # read and written: what fits the cache, after as much of a baseline's own


def case(
    direction: str, job: Job, engine: str, max_sms: int | None, memory: Memory
) -> Case | LeftOut:
    name = f"{direction} {job.name}{way_name(engine, max_sms)}"
    try:
        moves = memory.moves(direction, job, engine, max_sms)
    except (mk.InvalidArgument, mk.Unavailable, MemoryError) as error:
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
    fits = direction == "H2H" and num_bytes <= CACHED_BYTES
    return Case(name, ours, baselines, check, num_bytes, fields=fields, warm=fits)


def at_once(queue: Call, calls: list[Call]) -> Call:
    return lambda: queue(calls)


def cases(options: argparse.Namespace) -> Iterator[Case | LeftOut]:
    pools = memory(options)
    for direction in directions(options):
        lone = seconds_a_run(direction, pools)
        for _, group in groupby(jobs(options), key=lambda job: job.shape.name):
            top = ceiling(direction, pools)  # again for each shape: the machine's speed drifts
            for job, way in product(group, ways(options)):
                row = case(direction, job, *way, pools)
                if isinstance(row, Case):
                    row.ceiling = top
                    row.fields["us_lone_run"] = lone * 1e6
                yield row
                del row


if __name__ == "__main__":
    options = arguments(__doc__, add_options)
    if options.quick:
        options.runs, options.pattern = options.runs[:2], options.pattern[:1]
    report("kv_shapes", cases(options), options)
