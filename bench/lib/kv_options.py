"""The options of benches that move caches: which directions, engines, shapes, and how much."""

import argparse
import sys

from lib.harness import at_least
from lib.kv_directions import DIRECTIONS, Memory
from lib.kv_shapes import NUM_RUNS, PATTERNS, SHAPES, Job

ENGINES = ["auto", "host", "cuda", "copy_engine", "two_hop", "tma", "triton"]
MAX_GIB = {"cpu": 2.0, "cuda": 16.0}  # of a source cache and a destination cache
QUICK_GIB = 0.25


def add_options(parser: argparse.ArgumentParser) -> None:
    names = [shape.name for shape in SHAPES]
    parser.add_argument("--direction", nargs="+", choices=list(DIRECTIONS), help="default: all")
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=["auto"])
    parser.add_argument(
        "--max-sms", nargs="+", type=at_least(0), default=[0], help="a case for each; 0: all"
    )
    gib = at_least(0.001, float)
    parser.add_argument("--max-gib", type=gib, help="of the caches of a direction; default 2, 16")
    parser.add_argument("--shape", nargs="+", choices=names, default=names)
    parser.add_argument("--runs", nargs="+", type=at_least(1), default=NUM_RUNS)
    parser.add_argument("--pattern", nargs="+", choices=PATTERNS, default=PATTERNS)


def directions(options: argparse.Namespace) -> list[str]:
    """Return those asked for, or all, of those that this device has."""
    here = [name for name in DIRECTIONS if (name != "H2H") == (options.device == "cuda")]
    for name in options.direction or []:
        if name not in here:
            sys.exit(f"--direction must be of {' '.join(here)} on {options.device}, got {name}")
    return options.direction or here


def memory(options: argparse.Namespace) -> Memory:
    gib = options.max_gib or (QUICK_GIB if options.quick else MAX_GIB[options.device])
    return Memory(int(gib * 2**30) // 2, options.device == "cuda")


def jobs(options: argparse.Namespace) -> list[Job]:
    """Return the matrix; numbers of runs that lead to the same job appear once."""
    matrix = [
        Job(shape, runs, pattern)
        for shape in SHAPES if shape.name in options.shape
        for runs in options.runs for pattern in options.pattern
    ]  # fmt: skip
    return list({job.name: job for job in matrix}.values())


def ways(options: argparse.Namespace) -> list[tuple[str, int | None]]:
    """Return the engines, and for each the numbers of multiprocessors that it may use."""
    return [(engine, sms or None) for engine in options.engine for sms in options.max_sms]


def way_name(engine: str, max_sms: int | None) -> str:
    return f", {engine}" * (engine != "auto") + f", {max_sms} SMs" * (max_sms is not None)
