"""The engine between two NICs and perftest between the same two, in turn.

One request at a time: 32 MiB in one range, and as scattered blocks of 16 KiB. perftest keeps 128
messages in flight, of 1 MiB, and for scattered blocks of 16 KiB as well, and busy-polls; ours
sleeps. Both ends are on this machine.
Without RDMA NICs it runs in a guest with soft-RoCE, whose emulated processor is the limit.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib and baselines

import mooncake_kernels as mk
from baselines import perftest
from baselines.perftest import few_rounds, in_turn
from lib import in_guest
from lib.harness import arguments
from lib.rdma_link import BLOCK, Link, row, say
from lib.table import heading, save

MIB = 1 << 20


def cases(names: list[str], options: argparse.Namespace) -> Any:
    num_bytes = (8 if options.quick else 32) * MIB
    link = Link(names[:1], names[1:], num_bytes)
    for verb in ("write", "read"):
        link.check(verb)
        for shape, message in (("contiguous", MIB), ("scattered", MIB), ("scattered", BLOCK)):
            rounds = in_turn(
                lambda verb=verb, shape=shape: link.move(verb, shape),
                lambda verb=verb, message=message: perftest.gb_per_s(
                    verb, names, message, num_bytes // message
                ),
                options,
            )
            yield row(f"{verb}, {shape}, messages of {message >> 10} KiB", "perftest", rounds)
    link.close()


def main() -> None:
    options = arguments(__doc__, few_rounds, without=("device", "seconds"))
    in_guest.leave_unless_nics(options, 2)
    names = [device.name for device in mk.rdma.devices()[:2]]
    head, rows = heading("transfer_rdma", options), []
    head["nics"] = "soft-RoCE in a QEMU guest" if names[0].startswith("rxe") else names
    for found in cases(names, options):
        rows.append(found)
        say(found, "perftest")
        save(head, rows, options)


if __name__ == "__main__":
    main()
