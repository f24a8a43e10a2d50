"""Whether memory, descriptors and threads grow over millions of transfers, in both processes.

The processes of bench_transfer.py; two threads make blocking writes of 4 KiB. `growth_` is what
either process has gained from the first tenth of the transfers to the end: of resident memory in
KiB, of descriptors, of threads.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib and baselines

from bench_transfer import REGION_BYTES, jobs

from baselines.transfer import Library
from lib.harness import arguments, at_least
from lib.table import heading, save

TRANSPORTS = ("tcp", "shm", "shm-mapped")
SIZE, NUM_THREADS, NUM_SAMPLES = 4 << 10, 2, 10
SIDES = ("initiator", "target")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--transports", nargs="+", default=list(TRANSPORTS), choices=TRANSPORTS)
    parser.add_argument("--transfers", type=at_least(100), default=10_000_000)


def used_by(pid: int) -> dict[str, int]:
    """Resident KiB, descriptors and threads of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    return {
        "kib": int(status["VmRSS"].split()[0]),
        "fds": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(status["Threads"]),
    }


def measure(ours: str, num_transfers: int) -> dict[str, Any]:
    with Library(ours, REGION_BYTES) as library:
        work = jobs("write", SIZE, 1, NUM_THREADS, quick=False)
        for job in work:
            job.count = num_transfers // NUM_SAMPLES // NUM_THREADS
        library.check(work[0])
        taken, samples = 0.0, []
        for _ in range(NUM_SAMPLES):
            taken += library.run(work)
            samples.append([used_by(process.pid) for process in library.processes])
    done = NUM_SAMPLES * NUM_THREADS * work[0].count
    row: dict[str, Any] = {"case": ours, "transfers": done, "us": taken / done * 1e6}
    for side, first, last in zip(SIDES, samples[0], samples[-1], strict=True):
        grown = {what: last[what] - first[what] for what in first}
        row |= {f"growth_{what}_{side}": grown[what] for what in grown}
        row |= {f"kib_{side}": [sample[SIDES.index(side)]["kib"] for sample in samples]}
    return row


def main() -> None:
    options = arguments(__doc__, add_options, without=("device", "seconds"))
    head, rows = heading("transfer_memory", options), []
    for ours in options.transports:
        row = measure(ours, 20_000 if options.quick else options.transfers)
        rows.append(row)
        text = f"{ours:12} {row['transfers']:9} transfers, {row['us']:5.1f} us each"
        for side in SIDES:
            kib, fds, threads = (row[f"growth_{what}_{side}"] for what in ("kib", "fds", "threads"))
            text += f"   {side}: {kib:+} KiB, {fds:+} descriptors, {threads:+} threads"
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
        save(head, rows, options, [])


if __name__ == "__main__":
    main()
