"""NIXL's API on this project's engine, and NIXL's wheel with its UCX backend, in turn.

Both by the calls of vLLM's NixlConnector: descriptors of all blocks are prepared once; a transfer
is made of indices (numpy), posted, polled until it is done, and released. Initiator and target are
processes on this machine, blocks lie at random places in 256 MiB. `x_wheel` is how many times as
fast as the wheel a transfer is. Without the wheel (`pip install --no-deps nixl nixl-cu12`) its
columns are missing.
"""

import itertools
import sys
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib and baselines
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "transfer"))

from bench_transfer import REGION_BYTES, jobs, measure, name_of

from baselines.transfer import Ended, Library, Missing
from lib.harness import arguments
from lib.table import heading, save

CASES = [(4 << 10, 1), (4 << 10, 512), (16 << 10, 512), (64 << 10, 256), (1 << 20, 16)]
QUICK = [(4 << 10, 512), (64 << 10, 16)]


def main() -> None:
    options = arguments(__doc__, without=("device", "seconds"))
    head, rows, left_out = heading("nixl", options), [], []
    for transport in ("tcp", "shm"):
        ours, wheel = f"nixl-compat-{transport}", f"nixl-wheel-{transport}"
        with ExitStack() as stack:
            sides = {ours: stack.enter_context(Library(ours, REGION_BYTES))}
            try:
                sides[wheel] = stack.enter_context(Library(wheel, REGION_BYTES))
            except (Missing, Ended) as why:
                left_out.append({"case": wheel, "left_out": str(why)})
            cases = QUICK if options.quick else CASES
            for verb, (size, batch) in itertools.product(("read", "write"), cases):
                work = jobs(verb, size, batch, options.threads, options.quick)
                row = measure(ours, sides, work, options)
                row = {name.replace(wheel, "wheel"): value for name, value in row.items()}
                rows.append({"case": name_of(transport, verb, size, batch), **row})
                text = f"{rows[-1]['case']:30} {row['us']:10.1f} us {row['gb_per_s']:6.2f} GB/s"
                if "x_wheel" in row:
                    text += f"   {row['x_wheel']:.2f}x the wheel ({row['gb_per_s_wheel']:.2f})"
                sys.stdout.write(text + "\n")
                sys.stdout.flush()
                save(head, rows, options, left_out)


if __name__ == "__main__":
    main()
