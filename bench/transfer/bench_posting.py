"""The CPU time that a caller spends on building and posting a batch of blocks, a block.

It is that of the calling thread in ``write_blocks``, which returns before the data has moved; the
wait for it is not counted, nor are the engine's threads. Blocks are given by their addresses, in
arrays, or by their ids in pools: half of the memory in random order, so that few are merged. The
peer is a process of this machine. A call follows the transfer of the one before, so that of a large
one little of what the caller needs is left in the cache, its code included. Nor is what the clock
needs: what a call of nothing takes there is measured in turn, and subtracted. "row": calls that
follow each other, as those of a batch in parts, before any of them is waited for. Figures are
medians.
"""

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib and baselines

import mooncake_kernels as mk
from lib.harness import arguments
from lib.processes import new_processes
from lib.table import heading, save

TRANSPORTS = ("tcp", "shm")
CASES = [  # blocks, bytes of one
    (256, 16 << 10),
    (1024, 16 << 10),
    (4096, 128),
    (4096, 16 << 10),
    (16384, 4 << 10),
    (100_000, 64),
]
IN_A_ROW = 3  # behind the first
REGION_BYTES = 2 * max(count * size for count, size in CASES)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--transports", nargs="+", default=list(TRANSPORTS), choices=TRANSPORTS)


def serve(pipe: Any) -> None:
    """The peer process."""
    memory = np.zeros(REGION_BYTES, np.uint8)
    with mk.TransferEngine() as engine, contextlib.suppress(EOFError):
        pipe.send((engine.name, engine.register(memory).address))
        while True:
            count, size, ids = pipe.recv()
            blocks = memory[: 2 * count * size].reshape(-1, size)
            written = blocks[ids].tobytes()
            blocks[:] = 0
            pipe.send(written)


class Batch:
    """A request, in either form."""

    def __init__(self, engine: Any, peer: Any, places: tuple[int, int], count: int, size: int):
        random = np.random.default_rng(0)
        self.shape = count, size
        self.ids = [2 * random.permutation(count) for _ in places]
        addresses = [place + ids * size for place, ids in zip(places, self.ids, strict=True)]
        pools = [mk.BlockPool([place], 2 * count, size) for place in places]
        self.forms: dict[str, Callable[[], Any]] = {
            "arrays": lambda: engine.write_blocks(peer, *addresses, size),
            "paged": lambda: engine.write_blocks(
                peer, pools[0].blocks(self.ids[0]), pools[1].blocks(self.ids[1])
            ),
        }

    def check(self, pipe: Any, memory: np.ndarray) -> None:
        count, size = self.shape
        expected = memory[: 2 * count * size].reshape(-1, size)[self.ids[0]].tobytes()
        for form, post in self.forms.items():
            post().wait()
            pipe.send((count, size, self.ids[1]))
            assert pipe.recv() == expected, f"{form}: not what was written: not timed"

    def ns_a_block(self) -> dict[str, float]:
        """Post it in either form, alone and in a row."""
        taken = {}
        for form, post in self.forms.items():
            taken[form], ticket = self._timed(post)
            ticket.wait()
        nothing, _ = self._timed(lambda: None)
        post = self.forms["arrays"]
        first = post()
        row, others = self._timed(lambda: [post() for _ in range(IN_A_ROW)])
        for ticket in [first, *others]:
            ticket.wait()
        ns = {f"ns_{form}": ns - nothing for form, ns in taken.items()}
        return ns | {"ns_row": row / IN_A_ROW, "ns_nothing": nothing}

    def _timed(self, call: Callable[[], Any]) -> tuple[float, Any]:
        start = time.thread_time_ns()
        result = call()
        return (time.thread_time_ns() - start) / self.shape[0], result


def measure(transport: str, options: argparse.Namespace) -> Any:
    """Yield the row of each case."""
    context = new_processes()
    pipe, theirs = context.Pipe()
    context.Process(target=serve, args=(theirs,), daemon=True).start()
    name, remote = pipe.recv()
    memory = np.random.default_rng(1).integers(0, 256, REGION_BYTES, np.uint8)
    with mk.TransferEngine(transports=[transport]) as engine:
        places = engine.register(memory).address, remote
        peer = engine.open(name)
        for count, size in CASES:
            batch = Batch(engine, peer, places, count, size)
            batch.check(pipe, memory)
            batch.ns_a_block()
            rounds = [batch.ns_a_block() for _ in range(options.repeat)]
            medians = {form: statistics.median(row[form] for row in rounds) for form in rounds[0]}
            yield {"case": f"{transport}, {count} x {size} bytes", **medians}


def main() -> None:
    options = arguments(__doc__, add_options, without=("device", "seconds"))
    head, rows = heading("posting", options), []
    for transport in options.transports:
        for row in measure(transport, options):
            rows.append(row)
            forms = "ns_arrays", "ns_row", "ns_paged", "ns_nothing"
            told = "  ".join(f"{form[3:]} {row[form]:6.1f}" for form in forms)
            sys.stdout.write(f"{row['case']:28} ns a block: {told}\n")
            sys.stdout.flush()
            save(head, rows, options)


if __name__ == "__main__":
    main()
