"""The engine over two NICs a side and over one a side, in turn.

One request at a time: 32 MiB in one range, and as scattered blocks of 16 KiB. Both ends are on
this machine. Without RDMA NICs it runs in a guest with soft-RoCE, where a NIC may send 160 Mbit/s,
a third or less of what the guest's emulated processor manages for all of them together. There,
last, the second NIC of either side may send a quarter of that, which their ports do not report:
`x_sum` compares both at once with the sum of either alone, `x_equal_split` with twice the slow one.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib and baselines

import mooncake_kernels as mk
from baselines.perftest import few_rounds, in_turn
from lib import in_guest
from lib.harness import arguments
from lib.rdma_link import Link, row, say
from lib.table import heading, save

MIB = 1 << 20
WIRE_MBIT, SLOW_MBIT = 160, 40


def cases(names: list[str], options: argparse.Namespace) -> Any:
    num_bytes = (8 if options.quick else 32) * MIB
    one = Link(names[:1], names[1:2], num_bytes)
    two = Link(names[0::2], names[1::2], num_bytes)
    for verb in ("write", "read"):
        one.check(verb)
        two.check(verb)
        for shape in ("contiguous", "scattered"):
            rounds = in_turn(
                lambda verb=verb, shape=shape: two.move(verb, shape),
                lambda verb=verb, shape=shape: one.move(verb, shape),
                options,
            )
            yield row(f"{verb}, {shape}, two NICs a side", "one", rounds)
    one.close()
    two.close()


def unequal(names: list[str], options: argparse.Namespace) -> Any:
    """Each request is large enough to last longer than a slice on the slow wire."""
    num_bytes = (8 if options.quick else 32) * MIB
    for name in names[2:]:
        in_guest.limit_wire(name, SLOW_MBIT)
    both = Link(names[0::2], names[1::2], num_bytes)
    fast = Link(names[:1], names[1:2], num_bytes)
    slow = Link(names[2:3], names[3:], num_bytes * SLOW_MBIT // WIRE_MBIT)
    for verb in ("write", "read"):
        for link in (both, fast, slow):
            link.check(verb)
        before, alone = both.moved(verb), []

        def apart(verb: str = verb, alone: list[tuple[float, float]] = alone) -> float:
            alone.append((fast.move(verb, "contiguous"), slow.move(verb, "contiguous")))
            return sum(alone[-1])

        rounds = in_turn(lambda verb=verb: both.move(verb, "contiguous"), apart, options)
        found = row(f"{verb}, {WIRE_MBIT} and {SLOW_MBIT} Mbit/s", "sum", rounds)
        moved = [now - then for now, then in zip(both.moved(verb), before, strict=True)]
        found["gb_per_s_slow"] = statistics.median(by_slow for _, by_slow in alone)
        found["x_equal_split"] = found["gb_per_s"] / (2 * found["gb_per_s_slow"])
        found["percent_by_slow"] = 100 * moved[1] / sum(moved)
        yield found
    for link in (both, fast, slow):
        link.close()


def main() -> None:
    options = arguments(__doc__, few_rounds, without=("device", "seconds"))
    in_guest.leave_unless_nics(options, 4, wire_mbit=WIRE_MBIT)
    names = [device.name for device in mk.rdma.devices()[:4]]
    head, rows = heading("transfer_nics", options), []
    guest = f"soft-RoCE in a QEMU guest, {WIRE_MBIT} Mbit/s each"
    head["nics"] = guest if names[0].startswith("rxe") else names
    for found in cases(names, options):
        rows.append(found)
        say(found, "one")
        save(head, rows, options)
    for found in unequal(names, options) if names[0].startswith("rxe") else ():
        rows.append(found)
        say(found, "sum")
        save(head, rows, options)


if __name__ == "__main__":
    main()
