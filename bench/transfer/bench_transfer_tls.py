"""What a secret costs over tcp: by TLS, and with authenticated frames alone, against neither.

The processes, the memory and the calls of bench_transfer.py, in turn in one run. `gb_per_s` and
`us` are those of TLS with a key that comes from the secret; `x_tcp` and `x_tcp-secret-only` are how
fast that is compared with plain tcp and with a secret alone.
"""

import itertools
import sys
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib and baselines

from bench_transfer import REGION_BYTES, jobs, measure, name_of

from baselines.transfer import Library
from lib.harness import arguments
from lib.table import heading, save

OURS = "tcp-secret"
SIDES = (OURS, "tcp-secret-only", "tcp")
CASES = [(4 << 10, 1), (64 << 10, 1), (1 << 20, 1), (16 << 10, 4096), (64 << 20, 1)]
QUICK = [(4 << 10, 1), (16 << 10, 128)]


def main() -> None:
    options = arguments(__doc__, without=("device", "seconds"))
    head, rows = heading("transfer_tls", options), []
    with ExitStack() as stack:
        sides = {name: stack.enter_context(Library(name, REGION_BYTES)) for name in SIDES}
        cases = QUICK if options.quick else CASES
        for verb, (size, batch) in itertools.product(("write", "read"), cases):
            work = jobs(verb, size, batch, options.threads, options.quick)
            row = {"case": name_of(OURS, verb, size, batch), **measure(OURS, sides, work, options)}
            rows.append(row)
            text = f"{row['case']:38} {row['us']:10.1f} us {row['gb_per_s']:6.2f} GB/s"
            for name in SIDES[1:]:
                text += f"   {row[f'x_{name}']:.2f}x {name}"
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
            save(head, rows, options, [])


if __name__ == "__main__":
    main()
