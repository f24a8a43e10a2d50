"""Writes and reads between two NICs, in turn with perftest's between the same two.

Each message is a separate work request, all to the same place, as perftest's are. GB/s counts the
bytes on the wire, once. perftest busy-polls for completions; ours sleeps, except for the latency:
from the call to its completion, like perftest's ib_read_lat. Ours includes Python. Without RDMA
NICs it runs in a guest with soft-RoCE.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib and baselines

import mooncake_kernels as mk
from baselines import perftest
from baselines.perftest import DEPTH, few_rounds, in_turn
from lib import in_guest, rdma_link
from lib.harness import arguments, spread
from lib.table import heading, save

SIZES = (4 << 10, 64 << 10, 1 << 20, 8 << 20)


class Link:
    """Two NICs, connected, and one buffer on each."""

    def __init__(self, names: list[str], num_bytes: int):
        sides = []
        for name in names:
            device = mk.rdma.open(name)
            queue = device.completion_queue(2 * DEPTH)
            memory = np.zeros(num_bytes, np.uint8)
            region = device.register(memory, "remote_read_write")
            sides.append((queue, queue.queue_pair(max_sends=DEPTH), memory, region))
        self.queue, self.pair, self.memory, self.region = sides[0]
        _, self.other_pair, self.other_memory, self.other = sides[1]
        self.pair.connect(self.other_pair.endpoint)
        self.other_pair.connect(self.pair.endpoint)

    def move(self, verb: str, size: int, count: int, spin_s: float = 0.0) -> None:
        row = (self.region.address, self.other.address, size)
        call = getattr(self.pair, verb)
        token = call(self.region, self.other.remote, [row] * count)
        self.queue.wait(token, timeout_s=300.0, spin_s=spin_s)

    def check(self, verb: str, size: int) -> None:
        source, target = self.memory, self.other_memory
        if verb == "read":
            source, target = target, source
        source[:size] = np.random.default_rng(size).integers(0, 256, size, np.uint8)
        self.move(verb, size, 1)
        assert (source[:size] == target[:size]).all(), "wrong: not timed"


def bandwidth(
    link: Link, names: list[str], verb: str, size: int, options: argparse.Namespace
) -> dict[str, Any]:
    count = max((4 if options.quick else 32) * (1 << 20) // size, 16)  # messages

    def ours() -> float:
        start = time.perf_counter()
        link.move(verb, size, count)
        return size * count / (time.perf_counter() - start) / 1e9

    link.check(verb, size)
    theirs = lambda: perftest.gb_per_s(verb, names, size, count)  # noqa: E731
    rounds = in_turn(ours, theirs, options)
    return rdma_link.row(f"{verb}, messages of {size >> 10} KiB", "perftest", rounds)


def latency(link: Link, names: list[str], options: argparse.Namespace) -> dict[str, Any]:
    count = 200 if options.quick else 1000

    def ours() -> float:
        taken = []
        for _ in range(count):
            start = time.perf_counter()
            link.move("read", 8, 1, spin_s=0.1)
            taken.append(time.perf_counter() - start)
        return statistics.median(taken) * 1e6

    rounds = in_turn(ours, lambda: perftest.read_us(names, 8, count), options)
    ratio, quartiles = spread([b / a for a, b in rounds])
    return {
        "case": "read of 8 bytes, call to completion",
        "us": statistics.median(a for a, _ in rounds),
        "us_perftest": statistics.median(b for _, b in rounds),
        "x_perftest": ratio,
        "x_perftest_quartiles": quartiles,
        "rounds": len(rounds),
    }


def main() -> None:
    options = arguments(__doc__, few_rounds, without=("device", "seconds"))
    in_guest.leave_unless_nics(options, 2)
    names = [device.name for device in mk.rdma.devices()[:2]]
    head, rows = heading("rdma", options), []
    head["nics"] = "soft-RoCE in a QEMU guest" if names[0].startswith("rxe") else names
    sizes = SIZES[1:3] if options.quick else SIZES
    link = Link(names, max(sizes))
    for verb in ("write", "read"):
        for size in sizes:
            rows.append(bandwidth(link, names, verb, size, options))
            rdma_link.say(rows[-1], "perftest")
            save(head, rows, options)
    rows.append(latency(link, names, options))
    rdma_link.say(rows[-1], "perftest")
    save(head, rows, options)


if __name__ == "__main__":
    main()
