"""The transfer engine with 1, 2 and 4 threads of the caller, in turn.

The processes and the memory of bench_transfer.py, in four parts. The same blocking calls to the
same peer are made by one thread, for one part after the other, or by two or four, which share the
parts. `us` is what one call takes its thread; `x_1 thread` compares the bytes that all threads
together move in a second with those of one. `stream`, a bare socket for each thread, shows what the
machine allows.
"""

import argparse
import itertools
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib and baselines

from bench_transfer import REGION_BYTES, jobs, name_of

from baselines.transfer import Library
from lib.harness import arguments, spread
from lib.table import heading, save

TRANSPORTS = ("tcp", "stream", "shm", "shm-mapped")
CASES = [(4 << 10, 1), (64 << 10, 1), (1 << 20, 1), (16 << 10, 1024), (16 << 20, 1)]
QUICK = [(4 << 10, 1), (16 << 10, 128)]
NUM_THREADS = (1, 2, 4)


def add_options(parser: argparse.ArgumentParser) -> None:
    verbs = ["write", "read"]
    parser.add_argument("--transports", nargs="+", default=list(TRANSPORTS), choices=TRANSPORTS)
    parser.add_argument("--operation", nargs="+", default=verbs, choices=verbs)


def rates(
    library: Library, verb: str, size: int, batch: int, options: argparse.Namespace
) -> dict[int, list]:
    """For each number of threads, of each round: bytes a second, and seconds a call."""
    work = jobs(verb, size, batch, max(NUM_THREADS), options.quick)
    library.check(work[0])
    for threads in NUM_THREADS:
        library.run(work, threads)
    found: dict[int, list] = {threads: [] for threads in NUM_THREADS}
    for i in range(options.repeat):
        first = i % len(NUM_THREADS)
        for threads in NUM_THREADS[first:] + NUM_THREADS[:first]:
            taken = library.run(work, threads)
            calls = len(work) * work[0].count
            found[threads].append((calls * size * batch / taken, taken / calls * threads))
    return found


def main() -> None:
    options = arguments(__doc__, add_options, without=("device", "seconds"))
    head, rows = heading("transfer_threads", options), []
    for ours in options.transports:
        with Library(ours, REGION_BYTES) as library:
            cases = QUICK if options.quick else CASES
            for verb, (size, batch) in itertools.product(options.operation, cases):
                found = rates(library, verb, size, batch, options)
                for threads in NUM_THREADS:
                    row: dict[str, Any] = {
                        "case": f"{name_of(ours, verb, size, batch)}, {threads} threads",
                        "gb_per_s": statistics.median(rate for rate, _ in found[threads]) / 1e9,
                        "us": statistics.median(taken for _, taken in found[threads]) * 1e6,
                    }
                    pairs = zip(found[threads], found[1], strict=True)
                    ratio, quartiles = spread([mine / alone for (mine, _), (alone, _) in pairs])
                    row |= {"x_1 thread": ratio, "x_1 thread_quartiles": quartiles}
                    rows.append({**row, "rounds": options.repeat})
                    text = f"{row['case']:42} {row['us']:9.1f} us {row['gb_per_s']:7.2f} GB/s"
                    sys.stdout.write(f"{text}   {ratio:.2f}x 1 thread\n")
                    sys.stdout.flush()
                save(head, rows, options, [])


if __name__ == "__main__":
    main()
