"""The transfer engine, Mooncake's, NIXL, a raw socket stream and memcpy, in turn.

Every library has an initiator and a target in separate processes on this machine. A batch is one
call: blocks of one size from random places to random places. `memcpy`, `streamed` (past the cache)
and `stream` move as many bytes in one piece; `tcp-1` is ours by one connection. GB/s counts the
bytes moved, once. Each thread has a part of the 256 MiB of either side to itself. Mooncake and NIXL
are left out where they are not installed (`pip install --no-deps mooncake-transfer-engine-non-cuda
nixl nixl-cu12`, in an environment of their own or this one).
"""

import argparse
import itertools
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib and baselines

from baselines.transfer import Ended, Job, Library, Missing
from lib.harness import arguments, at_least, spread
from lib.table import heading, save

REGION_BYTES = 256 << 20
CASES = [  # block size, blocks a batch
    *((4 << 10, n) for n in (1, 128, 4096)),
    *((16 << 10, n) for n in (1, 128, 1024, 4096)),
    *((64 << 10, n) for n in (1, 128, 1024)),
    *((1 << 20, n) for n in (1, 64)),
    (16 << 20, 1),
    (64 << 20, 1),
]
QUICK = [(4 << 10, 128), (16 << 10, 1024), (1 << 20, 16)]
MIN_WINDOW_BYTES = 128 << 20  # timed at once, so that a window lasts some milliseconds
MAX_WINDOW_CALLS = 1024
PEERS = {
    "tcp": ("mooncake", "nixl-tcp", "stream", "tcp-1"),
    "shm": ("mooncake", "nixl-cma", "memcpy", "streamed"),
    "shm-mapped": ("mooncake", "nixl-cma", "memcpy-mapped", "streamed-mapped"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--transports", nargs="+", default=list(PEERS), choices=list(PEERS))
    verbs, peers = ["write", "read"], sorted({peer for names in PEERS.values() for peer in names})
    parser.add_argument("--operation", nargs="+", default=verbs, choices=verbs)
    parser.add_argument("--block-size", nargs="+", type=at_least(1), help="bytes; then only these")
    parser.add_argument(
        "--batch-size", nargs="+", type=at_least(1), default=[1024], help="of these sizes"
    )
    parser.add_argument("--without", nargs="*", default=[], choices=peers, help="to leave out")


def chosen(options: argparse.Namespace) -> list[tuple[int, int]]:
    """Block size and blocks a batch of each case."""
    if options.block_size:
        return list(itertools.product(options.block_size, options.batch_size))
    return QUICK if options.quick else CASES


def name_of(ours: str, verb: str, size: int, batch: int) -> str:
    """Return the name of a row, which plot_transfer.py reads."""
    unit = f"{size >> 10} KiB" if size % 1024 == 0 else f"{size} bytes"
    return f"{ours} {verb}, {batch} x {unit}"


def jobs(verb: str, size: int, batch: int, threads: int, quick: bool) -> list[Job]:
    rng = np.random.default_rng(size + batch)
    room = REGION_BYTES // threads
    window = MIN_WINDOW_BYTES // 16 if quick else MIN_WINDOW_BYTES
    calls = min(max(window // (size * batch), 1), MAX_WINDOW_CALLS)

    def places(first: int) -> np.ndarray:
        return first + rng.permutation(room // size)[:batch] * size

    return [Job(verb, places(i * room), places(i * room), size, calls) for i in range(threads)]


def measure(
    ours: str, libraries: dict[str, Library], work: list[Job], options: argparse.Namespace
) -> dict[str, Any]:
    """One row: every library in turn, each going first equally often."""
    moved = sum(job.size * len(job.local) * job.count for job in work)
    calls = work[0].count
    for library in libraries.values():
        library.check(work[0])
        library.run(work)
    rounds = []
    for i in range(options.repeat):
        names = list(libraries)
        names = names[i % len(names) :] + names[: i % len(names)]
        rounds.append({name: libraries[name].run(work) for name in names})
    taken = statistics.median(taken[ours] for taken in rounds)
    row: dict[str, Any] = {"gb_per_s": moved / taken / 1e9, "us": taken / calls * 1e6}
    for name in libraries:
        if name != ours:
            ratios = [taken[name] / taken[ours] for taken in rounds]
            row[f"x_{name}"], row[f"x_{name}_quartiles"] = spread(ratios)
            row[f"gb_per_s_{name}"] = moved / statistics.median(t[name] for t in rounds) / 1e9
    row["rounds"] = len(rounds)
    return row


def say(row: dict[str, Any], ours: str) -> None:
    text = f"{row['case']:34} {row['us']:10.1f} us {row['gb_per_s']:7.2f} GB/s"
    for name in PEERS[ours]:
        if f"x_{name}" in row:
            text += f"   {row[f'x_{name}']:.2f}x {name} ({row[f'gb_per_s_{name}']:.2f})"
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def start(
    ours: str, options: argparse.Namespace, stack: ExitStack
) -> tuple[dict[str, Library], list[dict[str, Any]]]:
    """Return the libraries of a transport, which the stack ends, and what is left out."""
    libraries, left_out = {}, []
    for name in (ours, *PEERS[ours]):
        if name in options.without:
            continue
        try:
            libraries[name] = stack.enter_context(Library(name, REGION_BYTES))
        except (Missing, Ended) as why:
            if name == ours and isinstance(why, Ended):
                raise
            left_out.append({"case": name, "left_out": str(why)})
            sys.stdout.write(f"{name} left out: {why}\n")
    return libraries, left_out


def main() -> None:
    options = arguments(__doc__, add_options, without=("device", "seconds"))
    head, rows, left_out = heading("transfer", options), [], []
    for ours in options.transports:
        with ExitStack() as stack:
            libraries, missing = start(ours, options, stack)
            left_out += missing
            if ours not in libraries:
                continue
            for verb, (size, batch) in itertools.product(options.operation, chosen(options)):
                case = name_of(ours, verb, size, batch)
                room = REGION_BYTES // options.threads
                if batch > room // size:
                    why = f"a thread has {room} bytes"
                    left_out.append({"case": case, "left_out": why})
                    sys.stdout.write(f"{case} left out: {why}\n")
                    continue
                work = jobs(verb, size, batch, options.threads, options.quick)
                rows.append({"case": case, **measure(ours, libraries, work, options)})
                say(rows[-1], ours)
                save(head, rows, options, left_out)
    save(head, rows, options, left_out)


if __name__ == "__main__":
    main()
